"""What explored operations work on: a client and its engine, in memory or as a process behind ZeroMQ.

Owns the engines and what can be said of them after everything; the rules are :mod:`explorer`'s.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Protocol

from engines import misbehaving, toy

from anyengine import EngineClient, RestartPolicy
from explored_engine import ExploredEngine

__all__ = ["Bench", "MemoryBench", "ProcessBench"]


class Bench(Protocol):
    """Makes the client that all points of a kind share, and clients that an operation has for itself."""

    @property
    def finished(self) -> Collection[str]:
        """The wire ids that the engines have ended by themselves."""
        ...

    def client(self, restart: RestartPolicy | None = None) -> EngineClient: ...

    def another(self) -> EngineClient: ...

    async def running(self, client: EngineClient) -> int:
        """How many requests the shared engine still has."""
        ...

    async def paused(self, client: EngineClient) -> bool:
        """Whether the shared engine is paused."""
        ...


class MemoryBench:
    """Deterministic; thousands of points a minute. Several ranks are several engines."""

    def __init__(self, ranks: int = 1) -> None:
        self.finished: set[str] = set()
        self._engines = [ExploredEngine(self.finished) for _ in range(ranks)]

    def client(self, restart: RestartPolicy | None = None) -> EngineClient:
        engines = [engine.settings() for engine in self._engines]
        return EngineClient(engine=engines, liveness_timeout_s=None, restart=restart)

    def another(self) -> EngineClient:
        engine = ExploredEngine(self.finished)  # one record
        return EngineClient(engine=engine.settings(), liveness_timeout_s=None)

    async def running(self, client: EngineClient) -> int:
        return sum(len(engine.running) + len(engine.pooled) for engine in self._engines)

    async def paused(self, client: EngineClient) -> bool:
        return any(engine.paused for engine in self._engines)


class ProcessBench:
    """The embedded engine with a toy model; and, for a client of an operation's own, the lightest peer that there is,
    which gives each request one token, and no end."""

    finished: Collection[str] = ()  # nobody tells: what the client has seen the end of counts

    def client(self, restart: RestartPolicy | None = None) -> EngineClient:
        return EngineClient(engine=toy(step_delay_s=0.001, max_model_len=1 << 20), restart=restart)

    def another(self) -> EngineClient:
        return EngineClient(engine=misbehaving("record", os.devnull))

    async def running(self, client: EngineClient) -> int:
        statistics = await client.core.utility("get_engine_statistics")
        return int(statistics["num_running_requests"] + statistics["num_waiting_requests"])

    async def paused(self, client: EngineClient) -> bool:
        return await client.is_paused()
