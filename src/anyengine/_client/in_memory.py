"""Engine cores in the client's own process: how one is started, and given its connections.

Owns the choice of what runs. The embedded engine's thread is found by name, as ``python -m anyengine.engine`` finds its
process: the client does not import engines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any

from anyengine._process.task_process import TaskProcess
from anyengine._transport.memory_endpoints import MemoryEndpoints
from anyengine._wire import engine_identity
from anyengine.config import EmbeddedEngine, LaunchedEngine, MemoryEngine

__all__ = ["start_in_memory"]


def start_in_memory(engine: LaunchedEngine | MemoryEngine, endpoints: MemoryEndpoints, rank: int) -> TaskProcess:
    """An engine core that begins to run with its supervision."""
    main: Callable[[Any, Any], Awaitable[int | None]]
    if isinstance(engine, MemoryEngine):
        main = engine.main
    else:
        assert isinstance(engine, EmbeddedEngine)
        main = partial(import_module("anyengine.engine.in_process").run_in_thread, engine, rank)
    link = endpoints.link(engine_identity(rank))

    async def run(process: TaskProcess) -> int | None:
        with closing(link):
            return await main(link, process)

    return TaskProcess(run)
