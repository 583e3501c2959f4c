"""The discipline that every message socket of this package follows.

Owns: one reader and many senders, checkpoints and fairness, the closed state, the thread check, validation of parts,
counters. Knows nothing about how messages travel: an implementation supplies ``_take``, ``_put``, ``_park`` and so on.

The two rules that make cancellation harmless: every await of a receive comes before the first message is taken, and
every await of a send comes before the message is handed over. Only the wait for readiness can be cancelled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from threading import get_ident
from typing import TYPE_CHECKING, Self

from anyio import BusyResourceError, ClosedResourceError, WouldBlock
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from anyengine._transport.abc import TransportStatistics
from anyengine.exceptions import WrongLoopError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from anyengine._transport.abc import Message, SendablePart

__all__ = ["DRAIN_BYTES", "IN", "OUT", "SocketBase"]

IN = 1  # equal to zmq.POLLIN and zmq.POLLOUT
OUT = 2
DRAIN_BYTES = 1 << 20
"""A drain stops after the message with which it has taken this much: 256 large ones would hold the loop too long."""


class SocketBase(ABC):
    """Belongs to the thread that created it; at most one task receives at a time, any number sends.

    ``_dry`` is the latest knowledge about receiving: the last look at the socket said that nothing is there.
    """

    __slots__ = ("_closed", "_dry", "_owes_turn", "_receiving", "_rescues", "_sent", "_taken", "_thread", "_waits")

    def __init__(self) -> None:
        self._thread = get_ident()
        self._closed = False
        self._dry = False
        self._receiving = False
        self._owes_turn = False  # the last receive returned without letting other tasks run
        self._taken = self._sent = self._waits = self._rescues = 0

    # ------------------------------------------------------------ to be implemented; none of these but _park awaits
    @abstractmethod
    def _take(self, limit: int) -> list[Message]:
        """Messages that are there now, within the limits; sets ``_dry``."""

    @abstractmethod
    def _put(self, parts: list[SendablePart]) -> None:
        """Hand over one message whole, or raise (``WouldBlock`` at the high-water mark)."""

    @abstractmethod
    def _writable(self) -> bool:
        """Look whether a send would go through now."""

    @abstractmethod
    async def _park(self, flag: int) -> None:
        """Sleep until ``flag`` may have become true, or raise ``ClosedResourceError``; the caller tries again.

        The last look at the socket, by anybody, must have said "not ``flag``", with no await since.
        """

    @abstractmethod
    def _wake(self) -> None:
        """Make every parked task try again."""

    @abstractmethod
    def _shut(self) -> None:
        """Free the resource. Called once, after ``_closed`` is set and parked tasks were woken."""

    # --------------------------------------------------------------------------------------------------- receive
    def drain_nowait(self, limit: int = 256) -> list[Message]:
        """See :meth:`MessageReceiver.drain_nowait`."""
        self._check_reader(limit)
        batch = self._take(limit)
        self._taken += len(batch)
        return batch

    async def drain(self, limit: int = 256) -> list[Message]:
        """See :meth:`MessageReceiver.drain`."""
        self._check_reader(limit)
        self._receiving = True
        try:
            if self._owes_turn:
                self._owes_turn = False
                await checkpoint()
            else:
                await checkpoint_if_cancelled()
            if self._closed:
                raise ClosedResourceError
            self._owes_turn = True
            while True:
                if self._dry:
                    await self._park(IN)
                    self._owes_turn = False
                if batch := self._take(limit):
                    self._taken += len(batch)
                    return batch
        finally:
            self._receiving = False

    # ------------------------------------------------------------------------------------------------------ send
    def send_nowait(self, parts: Sequence[SendablePart]) -> None:
        """See :meth:`MessageSender.send_nowait`."""
        self._check_open()
        self._put(_checked(parts))
        self._sent += 1

    async def send(self, parts: Sequence[SendablePart]) -> None:
        """See :meth:`MessageSender.send`."""
        self._check_open()
        await checkpoint()
        while True:
            try:
                return self.send_nowait(parts)
            except WouldBlock:
                if not self._writable():
                    await self._park(OUT)

    # ----------------------------------------------------------------------------------------------------- close
    def close(self) -> None:
        """See :meth:`MessageReceiver.close`."""
        if self._closed:
            return
        self._check_thread()
        self._closed = True
        try:
            self._wake()
        finally:
            self._shut()

    async def aclose(self) -> None:
        """See :meth:`MessageReceiver.aclose`."""
        self.close()
        await checkpoint()

    def statistics(self) -> TransportStatistics:
        """See :meth:`MessageReceiver.statistics`."""
        return TransportStatistics(self._taken, self._sent, self._waits, self._rescues)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------------- checks
    def _check_thread(self) -> None:
        if self._thread != get_ident():
            raise WrongLoopError("a message socket belongs to the thread that created it, and this is another one")

    def _check_open(self) -> None:
        self._check_thread()
        if self._closed:
            raise ClosedResourceError

    def _check_reader(self, limit: int) -> None:
        self._check_open()
        if self._receiving:
            raise BusyResourceError("receiving from")
        if limit < 1:
            raise ValueError(f"limit={limit!r} must be at least 1")


def _checked(parts: Sequence[SendablePart]) -> list[SendablePart]:
    """The parts, if every one is a contiguous buffer. An error after the first frame would leave half a message."""
    if not parts:
        raise ValueError("a message has at least one part")
    checked: list[SendablePart] = []
    for part in parts:
        if type(part) is not bytes:
            part = memoryview(part)
            if not part.c_contiguous:
                raise ValueError("a message part must be a C-contiguous buffer")
        checked.append(part)
    return checked
