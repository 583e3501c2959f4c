"""Who may send a request now: limits, back-pressure, pauses. Who has to wait does so in the order of arrival.

Owns the door between a prompt and the wire. What is outstanding is counted from what is alive (the registry's entries,
and the tickets of requests that are being prepared), so capacity comes back with the end of a request, in any case.
Knows nothing of prompts and parameters but their sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal, Self, get_args

import anyio
import anyio.lowlevel
import msgspec

from anyengine.config import EngineSettings
from anyengine.exceptions import EngineError, OverloadedError, RequestError

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["Admission", "AdmissionSettings", "Ticket"]

_WINDOW_S: Final = 30.0
_PER_TURN: Final = 8
"""Requests that may be made without a pause: a fraction of a millisecond's work."""

Reason = Literal["requests", "tokens", "bytes", "restarting", "closed"]


class AdmissionSettings(msgspec.Struct, frozen=True):
    """What a client is told: see :class:`EngineClient`."""

    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    admission: Literal["reject", "wait"] = "reject"

    def __post_init__(self) -> None:
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            limit = getattr(self, name)
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
                raise ValueError(f"{name}={limit!r} must be an int of at least 1, or None for no limit")
        if self.admission not in ("reject", "wait"):
            raise ValueError(f"admission={self.admission!r} must be 'reject' or 'wait'")

    @classmethod
    def of(
        cls,
        engines: Iterable[EngineSettings],
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None,
        admission: Literal["reject", "wait"],
    ) -> Self:
        """What a client of ``engines`` was given, and their own arguments where it was given no limit: in vLLM it is
        the front end that keeps these two, never the engine.

        Raises:
            ValueError: a value makes no sense.
        """
        said = [known for engine in engines if (known := getattr(engine, "understood", None)) is not None]

        def either(given: int | None, name: str) -> int | None:
            if given is not None:
                return given
            return min((limit for known in said if (limit := getattr(known, name)) is not None), default=None)

        return cls(
            either(max_num_queued_reqs, "max_num_queued_reqs"),
            either(max_num_queued_tokens, "max_num_queued_tokens"),
            admission,
        )


class Ticket:
    """One request on its way to the wire: its place among those that wait, and what it counts for until it is sent.

    Lifetime: from before its first await until it was sent, or will not be; whoever made it closes it.
    """

    __slots__ = ("_door", "_wake", "aborted", "label", "nowait", "num_seqs", "size_bytes")

    def __init__(self, door: Admission, label: str | None, num_seqs: int, size_bytes: int, *, nowait: bool) -> None:
        self._door = door
        self._wake: anyio.Event | None = None
        self.label = label
        self.num_seqs = num_seqs
        self.size_bytes = size_bytes
        self.nowait = nowait
        self.aborted: bool = False
        """Its end was asked for: it waits for nothing more, and must not be sent."""

    def abort(self) -> None:
        """Do not send the request."""
        self.aborted = True
        self.wake()

    def wake(self) -> None:
        """Look again, if it waits."""
        if self._wake is not None:
            self._wake.set()

    async def sleep(self) -> None:
        """Wait for :meth:`wake`."""
        self._wake = anyio.Event()
        try:
            await self._wake.wait()
        finally:
            self._wake = None

    def close(self) -> None:
        """It is sent, or will not be. Idempotent."""
        self._door.leave(self)


