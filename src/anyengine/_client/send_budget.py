"""How much may be on its way to an engine: back-pressure for payloads, since the socket itself takes everything.

Owns the count of bytes that were sent and are not known to have been read. That something has been read is known by a
call behind it: its answer comes from beyond. So an engine that reads slowly holds up those who submit, and not our
memory. The calls are made only once a quarter of the limit is on its way: short prompts never cause one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import engine_identity

from .liveness import PROBE

if TYPE_CHECKING:
    from .session import Session

__all__ = ["SendBudget"]


@dataclass(slots=True)
class _Account:
    sent_bytes: int = 0
    read_bytes: int = 0
    asking: bool = False

    @property
    def unread_bytes(self) -> int:
        return self.sent_bytes - self.read_bytes


class SendBudget:
    """The accounts of all ranks. Invariant: a rank with ``limit_bytes`` or more on its way gets nothing more. (So one
    payload may go beyond the limit, and one that is larger than the limit can still be sent.)"""

    def __init__(self, session: Session, ranks: Iterable[int], limit_bytes: int) -> None:
        self._session = session
        self._limit_bytes = limit_bytes
        self._accounts = {rank: _Account() for rank in ranks}
        self._changed = anyio.Event()

    @property
    def unread_bytes(self) -> int:
        """What is on its way to all ranks together."""
        return sum(account.unread_bytes for account in self._accounts.values())

    def has_room(self, rank: int) -> bool:
        """Whether something may be sent to ``rank`` now."""
        return self._accounts[rank].unread_bytes < self._limit_bytes

    async def wait_room(self) -> None:
        """Wait until some rank that serves has room, or none serves and none is waited for: sending will tell why.

        Cancellation: safe.
        """
        session = self._session
        while session.cause is None and ((serving := session.connection.rota.serving) or session.restarts.are_awaited):
            if any(map(self.has_room, serving)):
                return
            await self._changed.wait()

    def charge(self, rank: int, size_bytes: int) -> None:
        """So much has been sent."""
        account = self._accounts[rank]
        account.sent_bytes += size_bytes
        if not account.asking and account.unread_bytes >= self._limit_bytes // 4:
            self._ask(rank, account)

    def forget(self, rank: int) -> None:
        """The engine of ``rank`` is another one now."""
        self._accounts[rank] = _Account()

    def wake(self) -> None:
        """Ranks have died, or the session has ended: whoever waits looks again."""
        self._changed.set()
        self._changed = anyio.Event()

    def _ask(self, rank: int, account: _Account) -> None:
        mark_bytes = account.sent_bytes
        connection = self._session.connection

        def answered() -> None:
            account.asking = False
            # A call that failed with its rank: that has read all that it ever will, and must be asked nothing more.
            account.read_bytes = account.sent_bytes if rank in self._session.burials.deaths else mark_bytes
            self.wake()
            serves = self._session.cause is None and rank in connection.rota.serving
            if serves and account.unread_bytes >= self._limit_bytes // 4:
                self._ask(rank, account)

        account.asking = True
        call, frames = connection.utility(PROBE, (), rank, answered)
        try:
            self._session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable:
            connection.utilities.forget(call.call_id)
            account.asking = False
            self._session.burials.bury(rank, "its input connection is gone")  # or those who wait for room wait on
