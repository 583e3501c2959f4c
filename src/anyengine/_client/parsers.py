"""Output parsers by name: those that come with the package, and those that other distributions add.

Owns the table and the look-up. A distribution adds a parser as an entry point of the group
``anyengine.output_parsers``: its name, and something that makes a new :class:`OutputParser` when it is called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from anyengine._text.output_parsers import ChatParser, HermesToolParser, JsonToolParser, OutputParser, ThinkParser

__all__ = ["output_parser"]

_GROUP: Final = "anyengine.output_parsers"
_OURS: Final[dict[str, Callable[[], OutputParser]]] = {
    "deepseek_r1": lambda: ThinkParser(begins_inside=True),
    "hermes": HermesToolParser,
    "json": JsonToolParser,
    "qwen3": ThinkParser,
    "think": ThinkParser,
}


def output_parser(reasoning: str | None = None, tools: str | None = None) -> OutputParser:
    """A new parser of reasoning (``"think"``, ``"qwen3"``, ``"deepseek_r1"``), of tool calls (``"hermes"``,
    ``"json"``), or of both, by name; each may be one that an installed distribution adds.

    Raises:
        ValueError: no name is given, or there is no parser of it.
    """
    if reasoning is None and tools is None:
        raise ValueError("give reasoning=, tools= or both: the name of a parser")
    if reasoning is None or tools is None:
        return _made(reasoning or tools or "")
    return ChatParser(_made(reasoning), _made(tools))


def _made(name: str) -> OutputParser:
    if name in _OURS:
        return _OURS[name]()
    added = entry_points(group=_GROUP)
    if name in added.names:
        make: Callable[[], OutputParser] = added[name].load()
        return make()
    known = ", ".join(sorted({*_OURS, *added.names}))
    raise ValueError(f"there is no output parser {name!r}: use one of {known}")
