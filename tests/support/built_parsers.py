"""An output parser as another distribution would add it."""

from __future__ import annotations

from anyengine import ParsedDelta

__all__ = ["ShoutParser"]


class ShoutParser:
    """Everything in capitals."""

    def push(self, text: str) -> ParsedDelta:
        return ParsedDelta(content=text.upper())

    def finish(self) -> ParsedDelta:
        return ParsedDelta(content="!")
