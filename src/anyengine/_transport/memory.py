"""Message sockets in memory, for one event loop: the second implementation, without descriptors, threads or processes.

Owns queues and nothing else. What callers can observe is what ``zmq_socket`` shows, made deterministic: a peer is known
the moment it connects and unknown the moment it closes, and what it sent before stays readable.

Two shapes, as in ZeroMQ: ``MemoryRouter.connect(identity)`` gives a :class:`MemoryDealer`, ``MemoryPull.connect()`` a
:class:`MemoryPush`. A second dealer with an identity in use takes it over (ROUTER_HANDOVER); what the old one sends is
lost. A high-water mark counts the messages that wait in one inbox; 0 means none. A monitor tells of peers as libzmq's
does, each at the moment when it comes or goes.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, TypeVar

from anyio import BrokenResourceError, ClosedResourceError, Event, WouldBlock

from anyengine._transport.abc import PeerUnreachable
from anyengine._transport.socket_base import DRAIN_BYTES, IN, OUT, SocketBase

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from anyengine._transport.abc import Message, SendablePart

__all__ = ["MemoryDealer", "MemoryEndpoints", "MemoryLink", "MemoryPull", "MemoryPush", "MemoryRouter"]

_ACCEPTED, _DISCONNECTED, _STOPPED = 0x20, 0x200, 0x400  # zmq.EVENT_ACCEPTED and so on


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


class _MemoryMonitor(_MemorySocket):
    """What a watched socket tells of its peers."""

    __slots__ = ()

    def _put(self, parts: list[SendablePart]) -> None:
        raise BrokenResourceError("this socket only receives")


class _MemoryListener(_MemorySocket):
    """A listening socket: peers connect to it, and may be watched."""

    __slots__ = ("_connections", "_monitor")

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__(high_water_mark)
        self._monitor: _MemoryMonitor | None = None
        self._connections = 0

    def attach_monitor(self, events: int) -> _MemoryMonitor:
        """See :meth:`Watchable.attach_monitor`. What it tells does not depend on ``events``."""
        self._check_open()
        if self._monitor is not None:
            raise BrokenResourceError("this socket is being watched already")
        self._monitor = _MemoryMonitor()
        return self._monitor

    def _accept(self) -> int:
        """The number of a new connection, which stands where libzmq has a descriptor."""
        self._check_open()
        self._connections += 1
        self._tell(_ACCEPTED, self._connections)
        return self._connections

    def _tell(self, event: int, connection: int) -> None:
        if self._monitor is not None:
            self._monitor._deliver([struct.pack("=Hi", event, connection), b"memory"])

    def _shut(self) -> None:
        super()._shut()
        self._tell(_STOPPED, 0)


class MemoryRouter(_MemoryListener):
    """Addresses its peers by identity; never blocks when it sends."""

    __slots__ = ("_peers",)

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__(high_water_mark)
        self._peers: dict[bytes, MemoryDealer] = {}

    def connect(self, identity: bytes) -> MemoryDealer:
        """A peer with this ``identity``; a former one of that name is cut off."""
        dealer = MemoryDealer(self, identity, self._accept())
        former = self._peers.get(identity)
        self._peers[identity] = dealer
        if former is not None:
            former._wake(OUT)
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

    __slots__ = ("_connection", "_identity", "_router")

    def __init__(self, router: MemoryRouter, identity: bytes, connection: int) -> None:
        super().__init__()
        self._router = router
        self._identity = identity
        self._connection = connection

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
        self._router._tell(_DISCONNECTED, self._connection)


class MemoryPull(_MemoryListener):
    """Receives from any number of :class:`MemoryPush` ends."""

    __slots__ = ("_pushers",)

    def __init__(self, high_water_mark: int = 0) -> None:
        super().__init__(high_water_mark)
        self._pushers: set[MemoryPush] = set()

    def connect(self) -> MemoryPush:
        """A new sending end."""
        pusher = MemoryPush(self, self._accept())
        self._pushers.add(pusher)
        return pusher

    def _senders(self) -> Iterable[_MemorySocket]:
        return self._pushers

    def _put(self, parts: list[SendablePart]) -> None:
        raise BrokenResourceError("this socket only receives")


class MemoryPush(_MemorySocket):
    """Sends to one :class:`MemoryPull`."""

    __slots__ = ("_connection", "_pull")

    def __init__(self, pull: MemoryPull, connection: int) -> None:
        super().__init__()
        self._pull = pull
        self._connection = connection

    def _take(self, limit: int) -> list[Message]:
        raise BrokenResourceError("this socket only sends")

    def _put(self, parts: list[SendablePart]) -> None:
        self._pull._deliver(_snapshot(parts))

    def _writable(self) -> bool:
        return self._pull._has_room()

    def _shut(self) -> None:
        super()._shut()
        self._pull._pushers.discard(self)
        self._pull._tell(_DISCONNECTED, self._connection)


_SocketT = TypeVar("_SocketT", bound=_MemorySocket)


@dataclass
class MemoryEndpoints:
    """A client's listening side in memory (``ClientEndpoints``); the other side calls ``connect`` on its sockets."""

    handshake: MemoryRouter = field(default_factory=MemoryRouter)
    inputs: MemoryRouter = field(default_factory=MemoryRouter)
    outputs: MemoryPull = field(default_factory=MemoryPull)
    handshake_address: str = "memory://handshake"
    input_address: str = "memory://input"
    output_address: str = "memory://output"

    def close(self) -> None:
        """Close all three sockets."""
        for socket in (self.handshake, self.inputs, self.outputs):
            socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()


class MemoryLink:
    """An engine's side of a client's :class:`MemoryEndpoints`: the three sockets of one ``identity``, connected when
    they are first asked for, all of them closed at the end of the block, as those of a process are."""

    def __init__(self, endpoints: MemoryEndpoints, identity: bytes) -> None:
        self._endpoints = endpoints
        self._identity = identity
        self._open: list[_MemorySocket] = []

    def connect_handshake(self) -> MemoryDealer:
        """A new connection to the handshake socket."""
        return self._opened(self._endpoints.handshake.connect(self._identity))

    def connect_inputs(self) -> MemoryDealer:
        """A new connection to the input socket."""
        return self._opened(self._endpoints.inputs.connect(self._identity))

    def connect_outputs(self) -> MemoryPush:
        """A new connection to the output socket."""
        return self._opened(self._endpoints.outputs.connect())

    def _opened(self, socket: _SocketT) -> _SocketT:
        self._open.append(socket)
        return socket

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for socket in self._open:
            socket.close()


def _snapshot(parts: list[SendablePart]) -> Message:
    return [bytes(part) for part in parts]
