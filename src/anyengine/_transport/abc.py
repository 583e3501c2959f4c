"""What a message socket is, without saying what carries it.

Owns the vocabulary of the transport: a message is a list of parts, a part is a buffer. Knows neither ZeroMQ nor what
the parts mean.

**Parts.** A received part is ``bytes`` when it is small and a ``memoryview`` of the transport's own memory when it is
not (no copy; the memory lives as long as the view). Both decode with msgspec as they are. Parts given to a send are
*snapshots*: they are copied before the call returns, so the caller may change or free its buffers at once. They are
checked before the first one is sent, so a wrong type can never cut a multipart message in two.

**Identities.** A router-like socket has one more part in front: the peer's identity, on messages in and messages out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from anyio import BrokenResourceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = [
    "ClientEndpoints",
    "Message",
    "MessageReceiver",
    "MessageSender",
    "MessageSocket",
    "PeerUnreachable",
    "ReceivedPart",
    "SendablePart",
    "TransportStatistics",
    "Watchable",
    "WatchableReceiver",
    "WatchableSocket",
]

ReceivedPart: TypeAlias = bytes | memoryview
SendablePart: TypeAlias = bytes | bytearray | memoryview
Message: TypeAlias = list[ReceivedPart]


class PeerUnreachable(BrokenResourceError):
    """No peer with this ``identity`` is connected; nothing was sent."""

    def __init__(self, identity: bytes) -> None:
        super().__init__(identity)
        self.identity = identity

    def __str__(self) -> str:
        return f"no peer with identity {self.identity.hex(' ')} is connected"


@dataclass(frozen=True, slots=True)
class TransportStatistics:
    """Counters of one socket since it was opened.

    ``waits`` counts how often a task was parked: on an idle socket it does not move (nothing polls). ``rescues`` counts
    how often a parked task was woken because another task's call had swallowed its signal.
    """

    messages_received: int
    messages_sent: int
    waits: int
    rescues: int


class _Closable(Protocol):
    def close(self) -> None:
        """Close at once, dropping what is unsent; parked tasks get ``ClosedResourceError``. Idempotent.

        Raises:
            WrongLoopError: called from another thread than the one that created the socket.
        """

    async def aclose(self) -> None:
        """As :meth:`close`, then one checkpoint.

        Cancellation: the socket is closed in any case.
        """

    def statistics(self) -> TransportStatistics:
        """The counters so far; works after close."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class MessageReceiver(_Closable, Protocol):
    """The receiving end: one reader at a time."""

    async def drain(self, limit: int = 256) -> list[Message]:
        """Wait for a message, then return all that are there now: at least one, at most ``limit``, about 1 MiB.

        Handle or queue the whole batch before the next await, or it may be lost to a cancellation of the caller.

        Raises:
            BusyResourceError: another task is receiving.
            ClosedResourceError: the socket is closed, or was closed while waiting.
            BrokenResourceError: the transport failed; the cause is attached.
            WrongLoopError: used from another thread.

        Cancellation: loses nothing. Every await comes before the first message is taken.
        """
        ...

    def drain_nowait(self, limit: int = 256) -> list[Message]:
        """The messages that are there now, perhaps none; the same limits and errors as :meth:`drain`."""
        ...


class MessageSender(_Closable, Protocol):
    """The sending end: any number of tasks."""

    def send_nowait(self, parts: Sequence[SendablePart]) -> None:
        """Send one message, whole or not at all. Synchronous, so it may stand in a ``finally``.

        Raises:
            WouldBlock: the high-water mark is reached.
            PeerUnreachable: a router knows no such peer.
            ClosedResourceError: the socket is closed.
            BrokenResourceError: the transport failed; the cause is attached.
            TypeError, ValueError: a part is no contiguous buffer, or there are no parts; nothing was sent.
            WrongLoopError: used from another thread.
        """

    async def send(self, parts: Sequence[SendablePart]) -> None:
        """As :meth:`send_nowait`, but waits at the high-water mark.

        Cancellation: when it raises, nothing was sent; when it returns, the message was sent.
        """


class MessageSocket(MessageReceiver, MessageSender, Protocol):
    """Both ends in one."""


class Watchable(Protocol):
    """A listening socket whose peers can be watched (:mod:`.monitor`)."""

    def attach_monitor(self, events: int) -> MessageReceiver:
        """A socket that tells which peers come and go, in the words of libzmq's socket monitor, until this one is
        closed. ``events`` are libzmq's bits.

        Raises:
            BrokenResourceError: it is being watched already; the cause is attached.
        """
        ...


class WatchableReceiver(MessageReceiver, Watchable, Protocol):
    """Receives from peers that can be watched."""


class WatchableSocket(MessageSocket, Watchable, Protocol):
    """Both ends in one, with peers that can be watched."""


class ClientEndpoints(Protocol):
    """The listening side of a client: handshake router (unless somebody else answers it), input router, output
    pull, and the addresses engines need."""

    @property
    def handshake(self) -> MessageSocket | None: ...

    @property
    def inputs(self) -> WatchableSocket: ...

    @property
    def outputs(self) -> WatchableReceiver: ...

    @property
    def handshake_address(self) -> str | None: ...

    @property
    def input_address(self) -> str: ...

    @property
    def output_address(self) -> str: ...

    def close(self) -> None:
        """Close all three sockets and free what they used. Idempotent; never blocks on unsent data."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...
