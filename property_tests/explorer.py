"""The cancellation explorer: cancels an operation at its 1st, 2nd, 3rd ... scheduling step and looks at what is left.

Owns the stepping and the rules that hold after every cancellation; what can be done with a client is
:mod:`operations`'s. A point is one operation, cancelled in one way at one step; it is visited by running the operation
from its beginning, with a neighbour streaming beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import anyio
import anyio.lowlevel
import sniffio

from anyengine import ClientClosedError, ClientState, EngineClient, EngineError, SamplingParams
from anyengine.testing.toy_runner import expected_tokens
from benches import Bench, MemoryBench
from ledger import Ledger

__all__ = ["HOWS", "Case", "Explorer", "How", "Operation", "left_in_registries", "stepped"]

How: TypeAlias = Literal["scope", "scope, woken", "native", "native, woken", "native, twice", "asyncio.timeout"]
"""By which means, and when: as the task is about to wait; as it has been woken, in the same turn of the loop, so that
what it waited for is there and is not to be lost; or once more at the step after it, which is part of its clean-up."""


HOWS: Final[dict[str, tuple[How, ...]]] = {"asyncio": get_args(How), "trio": ("scope", "scope, woken")}
MAX_STEPS: Final = 500
MANY: Final = 4  # violations: nobody reads more


class Trigger:
    """Cancels at step ``at``, counted from 0, as ``how`` says. ``delivered``: the operation has been told, which on
    asyncio may not be so if it was woken in the same turn, and did not wait again."""

    def __init__(self, how: How, at: int, cancel: Callable[[], object]) -> None:
        self._how = how
        self._at = at
        self._cancel = cancel
        self.reached = False
        self.delivered = False

    def before_wait(self, step: int, trap: Any) -> None:
        if step == self._at or (step == self._at + 1 and self._how == "native, twice"):
            self.reached = True
            if self._how == "native, woken" and asyncio.isfuture(trap):
                trap.add_done_callback(lambda _: self._cancel())  # before the task's own, which wakes it
            elif self._how == "native, woken":
                asyncio.get_running_loop().call_soon(self._cancel)
            elif self._how != "scope, woken":
                self._cancel()

    def after_wait(self, step: int, error: BaseException | None) -> None:
        if isinstance(error, anyio.get_cancelled_exc_class()):
            self.delivered = self.reached
        if step == self._at and self._how == "scope, woken":
            self._cancel()


@types.coroutine
def stepped(coroutine: Coroutine[Any, Any, Any], trigger: Trigger) -> Generator[Any, Any, Any]:
    """Run ``coroutine`` in this task; ``trigger`` is told of each of its waits."""
    step, value, error = 0, None, None
    while True:
        try:
            trap = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        trigger.before_wait(step, trap)
        try:
            value, error = (yield trap), None
        except BaseException as exc:  # noqa: BLE001 - it is the coroutine's
            error = exc
        trigger.after_wait(step, error or getattr(value, "error", None))  # trio sends an outcome
        step += 1


@dataclass
class Case:
    """What an operation works with; ``clients`` are those that it has made for itself."""

    client: EngineClient
    bench: Bench
    clients: list[EngineClient] = field(default_factory=list)

    def another(self) -> EngineClient:
        """One more client, with an engine of its own, which the rules then hold for as well."""
        client = self.bench.another()
        self.clients.append(client)
        return client


@dataclass(frozen=True)
class Operation:
    """Something that is done with a client. ``shielded``: parts of it (the end of a task group for one) go on to their
    end once they have begun, and it may end normally though it was cancelled there. ``immediate``: it may not have to
    wait at all. ``pauses``: it may leave the engine paused. ``errors``: what it may raise."""

    name: str
    run: Callable[[Case], Awaitable[object]]
    shielded: bool = False
    immediate: bool = False
    pauses: bool = False
    errors: tuple[type[BaseException], ...] = ()


@dataclass(frozen=True)
class Point:
    """Where an operation is cancelled. ``phase``: how many turns of the loop after its neighbour's first item it
    begins."""

    operation: Operation
    how: How
    phase: int
    step: int

    def __str__(self) -> str:
        return f"{self.operation.name}, {self.how}, phase {self.phase}, step {self.step}"


@dataclass
class Explorer:
    """Visits points; ``violations`` says what it found. ``every``: one step of so many, for a quick look. ``phases``:
    in so many relations to the steps of the engine, which runs beside."""

    make_bench: Callable[[], Bench] = MemoryBench
    every: int = 1
    phases: int = 1
    hows: tuple[How, ...] | None = None
    patience_s: float = 20.0
    points: int = 0
    violations: list[str] = field(default_factory=list)

    async def explore(self, *operations: Operation) -> None:
        """Visit every point of ``operations``, all with one client, so that damage adds up; with another one as soon as
        that was damaged."""
        hows = self.hows or HOWS[sniffio.current_async_library()]
        points = self._points(itertools.product(operations, hows, range(self.phases)))
        point = next(points, None)
        while point is not None and len(self.violations) < MANY:
            bench, found = self.make_bench(), len(self.violations)
            with Ledger() as ledger:
                async with bench.client() as client:
                    case = Case(client, bench)
                    while point is not None and len(self.violations) == found:
                        reached = await self._visit(point, case, ledger)
                        point = _following(points, reached)

    def _points(self, kinds: Iterable[tuple[Operation, How, int]]) -> Generator[Point, bool, None]:
        """One after the other; it is told of each whether the step was reached."""
        for operation, how, phase in kinds:
            for step in range(0, MAX_STEPS, self.every):
                if not (yield Point(operation, how, phase, step)):
                    break

    async def _visit(self, point: Point, case: Case, ledger: Ledger) -> bool:
        """Whether the step was reached, or the operation had ended before."""
        before = _holdings()
        neighbour = await case.client.submit([7], SamplingParams(max_tokens=6), request_id="neighbour")
        heard = list((await anext(neighbour)).token_ids)
        for _ in range(point.phase):
            await anyio.lowlevel.checkpoint()
        reached, faults = False, []
        try:
            with anyio.fail_after(self.patience_s):
                reached, faults = await _cancelled_at(point, case)
                heard += [token async for out in neighbour for token in out.token_ids]
                faults += await _faults_of(point.operation, case, heard)
                if sniffio.current_async_library() == "asyncio":
                    await asyncio.sleep(0)
                faults += ledger.settle(case.bench.finished)
        except Exception as exc:  # noqa: BLE001 - a violation, whatever it is
            faults.append(f"{type(exc).__name__}: {exc}"[:300])
        for _ in range(20):  # what was told to end may take a few turns
            if all(now <= then for now, then in zip(_holdings(), before, strict=True)):
                break
            await anyio.lowlevel.checkpoint()
        else:
            faults.append(f"left behind: {_holdings()} (tasks, descriptors), not {before}")
        self.violations += [f"{point}: {fault}" for fault in faults]
        self.points += reached
        case.clients.clear()
        return reached


def _following(points: Generator[Point, bool, None], reached: bool) -> Point | None:
    try:
        return points.send(reached)
    except StopIteration:
        return None


async def _cancelled_at(point: Point, case: Case) -> tuple[bool, list[str]]:
    """Run the operation; whether the step was reached, and what is wrong with how it ended."""
    operation, how, step = point.operation, point.how, point.step
    error: BaseException | None = None
    finished = cancelled = False
    if how.startswith("scope"):
        scope = anyio.CancelScope()
        trigger = Trigger(how, step, scope.cancel)
        try:
            with scope:
                await stepped(_coroutine(operation, case), trigger)
                finished = True
        except Exception as exc:  # noqa: BLE001 - judged below
            error = exc
        cancelled = scope.cancelled_caught
    else:
        trigger, task = _natively(point, case)
        await asyncio.wait([task])
        cancelled = task.cancelled()
        error = None if cancelled else task.exception()
        finished = not cancelled and error is None
    faults = []
    if error is not None and not isinstance(error, operation.errors):
        faults.append(f"it raised {error!r:.300}")
    elif finished and trigger.delivered and not operation.shielded:
        faults.append("its cancellation was swallowed")
    elif cancelled and not trigger.reached:
        faults.append("it was cancelled by nobody")
    return trigger.reached, faults


def _natively(point: Point, case: Case) -> tuple[Trigger, asyncio.Task[None]]:
    """Start the operation as a task of asyncio's own, which is cancelled as asyncio's own means do it."""
    loop = asyncio.get_running_loop()

    async def run() -> None:
        if point.how != "asyncio.timeout":
            return await stepped(_coroutine(point.operation, case), trigger)
        try:
            async with asyncio.timeout(None) as timeout:
                expire.append(lambda: timeout.reschedule(loop.time()))
                await stepped(_coroutine(point.operation, case), trigger)
        except TimeoutError:
            assert task.cancelling() == 0, "a cancellation that was counted twice"
            raise asyncio.CancelledError from None

    expire: list[Callable[[], None]] = []
    task = loop.create_task(run())
    trigger = Trigger(point.how, point.step, lambda: expire[0]() if expire else task.cancel())
    return trigger, task


async def _coroutine(operation: Operation, case: Case) -> None:
    await operation.run(case)


async def _faults_of(operation: Operation, case: Case, heard: list[int]) -> list[str]:
    """Registries, neighbours, and whether the client still works."""
    faults = []
    client = case.client
    if heard != (wanted := expected_tokens([7], 6)):
        faults.append(f"the neighbour got {heard}, not {wanted}")
    if client.state is ClientState.READY:
        with suppress(EngineError):
            await client.core.utility("is_sleeping")  # a fence: what was sent has been taken, what was said is here
            await client.core.utility("is_sleeping")  # late outputs may have had the client send a fence of its own
    if operation.pauses:
        await client.resume_generation()
    elif await case.bench.paused(client):
        faults.append("the engine was left paused")
    for one in [client, *case.clients]:
        if one.state is ClientState.CREATED:  # never entered
            continue
        if left := await left_in_registries(one):
            faults.append(f"left in the registries: {left}")
        if one is not client and one.state is not ClientState.CLOSED:
            faults.append(f"a client was left {one.state}")
    answer = [token async for out in client.generate([8], SamplingParams(max_tokens=2)) for token in out.token_ids]
    if answer != (wanted := expected_tokens([8], 2)):
        faults.append(f"afterwards the client got {answer}, not {wanted}")
    if running := await case.bench.running(client):
        faults.append(f"{running} requests still run in the engine")
    return faults


async def left_in_registries(client: EngineClient) -> dict[str, int]:
    """What is still in a client's registries; calls that it makes of itself have a moment to be answered."""
    left: dict[str, int] = {}
    with suppress(ClientClosedError):  # never entered
        for turn in range(200):  # a process takes its time
            counts = client.statistics()
            left = {name: counts[name] for name in ("requests_in_flight", "utility_calls_in_flight") if counts[name]}
            if not left:
                break
            await anyio.sleep(0 if turn < 100 else 0.01)
    return left


def _holdings() -> tuple[int, int]:
    """Tasks and descriptors of the process."""
    return len(anyio.get_running_tasks()), sum(1 for _ in Path("/proc/self/fd").iterdir())
