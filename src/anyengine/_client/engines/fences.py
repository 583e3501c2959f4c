"""Fences: calls behind what was sent to an engine. Their answer tells that it was taken, in order.

Owns the calls, which nobody has to wait for (one whose waiter has gone still tells the others), and what follows from
an answer: what was read, which aborts were taken. An engine whose outputs go on behind the fence of an abort is told of
that abort once more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import anyio
import msgspec

from anyengine._setting_rules import check_seconds
from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import engine_identity
from anyengine.exceptions import DrainTimeout, EngineDeadError

from .liveness import PROBE

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["FencePassed", "Fences", "Patience"]

_logger = logging.getLogger("anyengine.client")


class FencePassed(msgspec.Struct, frozen=True):
    """A fence was answered: an item of the session's stream where its order among outputs is not the replies'."""

    rank: int
    number: int


class Patience:
    """How long a caller waits, over several waits."""

    def __init__(self, timeout_s: float | None) -> None:
        check_seconds("timeout_s", timeout_s, none="for no limit")
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._deadline_s = anyio.current_time() + self._timeout_s

    def scope(self) -> anyio.CancelScope:
        """A scope for one of the waits."""
        return anyio.CancelScope(deadline=self._deadline_s)

    def exhausted(self, ranks: Iterable[int], what: str) -> DrainTimeout:
        """The error that names ``ranks``."""
        names = tuple(sorted(ranks))
        who = f"engine{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}"
        return DrainTimeout(f"gave up waiting for {who} after {self._timeout_s:g} s: {what}", ranks=names)


class Fences:
    """See the module. Lifetime: one session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._repeated = 0

    def send(self, rank: int, on_passed: Callable[[], None]) -> None:
        """Send a fence to ``rank``. ``on_passed`` is called once: when it was answered, or the rank is no more, and
        holds nothing. Synchronous."""
        session = self._session
        if session.cause is not None or rank in session.burials.deaths:
            on_passed()  # nobody would answer: those who wait have been told, or the rank is another engine by then
            return
        connection, budget = session.connection, session.send_budget
        number, mark_bytes = connection.requests.aborts.fence_sent(rank), budget.sent_bytes(rank)

        def answered() -> None:
            if not isinstance(call.error, EngineDeadError):  # a refusal is an answer too
                budget.read(rank, mark_bytes)
                if session.in_order:
                    self.passed(rank, number)
                elif session.cause is None:
                    session.feed.send_nowait(FencePassed(rank, number))
            on_passed()

        call, frames = connection.utility(PROBE, (), rank, answered)
        try:
            session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable:
            connection.utilities.forget(call.call_id)
            session.burials.bury(rank, "its input connection is gone")
            on_passed()

    def passed(self, rank: int, number: int) -> None:
        """Everything that came before the answer has been looked at."""
        self._session.connection.requests.aborts.fence_passed(rank, number)

    async def wait(self, ranks: Iterable[int], patience: Patience) -> None:
        """Send a fence to each of ``ranks`` and wait for all of them.

        Raises:
            DrainTimeout: some have not answered in time.

        Cancellation: safe; late answers count.
        """
        missing = set(ranks)
        done = anyio.Event()

        def passed(rank: int) -> None:
            missing.discard(rank)
            if not missing:
                done.set()

        for rank in sorted(missing):
            self.send(rank, lambda rank=rank: passed(rank))  # type: ignore[misc]
        if not missing:
            return
        with patience.scope():
            await done.wait()
        if missing:
            raise patience.exhausted(missing, "what was sent to it before is not confirmed")

    def look_at_late_outputs(self) -> None:
        """Do what the late outputs call for that were dropped since. Cheap when there were none."""
        aborts = self._session.connection.requests.aborts
        if not aborts.doubtful and not aborts.ignored:
            return
        serving = self._session.connection.rota.serving
        doubtful, aborts.doubtful = aborts.doubtful, set()
        for rank in doubtful.intersection(serving):
            self.send(rank, _nothing)
        ignored, aborts.ignored = aborts.ignored, {}
        for rank, request_ids in ignored.items():
            if rank in serving:
                self._repeat(rank, request_ids)

    def _repeat(self, rank: int, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._repeated += 1
            if self._repeated & (self._repeated - 1) == 0:  # the 1st, 2nd, 4th, ...: a broken engine fills no disk
                _logger.warning(
                    "engine %d goes on with request %r, whose abort it has taken: aborted once more (%d in all)",
                    rank,
                    request_id,
                    self._repeated,
                )
        frames = self._session.connection.repeat_abort(request_ids, rank)
        try:
            self._session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable:
            self._session.burials.bury(rank, "its input connection is gone")


def _nothing() -> None:
    """Nobody waits for it."""