class Admission:
    """See the module. Lifetime: one session. Invariant: what was let in never exceeds a limit; only a prompt that is
    longer than ``max_num_queued_tokens`` is let in when no other one waits for its first output."""

    def __init__(self, session: Session, settings: AdmissionSettings) -> None:
        self._session = session
        self._settings = settings
        self._closed: Callable[[], EngineError] | None = None
        self._closed_for: set[int] | None = None
        self._awaited: set[int] = set()  # those of them that were being started again when it was closed
        self._waits_while_closed = False
        self._arrivals: OrderedDict[Ticket, None] = OrderedDict()
        self._prepared: OrderedDict[Ticket, None] = OrderedDict()
        self.tickets: dict[Ticket, None] = {}
        """Who is on the way to the wire."""
        self._preparing_seqs = 0  # of those tickets that were let in
        self._preparing_bytes = 0
        self._let_in: set[Ticket] = set()
        self._pace = _Pace()
        self._since_turn = 0
        self._turn = anyio.Lock(fast_acquire=True)
        self.rejections: dict[Reason, int] = dict.fromkeys(get_args(Reason), 0)

    # --------------------------------------------------------------------- the gate

    @property
    def is_open(self) -> bool:
        """Whether anybody is let in."""
        return self._closed is None

    def close(
        self, error: Callable[[], EngineError], *, wait: bool | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        """Let nobody in from now on: they fail with ``error``, or wait for :meth:`open` (``None``: as the client was
        told, see ``admission``). ``ranks``: on whose account, also of those that are being started again; when they
        are all gone, it is open again. Synchronous."""
        self._closed = error
        self._closed_for = None if ranks is None else set(ranks)
        self._awaited = set(self._closed_for or ()).intersection(self._session.restarts.pending)
        self._waits_while_closed = self._settings.admission == "wait" if wait is None else wait
        self.look()

    def open(self) -> None:
        """Let them in again. Synchronous, idempotent."""
        self._closed = None
        self.look()
        self._session.restarts.look()

    # ---------------------------------------------------------------------- tickets

    @property
    def num_waiting(self) -> int:
        """How many requests wait to be let in, or to be sent."""
        return len(self._arrivals) + len(self._prepared)

    @property
    def num_outstanding(self) -> int:
        """Sequences that were let in and have not ended."""
        return self._preparing_seqs + len(self._session.connection.requests) + self._session.sent_again

    def ticket(self, label: str | None, *, num_seqs: int = 1, size_bytes: int = 0, nowait: bool = False) -> Ticket:
        """A ticket for one request of ``num_seqs`` sequences, of about this size."""
        ticket = Ticket(self, label, num_seqs, size_bytes, nowait=nowait)
        self.tickets[ticket] = None
        return ticket

    async def enter(self, ticket: Ticket) -> None:
        """Wait until the request may be prepared; returns at once in ordinary times, or when the ticket is aborted.

        Raises:
            OverloadedError: a limit is reached, and it does not wait.
            EngineAsleepError: the engine is paused or asleep, and it does not wait.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: safe; the next one moves up.
        """
        self.check_ever(ticket.num_seqs)
        self._since_turn += 1
        if self._since_turn > _PER_TURN or self._turn.locked():
            await self._take_turn()
        await self._queue_up(ticket, self._arrivals, self._bars_entry, 0)
        if not ticket.aborted:
            self._let_in.add(ticket)
            self._preparing_seqs += ticket.num_seqs
            self._preparing_bytes += ticket.size_bytes

    async def _take_turn(self) -> None:
        """Let other tasks run: a burst of requests must not hold up the streams. In order; each that had to queue up
        here has had its turn by that."""
        async with self._turn:
            if self._since_turn > _PER_TURN:
                await anyio.lowlevel.checkpoint()
                self._since_turn = 0

    async def clear(self, ticket: Ticket, num_tokens: int) -> None:
        """:meth:`enter` for the last step: the request, of so many prompt tokens, must be sent without another await.

        Raises, Cancellation: as :meth:`enter`.
        """
        await self._queue_up(ticket, self._prepared, self._bars_sending, num_tokens)

    def leave(self, ticket: Ticket) -> None:
        """For the ticket's own ``close``."""
        self.tickets.pop(ticket, None)
        if ticket in self._let_in:
            self._let_in.remove(ticket)
            self._preparing_seqs -= ticket.num_seqs
            self._preparing_bytes -= ticket.size_bytes
            self.look()

    def look(self) -> None:
        """There may be room, or a rank has gone: who is next looks. Cheap if nobody waits. Synchronous."""
        if self._closed is not None and self._closed_for is not None:
            self._awaited.intersection_update(self._session.restarts.pending)
            self._closed_for.intersection_update({*self._session.connection.rota.serving, *self._awaited})
            if not self._closed_for:
                self._closed = None
                self._session.restarts.look()
        for queue in (self._prepared, self._arrivals):
            if queue:
                next(iter(queue)).wake()

    def lets_in(self) -> bool:
        """Whether one more request would be let in at once, as far as is known before its prompt is looked at."""
        ticket = Ticket(self, None, 1, 0, nowait=True)
        barred = self._bars_entry(ticket, 0) or self._bars_sending(ticket, 0)
        return not barred and not self._arrivals and not self._prepared

    def check(self, num_seqs: int = 1) -> None:
        """See :meth:`EngineClient.check_admission`."""
        self.check_ever(num_seqs)
        ticket = Ticket(self, None, num_seqs, 0, nowait=True)
        if reason := self._bars_entry(ticket, 0) or self._bars_sending(ticket, 0):
            raise self._refusal(ticket, reason)
        if self._arrivals:
            raise self._refusal(ticket, "requests")

    def check_ever(self, num_seqs: int) -> None:
        """Refuse what could never be let in."""
        limit = self._settings.max_num_queued_reqs
        if limit is not None and num_seqs > limit:
            self.rejections["requests"] += 1
            raise OverloadedError(
                f"one request of {num_seqs} sequences is more than max_num_queued_reqs={limit}", reason="requests"
            )

    # -------------------------------------------------------------------- internals

    async def _queue_up(
        self,
        ticket: Ticket,
        queue: OrderedDict[Ticket, None],
        bars: Callable[[Ticket, int], Reason | None],
        num_tokens: int,
    ) -> None:
        self._check()
        reason = bars(ticket, num_tokens)
        if (reason is None and not queue) or ticket.aborted:
            return
        if reason is None and ticket.nowait:  # it would overtake those who wait
            raise self._refusal(ticket, "requests" if queue is self._arrivals else "tokens")
        queue[ticket] = None
        try:
            while not ticket.aborted:
                self._check()
                reason = bars(ticket, num_tokens)
                if reason is None and next(iter(queue)) is ticket:
                    return
                if reason is not None and not self._may_wait(ticket, reason):
                    raise self._refusal(ticket, reason)
                await ticket.sleep()
        finally:
            del queue[ticket]
            self.look()

    def _check(self) -> None:
        self._session.check_usable()
        self._session.check_admitting()

    def _may_wait(self, ticket: Ticket, reason: Reason) -> bool:
        if ticket.nowait:
            return False
        if reason == "closed":
            return self._waits_while_closed
        return reason in ("bytes", "restarting") or self._settings.admission == "wait"

    def _bars_entry(self, ticket: Ticket, _num_tokens: int) -> Reason | None:
        limit = self._settings.max_num_queued_reqs
        if self._closed is not None:
            return "closed"
        if limit is not None and self.num_outstanding + ticket.num_seqs > limit:
            return "requests"
        return self._bars_bytes(self._preparing_bytes)

    def _bars_sending(self, _ticket: Ticket, num_tokens: int) -> Reason | None:
        limit = self._settings.max_num_queued_tokens
        if self._closed is not None:
            return "closed"
        queued = self._session.connection.requests.num_queued_tokens if limit is not None else 0
        if limit is not None and queued and queued + num_tokens > limit:
            return "tokens"
        return self._bars_bytes(0)

    def _bars_bytes(self, coming_bytes: int) -> Reason | None:
        if self._session.send_budget.any_room(coming_bytes):
            return None
        return "bytes" if self._session.connection.rota.serving else "restarting"

    def _refusal(self, ticket: Ticket, reason: Reason) -> EngineError:
        self.rejections[reason] += 1
        if self._closed is not None:
            refusal = self._closed()
            if isinstance(refusal, RequestError):
                refusal.request_id = ticket.label
            return refusal
        settings, requests = self._settings, self._session.connection.requests
        num_before = len(self._arrivals) - (ticket in self._arrivals)
        what = {
            "requests": f"{self.num_outstanding} requests are in flight or being prepared, {num_before} wait "
            f"(max_num_queued_reqs={settings.max_num_queued_reqs})",
            "tokens": f"{requests.num_queued_tokens} prompt tokens wait for their first output "
            f"(max_num_queued_tokens={settings.max_num_queued_tokens})",
            "bytes": "no engine has read what was sent to it (max_unread_bytes)",
            "restarting": "no engine serves, and those that died are being started again",
        }[reason]
        return OverloadedError(
            f"no request is taken now: {what}; nothing was sent",
            reason=reason,
            retry_after_s=self._pace.retry_after_s(ticket.num_seqs, requests.num_ended),
            request_id=ticket.label,
        )


class _Pace:
    """How fast requests have been ending of late."""

    def __init__(self) -> None:
        self._since_s = anyio.current_time()
        self._ended_before = 0
        self._rate: float | None = None  # ends per second

    def retry_after_s(self, num_seqs: int, num_ended: int) -> float | None:
        """When ``num_seqs`` more will have ended, if they go on as they did up to ``num_ended``; ``None``: none has
        ended yet."""
        now_s = anyio.current_time()
        elapsed_s, count = now_s - self._since_s, num_ended - self._ended_before
        if elapsed_s > 0 and count > 0:
            self._rate = count / elapsed_s
        if elapsed_s > _WINDOW_S:
            self._since_s, self._ended_before = now_s, num_ended
        return None if self._rate is None else num_seqs / self._rate
