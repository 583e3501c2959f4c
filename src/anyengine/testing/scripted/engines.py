"""Scripted engines to be given to a client: a process, or its twin in memory.

Owns the way from a script to an engine setting, and from its log back to the test.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from anyengine.config import CommandEngine, InMemoryEngine

from .records import Record, read_records
from .script import Script

if TYPE_CHECKING:
    from anyengine._process.task_child import TaskHost
    from anyengine._transport.memory import MemoryLink

__all__ = ["ScriptedEngine", "ScriptedProcess", "ScriptedTwin"]


class ScriptedEngine(ABC):
    """A scripted engine, whichever way it runs. ``engine`` goes to ``EngineClient(engine=...)``, several times for
    several ranks, and again for another block; the log goes on."""

    engine: CommandEngine | InMemoryEngine

    def __init__(self, script: Script) -> None:
        self.script = script

    @abstractmethod
    def records(self) -> list[Record]:
        """The log so far."""

    def received(self, kind: str | None = None) -> list[Any]:
        """The bodies of the messages that it has received (of one ``kind``), in order: lists by position, as
        docs/protocol.md has them."""
        return [one.body for one in self.records() if one.direction == "in" and kind in (None, one.kind)]

    def scheduled(self) -> list[str]:
        """The wire ids of the requests that have left its queue, in order."""
        return [one.body for one in self.records() if one.kind == "scheduled"]


class ScriptedProcess(ScriptedEngine):
    """A process of its own, behind ZeroMQ. ``log`` is a file, to which JSON lines are added; without it nothing is
    logged."""

    engine: CommandEngine

    def __init__(self, script: Script | None = None, *, log: Path | None = None, model_dir: str | None = None) -> None:
        super().__init__(script or Script())
        self._log = log
        argv = [sys.executable, "-m", "anyengine.testing.scripted", msgspec.json.encode(self.script).decode()]
        if log is not None:
            argv.append(str(log))
        self.engine = CommandEngine(argv=tuple(argv), model_dir=model_dir)

    def records(self) -> list[Record]:
        """The log so far.

        Raises:
            ValueError: it was made without ``log``.
        """
        if self._log is None:
            raise ValueError("this engine has no log: give log=path when it is made")
        return read_records(self._log)


class ScriptedTwin(ScriptedEngine):
    """The same engine as a task of the client, over the in-memory transport: no process, no sockets, any event loop.
    Signals are what :class:`~anyengine._process.task_child.TaskChild` makes of them."""

    engine: InMemoryEngine

    def __init__(self, script: Script | None = None, *, model_dir: str | None = None) -> None:
        super().__init__(script or Script())
        if self.script.grandchildren:
            raise ValueError("an engine in memory has no grandchildren: use ScriptedProcess")
        self._records: list[Record] = []
        self.engine = InMemoryEngine(serve=self._serve, model_dir=model_dir)

    def records(self) -> list[Record]:
        """The log so far."""
        return list(self._records)

    async def _serve(self, link: MemoryLink, rank: int, host: TaskHost) -> None:
        from .in_memory import serve_in_memory  # loads the event loop's side, which a process does without

        await serve_in_memory(self.script, link, rank, host, self._records.append)
