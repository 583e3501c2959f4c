"""Known bugs, to be planted: what a client would be if one rule of the design were broken.

Owns the bugs and who is to find them. Each is planted by replacing one method; nothing else of the client changes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import anyio
import anyio.lowlevel
import pytest
from transport_fuzz import hangs

from anyengine import EngineClient, EngineCoreClient, RequestStream
from anyengine._client.requests.state import RequestState
from anyengine._protocol import AbortLedger, Connection, RequestRegistry, UtilityRegistry
from anyengine._transport.zmq_socket import ZmqSocket
from anyengine._wire import UtilityOutput
from counted_machine import CountedMachine, run_steps
from explorer import Explorer
from operations import OPERATIONS
from requests_machine import RequestsMachine
from utilities_machine import UtilitiesMachine

__all__ = ["MUTANTS", "Mutant", "explored", "fuzzed", "stepped_through"]

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """A bug. ``find`` says what is wrong with the client as it is; without the bug, nothing."""

    name: str
    plant: Callable[[Patch], None]
    find: Callable[[], list[str]]


# --------------------------------------------------------------------------------------------------------- who finds it


def explored(*names: str) -> list[str]:
    """What the cancellation explorer finds in a few operations, on trio."""
    explorer = Explorer(hows=("scope",), patience_s=0.5)
    chosen = [operation for operation in OPERATIONS if operation.name in names]
    assert len(chosen) == len(names)
    anyio.run(partial(explorer.explore, *chosen), backend="trio")
    return explorer.violations


def stepped_through(machine: type[CountedMachine]) -> list[str]:
    """What a state machine finds in a few steps."""
    try:
        run_steps(machine, 2_000, shrink=False)
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is a find
        return [repr(exc)]
    return []


def fuzzed() -> list[str]:
    """Interleavings of the fuzz that hang without a second look (``tests/transport/test_lost_wakeups.py``)."""
    seeds = (39, 40, 60, 61, 75, 84)
    return [f"seed {seed} hangs" for seed in seeds if anyio.run(hangs, ZmqSocket, seed, backend="trio")]


# ------------------------------------------------------------------------------------------------------------- the bugs


def drop_the_abort(patch: Patch) -> None:
    """The request is forgotten, and its engine is not told."""
    abort = Connection.abort

    def forget(self: Connection, request_ids: Any) -> list[Any]:
        abort(self, request_ids)
        return []

    patch.setattr(Connection, "abort", forget)


def abort_twice(patch: Patch) -> None:
    abort = Connection.abort
    patch.setattr(Connection, "abort", lambda self, request_ids: abort(self, request_ids) * 2)


def forget_before_bytes(patch: Patch) -> None:
    """State is dropped first; then nobody knows any more whom to tell."""
    abort = EngineCoreClient.abort

    def forget(self: EngineCoreClient, request_ids: str | Iterable[str]) -> tuple[str, ...]:
        for request_id in [request_ids] if isinstance(request_ids, str) else (request_ids := [*request_ids]):
            entry = self.session.connection.requests.close(request_id)
            if entry is not None:
                entry.consumer.aborted()
        return abort(self, request_ids)

    patch.setattr(EngineCoreClient, "abort", forget)


def send_before_owning(patch: Patch) -> None:
    """An await between the sending of a request and the moment when somebody is responsible for it."""
    start = RequestStream.start

    async def late(self: RequestStream) -> Any:
        sent = await start(self)
        self._completions, self._over = None, True
        await anyio.lowlevel.checkpoint()
        self._completions, self._over = sent, False
        return sent

    patch.setattr(RequestStream, "start", late)


def swallow_a_cancellation(patch: Patch) -> None:
    following = RequestStream.__anext__

    async def swallowing(self: RequestStream) -> Any:
        try:
            return await following(self)
        except anyio.get_cancelled_exc_class():  # noqa: ASYNC103 - the bug
            self.close_nowait()
            raise StopAsyncIteration from None  # noqa: ASYNC104

    patch.setattr(RequestStream, "__anext__", swallowing)


def keep_a_call(patch: Patch) -> None:
    """A cancelled call stays in the registry."""
    patch.setattr(UtilityRegistry, "forget", lambda self, call_id: None)


def fail_on_a_late_reply(patch: Patch) -> None:
    """A reply that nobody waits for any more ends the task that reads it."""
    resolve = UtilityRegistry.resolve

    def strict(self: UtilityRegistry, rank: int, output: UtilityOutput) -> None:
        assert output.call_id in self.pending
        resolve(self, rank, output)

    patch.setattr(UtilityRegistry, "resolve", strict)


def resolve_the_wrong_call(patch: Patch) -> None:
    """A reply goes to whoever waits longest."""
    resolve = UtilityRegistry.resolve

    def misled(self: UtilityRegistry, rank: int, output: UtilityOutput) -> None:
        output.call_id = next(iter(self.pending), output.call_id)
        resolve(self, rank, output)

    patch.setattr(UtilityRegistry, "resolve", misled)


def leave_tombstones(patch: Patch) -> None:
    """What was aborted is remembered for ever."""

    def note(self: AbortLedger, request_id: str, rank: int) -> None:
        self._recent[request_id] = (rank, 0)

    patch.setattr(AbortLedger, "note", note)


def wake_nobody_at_death(patch: Patch) -> None:
    def fail(self: RequestState, error: Any) -> None:
        if not self.ended:
            self.error = error

    patch.setattr(RequestState, "fail", fail)


def deliver_after_the_end(patch: Patch) -> None:
    """A final output does not close its request."""

    def dispatch(self: RequestRegistry, outputs: Sequence[Any]) -> list[Any]:
        for output in outputs:
            if (entry := self.live.get(output.request_id)) is not None:
                entry.consumer.push(output)
        return []

    patch.setattr(RequestRegistry, "dispatch", dispatch)


def lose_what_has_arrived(patch: Patch) -> None:
    """A later output replaces what has been merged and not been taken."""
    push = RequestState.push

    def replacing(self: RequestState, output: Any) -> bool:
        self.token_ids = None
        return push(self, output)

    patch.setattr(RequestState, "push", replacing)


def pause_without_end(patch: Patch) -> None:
    """A cancelled ``paused()`` does not resume: nothing runs any more."""

    @asynccontextmanager
    async def paused(self: EngineClient, mode: Any = "wait", *, clear_cache: bool = False) -> AsyncIterator[None]:
        await self.pause_generation(mode=mode, clear_cache=clear_cache)
        yield
        await self.resume_generation()

    patch.setattr(EngineClient, "paused", paused)


def skip_the_second_look(patch: Patch) -> None:
    """A send swallows the signal that the reader of the same socket sleeps for, and nobody looks again."""
    patch.setattr(ZmqSocket, "_recheck", lambda self: None)
    patch.setattr(ZmqSocket, "_poll", lambda self: self._events())


CALLS: Final = ("utility", "utility_on_all", "remove_lora", "save_sharded_state", "update_weight_version")
"""Whether the reply to a cancelled call is late depends on the order in which trio runs tasks: several make it sure."""

MUTANTS: Final = [
    Mutant("drop the abort", drop_the_abort, partial(explored, "leave a block early")),
    Mutant("abort twice", abort_twice, partial(explored, "leave a block early")),
    Mutant("forget before bytes", forget_before_bytes, partial(explored, "leave a block early")),
    Mutant("send before owning", send_before_owning, partial(explored, "leave a block early")),
    Mutant("swallow a cancellation", swallow_a_cancellation, partial(explored, "read to the end")),
    Mutant("keep a call", keep_a_call, partial(explored, "give up a call")),
    Mutant("fail on a late reply", fail_on_a_late_reply, partial(explored, *CALLS)),
    Mutant("resolve the wrong call", resolve_the_wrong_call, partial(stepped_through, UtilitiesMachine)),
    Mutant("leave tombstones", leave_tombstones, partial(stepped_through, RequestsMachine)),
    Mutant("wake nobody at death", wake_nobody_at_death, partial(explored, "the engine dies under a reader")),
    Mutant("deliver after the end", deliver_after_the_end, partial(stepped_through, RequestsMachine)),
    Mutant("lose what has arrived", lose_what_has_arrived, partial(stepped_through, RequestsMachine)),
    Mutant("pause without end", pause_without_end, partial(explored, "paused")),
    Mutant("skip the second look", skip_the_second_look, fuzzed),
]
