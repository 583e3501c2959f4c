"""An engine in memory that is another one each time it is started: for tests of restarts."""

from __future__ import annotations

from typing import Any

from anyengine.config import InMemoryEngine
from anyengine.testing.scripted import Script, ScriptedTwin

__all__ = ["Incarnations"]


class Incarnations:
    """An engine that is started with one script after the other, the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.twins = [ScriptedTwin(script) for script in scripts]
        self.starts = 0
        self.engine = InMemoryEngine(serve=self._serve)

    async def _serve(self, link: Any, rank: int, host: Any) -> None:
        self.starts += 1
        await self.twins[min(self.starts, len(self.twins)) - 1]._serve(link, rank, host)

    def added(self) -> list[str]:
        return [added[0] for twin in self.twins for added in twin.received("add")]
