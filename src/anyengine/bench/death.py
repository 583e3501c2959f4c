"""How long it takes from the death of an engine until the last of many consumers has been told.

Owns one measurement. The engine notes in its log when it is about to die; both clocks are the system's monotonic one.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeAlias

import anyio
import msgspec

from anyengine import EngineClient, EngineDeadError, SamplingParams
from anyengine.testing.scripted import Fault, Script, ScriptedProcess

__all__ = ["WAYS", "DeathTimes", "Way", "measure_deaths"]

Way: TypeAlias = Literal["kill", "exit", "dead_exit", "dead"]
WAYS: tuple[Way, ...] = ("kill", "exit", "dead_exit", "dead")
"""SIGKILL; an exit code; ENGINE_CORE_DEAD and then an exit, as vLLM's engine does it; ENGINE_CORE_DEAD of an engine
that lives on."""

_TPOT_S = 1.0  # streams that are open, and now and then get something


class DeathTimes(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, in milliseconds from the death: of all consumers of all rounds, and of the last one of each
    round."""

    way: Way
    streams: int
    rounds: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    last_consumer_ms: list[float]


async def measure_deaths(
    way: Way, *, streams: int, rounds: int, on_round: Callable[[Way, int], None] = lambda way, number: None
) -> DeathTimes:
    """Let an engine with so many open streams die, again and again.

    Cancellation: the engine is gone before it propagates.
    """
    told_ms: list[float] = []
    last_ms: list[float] = []
    quiet = logging.getLogger("anyengine.client")
    level = quiet.level
    quiet.setLevel(logging.CRITICAL)  # the deaths are meant
    try:
        for number in range(rounds):
            times_ms = await _one_death(way, streams)
            told_ms += times_ms
            last_ms.append(times_ms[-1])
            on_round(way, number + 1)
    finally:
        quiet.setLevel(level)
    told_ms.sort()
    return DeathTimes(
        way=way,
        streams=streams,
        rounds=rounds,
        p50_ms=_quantile(told_ms, 0.5),
        p99_ms=_quantile(told_ms, 0.99),
        max_ms=round(told_ms[-1], 3),
        last_consumer_ms=[round(value, 3) for value in last_ms],
    )


async def _one_death(way: Way, streams: int) -> list[float]:
    """Milliseconds from the death to each consumer, in order."""
    with tempfile.TemporaryDirectory(prefix="anyengine-bench-") as directory:
        fault = Fault(do=way, direction="in", kind="profile")
        script = Script(faults=(fault,), step_interval_s=_TPOT_S, registration={"max_num_seqs": streams})
        engine = ScriptedProcess(script, log=Path(directory) / "log")
        told_s: list[float] = []
        opened = 0
        all_open = anyio.Event()

        async def consume(client: EngineClient, first: int) -> None:
            nonlocal opened
            fresh = True
            with suppress(EngineDeadError):
                async for _ in client.generate([first % 1000], SamplingParams(max_tokens=2000)):
                    if fresh:
                        fresh = False
                        opened += 1
                        if opened == streams:
                            all_open.set()
            told_s.append(time.monotonic())

        async with (
            EngineClient(engine=engine.engine, liveness_timeout_s=None, shutdown_grace_s=0.1) as client,
            anyio.create_task_group() as consumers,
        ):
            for first in range(streams):
                consumers.start_soon(consume, client, first)
            await all_open.wait()
            with suppress(EngineDeadError):
                await client.core.utility("profile")
        (died_s,) = [one.at_s for one in engine.records() if one.kind == "fault"]
    return sorted((at_s - died_s) * 1000 for at_s in told_s)


def _quantile(ordered: list[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 3)
