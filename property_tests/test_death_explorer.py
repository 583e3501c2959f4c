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

from anyengine.testing._profiles import deep_profile
from anyengine.testing.scripted import Fault, Script, ScriptedEngine, ScriptedProcess, ScriptedTwin
from death_sessions import SPOILING, Visit, record, violations, visit

pytestmark = [pytest.mark.anyio, pytest.mark.blocking_ok]

DEATHS = ("kill", "exit", "dead", "dead_exit", "close_input", "close_output", "hang", "deaf", "mute")
LOOPS: dict[
    str, tuple[str, dict[str, bool]]
] = {  # no debug mode: it takes three times as long, for thousands of points
    "asyncio": ("asyncio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
FIRST_SPOILT = 5  # the message before is the reply that a client waits for to be ready, with a limit of its own


@pytest.fixture(scope="module", params=list(LOOPS.values()), ids=list(LOOPS))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


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


def report(what: str, visits: list[Visit], capsys: pytest.CaptureFixture[str]) -> None:
    """Say how many points there were, and fail with the violations."""
    found = violations(visits)
    died = sum(seen.fired for seen in visits)
    with capsys.disabled():
        print(f"\ndeath explorer, {what}: {len(visits)} points, {died} reached, {len(found)} violations")
    assert not found, "\n".join(found[:20])


def _number_of(loop: Any) -> int:
    return list(LOOPS.values()).index(loop)


@pytest.mark.timeout(900)
@pytest.mark.case("K01", "K02", "K07")
@pytest.mark.feature("L05", "L07")
async def test_every_death_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """The only engine dies: all are told of the one cause, later calls too, and the block ends in order."""
    faults = points(*await record(ScriptedTwin, neighbour=False))
    visits = await explore(faults, ScriptedTwin, at_once=32)
    report("one engine in memory", visits, capsys)
    assert sum(seen.fired for seen in visits) > 800


@pytest.mark.timeout(900)
@pytest.mark.feature("L29")
async def test_every_death_beside_a_neighbour(anyio_backend: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One rank of two dies: what the other one serves is not touched, and it goes on serving. Each loop takes a third
    of the points, or all of them in the deep profile."""
    faults = points(*await record(ScriptedTwin, neighbour=True))
    if not deep_profile():
        faults = faults[_number_of(anyio_backend) :: len(LOOPS)]
    visits = await explore(faults, ScriptedTwin, at_once=32, neighbour=True)
    report("one of two engines in memory", visits, capsys)


@pytest.mark.timeout(900)
@pytest.mark.case("K01", "K02", "K07")
@pytest.mark.feature("L05", "L07")
async def test_every_death_of_a_process(anyio_backend: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same over ZeroMQ, with a process that really dies."""
    numbers = itertools.count()

    def make(script: Script) -> ScriptedProcess:
        return ScriptedProcess(script, log=tmp_path / f"log-{next(numbers)}")

    num_in, num_out = await record(make, neighbour=False)
    faults = points(num_in, min(num_out, 50))  # further ones depend on how fast the stream without end is
    # Each loop takes others, and all of them some of every way to die.
    step = 3 if deep_profile() else 13
    visits = await explore(faults[_number_of(anyio_backend) :: step], make, at_once=4)
    report("one process", visits, capsys)
