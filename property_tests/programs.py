"""Concurrent programs as data, and what must hold when one has been run.

Owns the steps, the tasks that run them, and the judgement. A program is a few tasks, each a list of steps, over one
client of one or two engines in memory; it may close the client or kill an engine in the middle. Nothing in here reads a
clock or rolls dice: on a loop with a fixed order a program is a function of its data.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
from hypothesis import strategies as st
from recording_limiter import RecordingLimiter

from anyengine import (
    ClientClosedError,
    ClientState,
    EngineAsleepError,
    EngineClient,
    EngineDeadError,
    PoolingParams,
    RequestStream,
    SamplingParams,
)
from anyengine.testing.toy_runner import expected_tokens
from explored_engine import ExploredEngine
from ledger import Ledger

__all__ = ["PROGRAMS", "Program", "Step", "run_program"]

LABELS = ("a", "b", "c")


@dataclass(frozen=True)
class Step:
    """``action`` says what; ``label`` whose request; ``number`` how many tokens, items or turns of the loop."""

    action: str
    label: str = "a"
    number: int = 1


@dataclass(frozen=True)
class Program:
    """The tasks, and for how many ``ranks``."""

    tasks: tuple[tuple[Step, ...], ...]
    ranks: int = 1


ORDINARY = ("read", "read", "read", "break", "drop", "cancel", "abort", "stop", "encode", "call", "give up", "pause")
STEPS = st.builds(
    Step,
    st.sampled_from(ORDINARY) | st.sampled_from([*ORDINARY, "close", "kill"]),
    st.sampled_from(LABELS),
    st.integers(0, 6),
)
PROGRAMS = st.builds(
    Program,
    st.lists(st.lists(STEPS, max_size=5).map(tuple), min_size=1, max_size=4).map(tuple),
    st.integers(1, 2),
)


@dataclass
class Run:
    """One run of a program. ``faults`` is the judgement."""

    program: Program
    client: EngineClient
    leave: anyio.Event = field(default_factory=anyio.Event)
    working: int = 0
    killed: bool = False
    aborted: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    async def task(self, steps: tuple[Step, ...]) -> None:
        """One task of the program. The last one to end leaves the block."""
        try:
            for step in steps:
                try:
                    await getattr(self, "do_" + step.action.replace(" ", "_"))(step)
                except EngineAsleepError as exc:
                    if not any(one.action == "pause" for steps_ in self.program.tasks for one in steps_):
                        self.faults.append(f"{step}: {exc!r}, and nobody has paused it")
                except EngineDeadError as exc:
                    closed = isinstance(exc, ClientClosedError)
                    if not (self.leave.is_set() if closed else self.killed):
                        self.faults.append(f"{step}: {exc!r}, and nobody has {'closed' if closed else 'killed'} it")
        except Exception as exc:  # noqa: BLE001 - a fault, whatever it is
            self.faults.append(f"{type(exc).__name__}: {exc}")
        finally:
            self.working -= 1
            if not self.working:
                self.leave.set()

    # --------------------------------------------------------------------- steps

    def stream(self, step: Step, tokens: int) -> RequestStream:
        return self.client.generate([ord(step.label)], SamplingParams(max_tokens=tokens), request_id=step.label)

    async def do_read(self, step: Step) -> None:
        heard = _Heard(self, step, step.number + 1)
        async for out in self.stream(step, step.number + 1):
            heard.item(out.token_ids, out.finish_reason)
        heard.end()

    async def do_break(self, step: Step) -> None:
        """Read a few items and leave the block; of some requests everything has come by then."""
        heard = _Heard(self, step, 4)
        async with self.stream(step, 4) as stream:
            for _ in range(step.number):
                if (out := await anext(stream, None)) is None:
                    return
                heard.item(out.token_ids, out.finish_reason)

    async def do_drop(self, step: Step) -> None:
        """Lose the stream while its request runs."""
        stream = self.stream(step, 1_000_000)
        await stream.start()
        del stream
        await _turns(step.number)

    async def do_cancel(self, step: Step) -> None:
        """Read what never ends, until a sibling cancels."""
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._forever, step)
                await _turns(step.number)
                scope.cancel()

    async def _forever(self, step: Step) -> None:
        heard = _Heard(self, step, 1_000_000)
        try:
            async for out in self.stream(step, 1_000_000):
                heard.item(out.token_ids, out.finish_reason)
        except (EngineAsleepError, EngineDeadError):
            return  # alone in its group, which would wrap it

    async def do_abort(self, step: Step) -> None:
        """By label: everything of that name that lives."""
        self.aborted.add(step.label)
        await self.client.abort(step.label)

    async def do_stop(self, step: Step) -> None:
        """Begin what never ends, and abort it by its stream, from inside."""
        self.aborted.add(step.label)
        stream = await self.client.submit([ord(step.label)], SamplingParams(max_tokens=1_000_000))
        await _turns(step.number)
        stream.abort()
        finished = [out.finish_reason async for out in stream]
        if finished[-1] != "abort" or any(finished[:-1]):
            self.faults.append(f"{step}: an aborted stream ended as {finished}")

    async def do_encode(self, step: Step) -> None:
        output = await self.client.encode([ord(step.label)], PoolingParams(task="embed"), request_id=f"e{step.label}")
        if output.request_id != f"e{step.label}":
            self.faults.append(f"{step}: got the result of {output.request_id}")

    async def do_call(self, step: Step) -> None:
        answers = await self.client.core.utility_on_all("get_weight_version")
        if set(answers.values()) != {"default"}:
            self.faults.append(f"{step}: got {answers}")

    async def do_give_up(self, step: Step) -> None:
        """A call that is never answered, for so many turns."""
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def call() -> None:
                    try:
                        await self.client.core.utility("silence", unchecked=True)
                    except EngineDeadError:
                        return

                tasks.start_soon(call)
                await _turns(step.number)
                scope.cancel()

    async def do_pause(self, step: Step) -> None:
        async with self.client.paused("keep"):
            await _turns(step.number)

    async def do_close(self, step: Step) -> None:
        """Leave the block, whatever the others are doing."""
        self.leave.set()
        await _turns(step.number)

    async def do_kill(self, step: Step) -> None:
        """One engine, without a word."""
        engines = self.client.core.session.engines
        self.killed = True
        engines[step.number % len(engines)].child.kill()
        await _turns(step.number)


@dataclass
class _Heard:
    """What one consumer heard: a prefix of what its engine generates, one end at most, and an abort only if asked."""

    run: Run
    step: Step
    wanted: int
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None

    def item(self, token_ids: list[int], finish_reason: str | None) -> None:
        if self.finished is not None:
            self.run.faults.append(f"{self.step}: an item after the end")
        self.tokens += token_ids
        self.finished = finish_reason
        if self.tokens != expected_tokens([ord(self.step.label)], len(self.tokens)):
            self.run.faults.append(f"{self.step}: got {self.tokens}")
        if finish_reason == "length" and len(self.tokens) != self.wanted:
            self.run.faults.append(f"{self.step}: {len(self.tokens)} of {self.wanted} tokens")
        if finish_reason == "abort" and not (self.step.label in self.run.aborted or self.run.leave.is_set()):
            self.run.faults.append(f"{self.step}: aborted by nobody")

    def end(self) -> None:
        if self.finished is None:
            self.run.faults.append(f"{self.step}: it ended without a last item")


async def _turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def run_program(program: Program) -> list[str]:
    """Run it; what was wrong with it, and with what it left."""
    finished: set[str] = set()
    engines = [ExploredEngine(finished) for _ in range(program.ranks)]
    limiter = RecordingLimiter()
    client = EngineClient(engine=[engine.settings() for engine in engines], liveness_timeout_s=None, limiter=limiter)
    run = Run(program, client)
    with warnings.catch_warnings(), anyio.fail_after(20), Ledger() as ledger:
        warnings.simplefilter("ignore", ResourceWarning)  # dropped streams are part of the game
        async with anyio.create_task_group() as tasks, client:
            run.working = len(program.tasks)
            for steps in program.tasks:
                tasks.start_soon(run.task, steps)
            await run.leave.wait()
            if not run.working and not run.killed:
                run.faults += await _still_works(client)
    counts = client.statistics()
    left = {name: counts[name] for name in ("requests_in_flight", "utility_calls_in_flight") if counts[name]}
    if left:
        run.faults.append(f"left in the registries: {left}")
    if client.state is not ClientState.CLOSED:
        run.faults.append(f"the client was left {client.state}")
    run.faults += [f"an engine was left with {sorted(engine.running)}" for engine in engines if engine.running]
    return run.faults + ledger.settle(finished) + limiter.faults()


async def _still_works(client: EngineClient) -> list[str]:
    """After everything, if nobody has closed or killed anything."""
    answer = [token async for out in client.generate([8], SamplingParams(max_tokens=2)) for token in out.token_ids]
    return [] if answer == expected_tokens([8], 2) else [f"afterwards the client got {answer}"]
