"""Peers that connect to a socket and leave it, as libzmq's socket monitor tells them; in memory too.

Owns the reading of monitor messages. Does not decide what the loss of a peer means.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

import zmq
from anyio import ClosedResourceError

if TYPE_CHECKING:
    from types import TracebackType

    from anyengine._transport.abc import MessageReceiver, Watchable

__all__ = ["PeerEvent", "PeerMonitor", "open_monitor"]

_KINDS: dict[int, Literal["connected", "disconnected"]] = {
    zmq.EVENT_ACCEPTED: "connected",
    zmq.EVENT_CONNECTED: "connected",
    zmq.EVENT_DISCONNECTED: "disconnected",
}
_WATCHED = int(zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A connection came or went. ``connection`` (libzmq's descriptor) pairs the two, until the number is used again."""

    kind: Literal["connected", "disconnected"]
    connection: int
    address: str


class PeerMonitor:
    """An asynchronous iterator of :class:`PeerEvent`; ends when the watched socket or the monitor is closed.

    One task iterates. Events are queued from the moment the monitor is opened.
    """

    def __init__(self, source: MessageReceiver) -> None:
        self._source = source

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PeerEvent:
        """The next event.

        Cancellation: loses no event.
        """
        while True:
            try:
                [(head, address)] = await self._source.drain(1)
            except ClosedResourceError:
                raise StopAsyncIteration from None
            event, connection = struct.unpack("=Hi", head)
            if event == zmq.EVENT_MONITOR_STOPPED:
                self.close()
            elif event in _KINDS:
                return PeerEvent(_KINDS[event], connection, bytes(address).decode())

    def close(self) -> None:
        """Stop watching; a parked iteration ends. Idempotent."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()


def open_monitor(socket: Watchable) -> PeerMonitor:
    """Watch the connections of ``socket`` from now on. A socket can be watched once in its life.

    Raises:
        BrokenResourceError: it is being watched already; the cause is attached.
    """
    return PeerMonitor(socket.attach_monitor(_WATCHED))
