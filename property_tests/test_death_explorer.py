"""The exhaustive death explorer: an engine is killed, hung, cut off or garbled before and after each message of a
session, and at every such point everyone must be told, once, of one cause, and nothing may be left.

In memory on all three loops; and over ZeroMQ with a real process, of which each loop takes a third of the points.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from anyengine.testing.scripted import Fault, Script, ScriptedEngine, ScriptedProcess, ScriptedTwin
from budgets import PROFILE
from death_sessions import SPOILING, Visit, record, violations, visit
from tally import TALLY

pytestmark = [pytest.mark.anyio, pytest.mark.blocking_ok]

DEATHS = ("kill", "exit", "dead", "dead_exit", "close_input", "close_output", "hang", "deaf", "mute")
LOOPS = 3
EVERY, EVERY_REAL = {"dev": (10, 39), "ci": (1, 13), "deep": (1, 3)}[PROFILE]
"""One point of so many is visited; of those with a process each loop takes others."""
FIRST_SPOILT = 5  # the message before is the reply that a client waits for to be ready, with a limit of its own


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of deaths are thousands of lines, which a failing test would repeat."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def points(num_in: int, num_out: int) -> list[Fault]:
    """Every fault at every message."""
    found: list[Any] = [
        Fault(do=do, direction=direction, nth=nth, when=when, exit_code=7)  # type: ignore[arg-type]
        for do in DEATHS
        for direction, count in (("in", num_in), ("out", num_out))
        for nth in range(1, count + 1)
        for when in ("before", "after")
    ]
    found += [
        Fault(do=do, nth=nth, size_bytes=1 << 18)  # type: ignore[arg-type]
        for do in sorted(SPOILING)
        for nth in range(FIRST_SPOILT, num_out + 1)
    ]
    return found


async def explore(
    faults: list[Fault], make: Callable[[Script], ScriptedEngine], *, at_once: int, neighbour: bool = False
) -> list[Visit]:
    """Visit all of them."""
    visits: list[Visit] = []
    limiter = anyio.CapacityLimiter(at_once)

    async def go(fault: Fault) -> None:
        async with limiter:
            visits.append(await visit(fault, make, neighbour=neighbour))

    async with anyio.create_task_group() as tasks:
        for fault in faults:
            tasks.start_soon(go, fault)
    return visits


def judge(what: str, visits: list[Visit]) -> None:
    """Count the points, and fail with the violations."""
    found = violations(visits)
    reached = sum(seen.fired for seen in visits)
    TALLY[f"points of the death explorer, {what}"] += reached
    TALLY[f"violations of the death explorer, {what}"] += len(found)
    assert not found, "\n".join([f"{len(found)} violations at {reached} points", *found[:20]])
    assert reached > 0.8 * len(visits)  # the others come after the end of a session, whose length varies


def _number_of(loop: Any) -> int:
    backend, options = loop
    return 2 if options.get("use_uvloop") else ["asyncio", "trio"].index(backend)


@pytest.mark.timeout(900)
@pytest.mark.case("K01", "K02", "K07")
@pytest.mark.feature("L05", "L07")
async def test_every_death_in_memory() -> None:
    """The only engine dies: all are told of the one cause, later calls too, and the block ends in order."""
    faults = points(*await record(ScriptedTwin, neighbour=False))
    judge("one engine in memory", await explore(faults[::EVERY], ScriptedTwin, at_once=32))


@pytest.mark.timeout(900)
@pytest.mark.feature("L29")
async def test_every_death_beside_a_neighbour(anyio_backend: Any) -> None:
    """One rank of two dies: what the other one serves is not touched, and it goes on serving. Each loop takes a third
    of the points, or all of them in the deep profile."""
    faults = points(*await record(ScriptedTwin, neighbour=True))
    if PROFILE != "deep":
        faults = faults[_number_of(anyio_backend) :: LOOPS * EVERY]
    judge("one of two engines in memory", await explore(faults, ScriptedTwin, at_once=32, neighbour=True))


@pytest.mark.timeout(900)
@pytest.mark.case("K01", "K02", "K07")
@pytest.mark.feature("L05", "L07")
async def test_every_death_of_a_process(anyio_backend: Any, tmp_path: Path) -> None:
    """The same over ZeroMQ, with a process that really dies."""
    numbers = itertools.count()

    def make(script: Script) -> ScriptedProcess:
        return ScriptedProcess(script, log=tmp_path / f"log-{next(numbers)}")

    num_in, num_out = await record(make, neighbour=False)
    faults = points(num_in, min(num_out, 50))  # further ones depend on how fast the stream without end is
    judge("one process", await explore(faults[_number_of(anyio_backend) :: EVERY_REAL], make, at_once=4))
