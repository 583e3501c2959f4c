"""The cancellation explorer: cancels an operation at its 1st, 2nd, 3rd ... scheduling step and looks at what is left.

Owns the stepping and the rules that hold after every cancellation; what can be done with a client is
:mod:`operations`'s. A point is one operation, cancelled in one way at one step; it is visited by running the operation
from its beginning, with a neighbour streaming beside it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import anyio
import sniffio
from explored_engine import ExploredEngine
from ledger import Ledger

from anyengine import ClientState, EngineClient, EngineError, SamplingParams
from anyengine.testing.toy_runner import expected_tokens

__all__ = ["HOWS", "Case", "Explorer", "How", "Operation", "stepped"]

How: TypeAlias = Literal["scope", "scope, woken", "native", "native, woken", "native, twice"]
"""By which means, and when: as the task is about to wait; as it has been woken, in the same turn of the loop, so that
what it waited for is there and is not to be lost; or once more at the step after it, which is part of its clean-up."""

HOWS: Final[dict[str, tuple[How, ...]]] = {"asyncio": get_args(How), "trio": ("scope", "scope, woken")}
MAX_STEPS: Final = 500
PATIENCE_S: Final = 20.0


class Trigger:
    """Cancels at step ``at``, counted from 0, as ``how`` says. ``delivered``: the operation has been told, which on asyncio
    may not be so if it was woken in the same turn, and did not wait again."""

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
        trigger.after_wait(step, error)
        step += 1


@dataclass
class Case:
    """What an operation works with. ``settings`` are for a client of its own; ``clients`` those that it opened."""

    client: EngineClient
    engine: ExploredEngine
    clients: list[EngineClient] = field(default_factory=list)

    def another(self) -> EngineClient:
        """One more client, with an engine of its own, which the rules then hold for as well."""
        engine = ExploredEngine(self.engine.finished)  # one record
        client = EngineClient(engine=engine.settings(), liveness_timeout_s=None)
        self.clients.append(client)
        return client


@dataclass(frozen=True)
class Operation:
    """Something that is done with a client. ``shielded``: parts of it (the end of a task group for one) go on to their
    end once they have begun, and it may end normally though it was cancelled there. ``immediate``: it may not have to
    wait at all. ``errors``: what it may raise."""

    name: str
    run: Callable[[Case], Awaitable[object]]
    shielded: bool = False
    immediate: bool = False
    errors: tuple[type[BaseException], ...] = ()


@dataclass
class Explorer:
    """Visits points; ``violations`` says what it found. ``every``: one step of so many, for a quick look. ``phases``: in
    so many relations to the steps of the engine, which runs beside."""

    every: int = 1
    phases: int = 1
    hows: tuple[How, ...] | None = None
    points: int = 0
    violations: list[str] = field(default_factory=list)

    async def explore(self, operation: Operation) -> None:
        """Visit every point of ``operation``."""
        hows = self.hows or HOWS[sniffio.current_async_library()]
        for how, phase in itertools.product(hows, range(self.phases)):
            engine = ExploredEngine()
            step = 0
            while step < MAX_STEPS:
                # One client for all points of a kind, so that damage adds up; a new one where it was damaged.
                with Ledger() as ledger:
                    async with EngineClient(engine=engine.settings(), liveness_timeout_s=None) as client:
                        case = Case(client, engine)
                        found = len(self.violations)
                        while step < MAX_STEPS and len(self.violations) == found:
                            reached = await self._visit(operation, how, phase, step, case, ledger)
                            step += self.every
                            if not reached:
                                step = MAX_STEPS
                if len(self.violations) > 20:
                    return

    async def _visit(
        self, operation: Operation, how: How, phase: int, step: int, case: Case, ledger: Ledger
    ) -> bool:
        """Whether the step was reached, or the operation had ended before."""
        before = _holdings()
        neighbour = await case.client.submit([7], SamplingParams(max_tokens=6), request_id="neighbour")
        heard = list((await anext(neighbour)).token_ids)
        for _ in range(phase):
            await anyio.lowlevel.checkpoint()
        reached, faults = False, []
        try:
            with anyio.fail_after(PATIENCE_S):
                reached, faults = await _cancelled_at(operation, how, step, case)
                heard += [token async for out in neighbour for token in out.token_ids]
                faults += await _faults_of(case, heard)
                if sniffio.current_async_library() == "asyncio":
                    await asyncio.sleep(0)
                faults += ledger.settle(case.engine.finished)
        except Exception as exc:  # noqa: BLE001 - a violation, whatever it is
            faults.append(f"{type(exc).__name__}: {exc}"[:300])
        for _ in range(20):  # what was told to end may take a few turns
            if _holdings() == before:
                break
            await anyio.lowlevel.checkpoint()
        else:
            faults.append(f"left behind: {_holdings()} (tasks, descriptors), not {before}")
        where = f"{operation.name}, {how}, step {step}, phase {phase}, {sniffio.current_async_library()}"
        self.violations += [f"{where}: {fault}" for fault in faults]
        self.points += reached
        case.clients.clear()
        return reached


async def _cancelled_at(operation: Operation, how: How, step: int, case: Case) -> tuple[bool, list[str]]:
    """Run the operation; whether the step was reached, and what is wrong with how it ended."""
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
        task = asyncio.get_running_loop().create_task(_late(lambda: stepped(_coroutine(operation, case), trigger)))
        trigger = Trigger(how, step, task.cancel)
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


async def _late(make: Callable[[], Awaitable[Any]]) -> None:
    await make()


async def _coroutine(operation: Operation, case: Case) -> None:
    await operation.run(case)


async def _faults_of(case: Case, heard: list[int]) -> list[str]:
    """Registries, neighbours, and whether the client still works."""
    faults = []
    client = case.client
    if heard != (wanted := expected_tokens([7], 6)):
        faults.append(f"the neighbour got {heard}, not {wanted}")
    if client.state is ClientState.READY:
        with suppress(EngineError):
            await client.core.utility("is_sleeping")  # a fence: what was sent has been taken, what was said is here
    everyone = [client, *case.clients]
    for one in everyone:
        try:
            counts = one.statistics()
        except EngineError:  # never entered
            continue
        left = {name: counts[name] for name in ("requests_in_flight", "utility_calls_in_flight") if counts[name]}
        if left:
            faults.append(f"left in the registries: {left}")
        if one is not client and one.state is not ClientState.CLOSED:
            faults.append(f"a client was left {one.state}")
    answer = [token async for out in client.generate([8], SamplingParams(max_tokens=2)) for token in out.token_ids]
    if answer != (wanted := expected_tokens([8], 2)):
        faults.append(f"afterwards the client got {answer}, not {wanted}")
    if case.engine.running:
        faults.append(f"still running in the engine: {sorted(case.engine.running)}")
    return faults


def _holdings() -> tuple[int, int]:
    """Tasks and descriptors of the process."""
    return len(anyio.get_running_tasks()), len(os.listdir("/proc/self/fd"))
