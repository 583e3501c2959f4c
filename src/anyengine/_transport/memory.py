"""Message sockets in memory, for one event loop: the second implementation, without descriptors, threads or processes.

Owns queues and nothing else. What callers can observe is what ``zmq_socket`` shows, made deterministic: a peer is known
the moment it connects and unknown the moment it closes, and what it sent before stays readable.

Two shapes, as in ZeroMQ: ``MemoryRouter.connect(identity)`` gives a :class:`MemoryDealer`, ``MemoryPull.connect()`` a
:class:`MemoryPush`. A second dealer with an identity in use takes it over (ROUTER_HANDOVER); what the old one sends is
lost. A high-water mark counts the messages that wait in one inbox; 0 means none. Whoever sets ``on_peer`` of a
listening socket hears of every connection that comes or goes.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import TYPE_CHECKING

from anyio import BrokenResourceError, ClosedResourceError, Event, WouldBlock

from anyengine._transport.abc import PeerEvent, PeerUnreachable
from anyengine._transport.socket_base import DRAIN_BYTES, IN, OUT, SocketBase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyengine._transport.abc import Message, SendablePart

__all__ = ["MemoryDealer", "MemoryPull", "MemoryPush", "MemoryRouter"]


class _MemorySocket(SocketBase):
    """An inbox, and the tasks parked on this socket: its reader, and its senders that wait for room elsewhere."""

    __slots__ = ("_high_water_mark", "_inbox", "_parked")

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__()
        self._inbox: deque[Message] = deque()
        self._high_water_mark = high_water_mark
        self._parked: dict[Event, int] = {}

    def _senders(self) -> Iterable[_MemorySocket]:
        """The sockets whose tasks may be waiting for room in this inbox."""
        return ()

    def _has_room(self) -> bool:
        return self._closed or not self._high_water_mark or len(self._inbox) < self._high_water_mark

    def _deliver(self, message: Message) -> None:
        """Called by a sending socket. A closed inbox loses the message, as a connection without a peer does."""
        if self._closed:
            return
        if not self._has_room():
            raise WouldBlock
        self._inbox.append(message)
        self._dry = False
        self._wake(IN)

    def _take(self, limit: int) -> list[Message]:
        batch: list[Message] = []
        size_bytes = 0
        while self._inbox and len(batch) < limit and size_bytes < DRAIN_BYTES:
            message = self._inbox.popleft()
            size_bytes += sum(map(len, message))
            batch.append(message)
        self._dry = not self._inbox
        if batch:
            self._make_room()
        return batch

    def _make_room(self) -> None:
        for sender in self._senders():
            sender._wake(OUT)

    async def _park(self, flag: int) -> None:
        if self._closed:
            raise ClosedResourceError
        self._waits += 1
        turn = Event()
        self._parked[turn] = flag
        try:
            await turn.wait()
        finally:
            del self._parked[turn]
        if self._closed:
            raise ClosedResourceError
        # The next _take looks for itself: _dry is kept by whoever delivers.

    def _wake(self, flags: int = IN | OUT) -> None:
        for turn, flag in self._parked.items():
            if flag & flags:
                turn.set()

    def _writable(self) -> bool:
        return True

    def _shut(self) -> None:
        self._inbox.clear()
        self._make_room()


class _Listener(_MemorySocket):
    """A socket that others connect to."""

    __slots__ = ("_connections", "_numbers", "on_peer")

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__(high_water_mark)
        self.on_peer: Callable[[PeerEvent], None] | None = None
        self._connections: dict[_MemorySocket, int] = {}
        self._numbers = count(1)

    def _note_connected(self, peer: _MemorySocket) -> None:
        self._connections[peer] = number = next(self._numbers)
        if self.on_peer is not None:
            self.on_peer(PeerEvent("connected", number, "memory"))

    def _note_disconnected(self, peer: _MemorySocket) -> None:
        number = self._connections.pop(peer, None)  # none: it was cut off before it left
        if number is not None and self.on_peer is not None:
            self.on_peer(PeerEvent("disconnected", number, "memory"))


class MemoryRouter(_Listener):
    """Addresses its peers by identity; never blocks when it sends."""

    __slots__ = ("_peers",)

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__(high_water_mark)
        self._peers: dict[bytes, MemoryDealer] = {}

    def connect(self, identity: bytes) -> MemoryDealer:
        """A peer with this ``identity``; a former one of that name is cut off."""
        self._check_open()
        dealer = MemoryDealer(self, identity)
        former = self._peers.get(identity)
        self._peers[identity] = dealer
        if former is not None:
            former._wake(OUT)
            self._note_disconnected(former)
        self._note_connected(dealer)
        return dealer

    def _senders(self) -> Iterable[_MemorySocket]:
        return self._peers.values()

    def _put(self, parts: list[SendablePart]) -> None:
        identity, *rest = _snapshot(parts)
        peer = self._peers.get(bytes(identity))
        if peer is None:
            raise PeerUnreachable(bytes(identity))
        peer._deliver(rest)


class MemoryDealer(_MemorySocket):
    """A peer of a :class:`MemoryRouter`, which sees ``identity`` in front of every message from here."""

    __slots__ = ("_identity", "_router")

    def __init__(self, router: MemoryRouter, identity: bytes) -> None:
        super().__init__()
        self._router = router
        self._identity = identity

    def _is_current(self) -> bool:
        return self._router._peers.get(self._identity) is self

    def _put(self, parts: list[SendablePart]) -> None:
        if self._is_current():
            self._router._deliver([self._identity, *_snapshot(parts)])

    def _writable(self) -> bool:
        return self._router._has_room() or not self._is_current()

    def _shut(self) -> None:
        super()._shut()
        if self._is_current():
            del self._router._peers[self._identity]
        self._router._note_disconnected(self)


class MemoryPull(_Listener):
    """Receives from any number of :class:`MemoryPush` ends."""

    __slots__ = ("_pushers",)

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__(high_water_mark)
        self._pushers: set[MemoryPush] = set()

    def connect(self) -> MemoryPush:
        """A new sending end."""
        self._check_open()
        pusher = MemoryPush(self)
        self._pushers.add(pusher)
        self._note_connected(pusher)
        return pusher

    def _senders(self) -> Iterable[_MemorySocket]:
        return self._pushers

    def _put(self, parts: list[SendablePart]) -> None:
        raise BrokenResourceError("this socket only receives")


class MemoryPush(_MemorySocket):
    """Sends to one :class:`MemoryPull`."""

    __slots__ = ("_pull",)

    def __init__(self, pull: MemoryPull) -> None:
        super().__init__()
        self._pull = pull

    def _take(self, limit: int) -> list[Message]:
        raise BrokenResourceError("this socket only sends")

    def _put(self, parts: list[SendablePart]) -> None:
        self._pull._deliver(_snapshot(parts))

    def _writable(self) -> bool:
        return self._pull._has_room()

    def _shut(self) -> None:
        super()._shut()
        self._pull._pushers.discard(self)
        self._pull._note_disconnected(self)


def _snapshot(parts: list[SendablePart]) -> Message:
    return [bytes(part) for part in parts]
