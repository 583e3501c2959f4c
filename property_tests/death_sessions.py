"""What the death explorer runs at each point, and what must be true there.

Owns one program of concurrent users (streams, one of them left, one aborted by its label, calls, a pause, a close), and
the judgement of what each of them was told. Knows nothing of which point is visited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
from recording_limiter import RecordingLimiter

from anyengine import (
    ClientState,
    EngineClient,
    EngineDeadError,
    EngineStartupError,
    RequestFailed,
    RequestStream,
    SamplingParams,
)
from anyengine.exceptions import EngineError
from anyengine.testing.scripted import Fault, Script, ScriptedEngine, expected_tokens

__all__ = ["SPOILING", "Visit", "record", "violations", "visit"]

BUDGET_S = 60.0  # what counts as for ever, for 32 sessions at once on a busy machine; seconds are for other tests
GIVE_UP_S = 0.3  # what a user does who waits for a message that was lost
LOOPING = frozenset({"hang", "deaf", "mute"})  # only the limit of liveness tells of these
LIVING = LOOPING | {"dead", "close_input", "close_output"}  # before it is ready, only the deadline tells of these
SPOILING = frozenset({"garbage", "truncate", "mistype", "empty", "huge"})  # no death: the message is lost, at most


@dataclass
class Visit:
    """One point: what each user was told, and what was wrong with it."""

    fault: Fault
    violations: list[str] = field(default_factory=list)
    errors: list[EngineDeadError] = field(default_factory=list)
    gave_up: int = 0
    fired: bool = False
    in_body: bool = False
    """The fault came before the block was left."""

    def expect(self, fact: bool, what: str) -> None:
        if not fact:
            self.violations.append(what)


class _Users:
    """The program, and what comes of it."""

    def __init__(self, client: EngineClient, seen: Visit) -> None:
        self._client = client
        self._seen = seen
        self._spoils = seen.fault.do in SPOILING

    async def run(self) -> None:
        client = self._client
        async with anyio.create_task_group() as users:
            for number in (1, 2, 3):
                users.start_soon(self._consume, [number], 5)
            users.start_soon(self._left, [4])
            users.start_soon(self._while_it_runs, [5], partial(client.abort, "5"))
            users.start_soon(self._call, client.core.utility, "is_sleeping")
            users.start_soon(self._call, client.reset_prefix_cache)
        await self._while_it_runs([6], client.pause_generation)
        told = len(self._seen.errors)
        await self._call(client.resume_generation)
        if len(self._seen.errors) > told and client.state is not ClientState.DEAD:
            await self._call(client.resume_generation)  # of two ranks one has died meanwhile: the other one goes on
        await self._consume([7], 3)

    async def _left(self, prompt: list[int]) -> None:
        await self._consume(prompt, 200, leave_after=2)

    async def _while_it_runs(self, prompt: list[int], call: Callable[[], Awaitable[Any]]) -> None:
        """A stream without end, and a call that ends it."""
        async with anyio.create_task_group() as tasks:
            start = partial(tasks.start_soon, self._call, call)
            await self._consume(prompt, 2000, may_abort=True, label=str(prompt[0]), at_first=start)

    async def _consume(
        self,
        prompt: list[int],
        count: int,
        *,
        leave_after: int | None = None,
        may_abort: bool = False,
        label: str | None = None,
        at_first: Callable[[], Any] | None = None,
    ) -> None:
        tokens: list[int] = []
        finish: str | None = None
        error: EngineError | None = None
        with anyio.move_on_after(GIVE_UP_S if self._spoils else None) as patience:
            try:
                params = SamplingParams(max_tokens=count)
                async with self._client.generate(prompt, params, request_id=label) as stream:
                    async for out in stream:
                        tokens += out.token_ids
                        finish = out.finish_reason
                        if at_first is not None:
                            at_first()
                            at_first = None
                        if leave_after is not None and len(tokens) >= leave_after:
                            break
            except EngineError as exc:
                error = exc
        self._judge(prompt, count, tokens, finish, error, whole=leave_after is None and not may_abort)
        self._seen.gave_up += patience.cancelled_caught

    def _judge(
        self, prompt: list[int], count: int, tokens: list[int], finish: str | None, error: Any, *, whole: bool
    ) -> None:
        seen = self._seen
        if not self._spoils:
            seen.expect(tokens == expected_tokens(prompt, len(tokens)), f"{prompt} got {tokens}")
        if isinstance(error, EngineDeadError):
            seen.errors.append(error)
        elif error is not None:
            seen.expect(self._spoils, f"{prompt} failed: {error!r}")
        elif whole and not self._spoils:
            seen.expect((len(tokens), finish) == (count, "length"), f"{prompt} ended {finish} after {len(tokens)}")

    async def _call(self, call: Callable[..., Awaitable[Any]], *args: Any) -> None:
        with anyio.move_on_after(GIVE_UP_S if self._spoils else None) as patience:
            try:
                await call(*args)
            except EngineDeadError as exc:
                self._seen.errors.append(exc)
            except EngineError as exc:
                self._seen.expect(self._spoils, f"{call} raised {exc!r}")
        self._seen.gave_up += patience.cancelled_caught

    async def later(self, *, serves: bool) -> None:
        """Whoever comes now is served, or is told the same, at once."""
        resumed = self._client.state is ClientState.READY or self._seen.gave_up > 0  # on the reply that says so
        self._seen.expect(resumed == serves, f"the state is {self._client.state}")
        if serves:
            await self._consume([8], 2)
            return
        told = len(self._seen.errors)
        for call in (lambda: self._client.submit([9]), lambda: self._client.core.utility("is_sleeping")):
            try:
                await call()
            except EngineDeadError as exc:
                self._seen.errors.append(exc)
        self._seen.expect(len(self._seen.errors) == told + 2, "a later call was not refused")


async def record(make: Callable[[Script], ScriptedEngine], *, neighbour: bool) -> tuple[int, int]:
    """How many messages rank 0 receives and sends when nothing happens to it.

    Cancellation: safe.
    """
    scripted = _engines(Fault(do="kill", nth=1 << 40), make, neighbour=neighbour)
    seen = await _run(Visit(Fault(do="kill", nth=1 << 40)), scripted, neighbour=neighbour)
    assert (seen.violations, seen.errors, seen.fired) == ([], [], False), seen
    numbers = {one.direction: one.number for one in scripted[0].records() if one.number}
    return numbers["in"], numbers["out"]


async def visit(fault: Fault, make: Callable[[Script], ScriptedEngine], *, neighbour: bool = False) -> Visit:
    """Run the program against an engine with ``fault``; with ``neighbour`` beside one without, which must not suffer.

    Cancellation: safe.
    """
    return await _run(Visit(fault), _engines(fault, make, neighbour=neighbour), neighbour=neighbour)


def _engines(fault: Fault, make: Callable[[Script], ScriptedEngine], *, neighbour: bool) -> list[ScriptedEngine]:
    # Each request has messages of its own, so that there are more of them to die at.
    faulty = make(Script(faults=(fault,), merge_requests=False, log_outputs=True))
    return [faulty, make(Script())] if neighbour else [faulty]


async def _run(seen: Visit, scripted: Sequence[ScriptedEngine], *, neighbour: bool) -> Visit:
    fault, limiter = seen.fault, RecordingLimiter()
    client = EngineClient(
        engine=[one.engine for one in scripted],
        shutdown_grace_s=0.05,
        startup_timeout_s=0.4 if fault.do in LIVING and _in_startup(fault) else 60.0,
        liveness_timeout_s=1.0 if fault.do in LOOPING else None,
        limiter=limiter,
    )
    last: RequestStream | None = None
    started = False
    try:
        with anyio.fail_after(BUDGET_S):
            async with client:
                started = True
                users = _Users(client, seen)
                await users.run()
                seen.in_body = _has_fired(scripted[0])
                await _judge_body(client, users, seen, neighbour=neighbour)
                if client.state is ClientState.READY:
                    with suppress(EngineError):  # a spoilt reply may have left it paused
                        last = await client.submit([10], SamplingParams(max_tokens=2000))
            await _judge_end(client, seen, last)
    except EngineStartupError as exc:
        seen.expect(not started, f"the block raised {exc!r}")
        _judge_cause(seen, exc)
    except TimeoutError:
        seen.violations.append("somebody waited for ever")
    except EngineDeadError as exc:
        seen.expect(not started, f"the block raised {exc!r}")
    seen.fired = _has_fired(scripted[0])
    seen.violations += limiter.faults()
    return seen


async def _judge_body(client: EngineClient, users: _Users, seen: Visit, *, neighbour: bool) -> None:
    fatal = seen.in_body and seen.fault.do not in SPOILING
    if fatal and not neighbour:
        await client.wait_dead()
    elif fatal:
        await client.wait_dead(0)
    if neighbour or fatal:
        await users.later(serves=neighbour)
    seen.expect(client.statistics()["requests_in_flight"] == 0, "a request is still registered")
    if not fatal:
        seen.expect(seen.errors == [], f"told of a death without one: {seen.errors}")
        return
    while not neighbour and client.statistics()["utility_calls_in_flight"]:
        await anyio.lowlevel.checkpoint()  # our own probe is told last; the budget is everybody's
    seen.expect({error.rank for error in seen.errors} <= {0}, "somebody was told of another rank")
    for error in seen.errors:
        _judge_cause(seen, error)
    # Who sends while the rank is being buried is told what is known by then, because of what its sending met.
    causes = {id(error.__cause__) for error in seen.errors if isinstance(error.__cause__, EngineDeadError)}
    seen.expect(len(causes) <= 1, f"{len(causes)} causes: {[(e, e.__cause__) for e in seen.errors]}")


def _judge_cause(seen: Visit, error: Any) -> None:
    """The cause names how the engine ended, if it did."""
    if error.pid is not None and "lives, but" in str(error):
        return  # a process closes its sockets before it ends, and on a busy machine takes long in between
    match seen.fault.do:
        case "kill":
            seen.expect(error.signal == seen.fault.signal, f"{error!r} does not name the signal")
        case "exit" | "dead_exit":
            seen.expect(error.exit_code == seen.fault.exit_code, f"{error!r} does not name the exit code")
        case _:
            pass


async def _judge_end(client: EngineClient, seen: Visit, last: RequestStream | None) -> None:
    if last is not None:
        with suppress(EngineDeadError, RequestFailed):
            seen.expect([out async for out in last][-1].finish_reason == "abort", "the last stream ended by itself")
    session = client.core.session
    seen.expect(client.state is ClientState.CLOSED, f"closed, the state is {client.state}")
    for rank, engine in session.engines.items():
        seen.expect(engine.child.poll() is not None, f"engine {rank} lives")
    seen.expect(client.statistics()["requests_in_flight"] == 0, "closed with a request registered")
    calls = [call.method for call in session.connection.utilities.pending.values()]
    seen.expect(set(calls) <= {"is_sleeping"}, f"closed with calls registered: {calls}")  # our own probes, at most


def _has_fired(engine: ScriptedEngine) -> bool:
    return any(record.kind == "fault" for record in engine.records())


def _in_startup(fault: Fault) -> bool:
    return fault.nth <= (1 if fault.direction == "in" else 3)


def violations(visits: Sequence[Visit]) -> list[str]:
    """One line for each."""
    return [f"{seen.fault}: {what}" for seen in visits for what in seen.violations]
