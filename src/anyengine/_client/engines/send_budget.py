"""How much may be on its way to an engine: back-pressure for payloads, since the socket itself takes everything.

Owns the count of bytes that were sent and are not known to have been read. What comes back from behind them tells that
they were: the first output of a request, or the answer to a call. So an engine that reads slowly holds up those who
submit, and not our memory. Calls are made for it only once a quarter of the limit is on its way: short prompts never
cause one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["SendBudget"]


@dataclass(slots=True)
class _Account:
    sent_bytes: int = 0
    read_bytes: int = 0
    asking: bool = False


class SendBudget:
    """The accounts of all ranks. Invariant: a rank with ``limit_bytes`` or more on its way gets nothing more. (So one
    payload may go beyond the limit, and one that is larger than the limit can still be sent.) Aborts and calls do not
    count: they are small, and must get through."""

    def __init__(self, session: Session, ranks: Iterable[int], limit_bytes: int) -> None:
        self._session = session
        self._limit_bytes = limit_bytes
        self._accounts = {rank: _Account() for rank in ranks}
        self._changed = anyio.Event()
        self.waiting: int = 0
        """How many tasks are in :meth:`wait_room`."""

    @property
    def unread_bytes(self) -> int:
        """What is on its way to all ranks together."""
        return sum(map(self._unread_bytes, self._accounts))

    def sent_bytes(self, rank: int) -> int:
        """What ``rank`` has been sent so far."""
        return self._accounts[rank].sent_bytes

    def has_room(self, rank: int, coming_bytes: int = 0) -> bool:
        """Whether something may be sent to ``rank`` now, behind ``coming_bytes`` of others."""
        return self._unread_bytes(rank) + coming_bytes < self._limit_bytes

    def any_room(self, coming_bytes: int = 0) -> bool:
        """Whether something may be sent to some rank that serves; or none serves and none is waited for, and sending
        will tell why."""
        session = self._session
        if session.cause is not None:
            return True
        if serving := session.connection.rota.serving:
            return any(self.has_room(rank, coming_bytes) for rank in serving)
        return not session.restarts.are_awaited

    async def wait_room(self, rank: int | None = None) -> None:
        """Wait until :meth:`any_room`; or, for what only ``rank`` may have, until that one has room, or is no more.

        Cancellation: safe.
        """
        self.waiting += 1
        try:
            while not (self.any_room() if rank is None else self._is_free(rank)):
                await self._changed.wait()
        finally:
            self.waiting -= 1

    def charge(self, rank: int, size_bytes: int) -> int:
        """So much has been sent; what ``rank`` has been sent with it."""
        account = self._accounts[rank]
        account.sent_bytes += size_bytes
        if not account.asking and self._unread_bytes(rank) >= self._limit_bytes // 4:
            self._ask(rank, account)
        return account.sent_bytes

    def read(self, rank: int, mark_bytes: int) -> None:
        """``rank`` has read everything up to this."""
        account = self._accounts[rank]
        if mark_bytes > account.read_bytes:
            account.read_bytes = mark_bytes
            self.wake()

    def forget(self, rank: int) -> None:
        """The engine of ``rank`` is another one now: what the former one was sent is on its way no more."""
        account = self._accounts[rank]
        account.read_bytes, account.asking = account.sent_bytes, False

    def wake(self) -> None:
        """There may be room, or ranks have died, or the session has ended: whoever waits looks again."""
        if self.waiting:
            self._changed.set()
            self._changed = anyio.Event()
        self._session.on_room()

    def _is_free(self, rank: int) -> bool:
        session = self._session
        return session.cause is not None or rank not in session.connection.rota.serving or self.has_room(rank)

    def _unread_bytes(self, rank: int) -> int:
        account = self._accounts[rank]
        read_bytes = self._session.connection.requests.read_bytes.get(rank, 0)
        return account.sent_bytes - max(account.read_bytes, read_bytes)

    def _ask(self, rank: int, account: _Account) -> None:
        session = self._session

        def passed() -> None:
            account.asking = False
            if rank in session.burials.deaths:  # it has read all that it ever will, and must be asked nothing more
                self.read(rank, account.sent_bytes)
            self.wake()
            serves = session.cause is None and rank in session.connection.rota.serving
            if serves and self._unread_bytes(rank) >= self._limit_bytes // 4:
                self._ask(rank, account)

        account.asking = True
        session.fences.send(rank, passed)
