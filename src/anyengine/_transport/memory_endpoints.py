"""A client and its engines in one process: the listening side and the connecting side, in memory.

Owns what :mod:`.endpoints` owns over ZeroMQ, and the engine's half of it. Knows nothing of what is said. One event loop
has both ends; an engine in a thread of its own has a task there that speaks for it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Self

import anyio

from anyengine._transport.memory import MemoryDealer, MemoryPull, MemoryPush, MemoryRouter

if TYPE_CHECKING:
    from types import TracebackType

    from anyengine._transport.abc import PeerEvent

__all__ = ["MemoryEndpoints", "MemoryLink", "MemoryMonitor"]


class MemoryMonitor:
    """A :class:`~anyengine._transport.abc.PeerMonitor` of a listening socket in memory."""

    def __init__(self, socket: MemoryRouter | MemoryPull) -> None:
        self._socket = socket
        self._feed, self._events = anyio.create_memory_object_stream["PeerEvent"](inf)
        socket.on_peer = self._feed.send_nowait

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PeerEvent:
        """The next event.

        Cancellation: loses no event.
        """
        try:
            return await self._events.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Stop watching; a parked iteration ends. Idempotent."""
        self._socket.on_peer = None
        self._feed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()
        self._events.close()


@dataclass
class MemoryEndpoints:
    """A client's listening side in memory (``ClientEndpoints``); an engine connects through a :meth:`link`."""

    handshake: MemoryRouter = field(default_factory=MemoryRouter)
    inputs: MemoryRouter = field(default_factory=MemoryRouter)
    outputs: MemoryPull = field(default_factory=MemoryPull)
    handshake_address: str = "memory://handshake"
    input_address: str = "memory://input"
    output_address: str = "memory://output"

    def link(self, identity: bytes) -> MemoryLink:
        """The connecting side of the engine with this ``identity``; nothing is connected yet."""
        return MemoryLink(self, identity)

    def watch_inputs(self) -> MemoryMonitor:
        """See :class:`~anyengine._transport.abc.ClientEndpoints`."""
        return MemoryMonitor(self.inputs)

    def watch_outputs(self) -> MemoryMonitor:
        """See :class:`~anyengine._transport.abc.ClientEndpoints`."""
        return MemoryMonitor(self.outputs)

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
    """The sockets of one engine in memory. Lifetime: the engine's, whose end closes them, as a process's would."""

    def __init__(self, endpoints: MemoryEndpoints, identity: bytes) -> None:
        self.identity = identity
        self._endpoints = endpoints
        self._open = ExitStack()

    def connect_handshake(self) -> MemoryDealer:
        """A connection to the handshake socket."""
        return self._open.enter_context(self._endpoints.handshake.connect(self.identity))

    def connect_inputs(self) -> MemoryDealer:
        """A connection to the input socket: requests come from here, after the registration has been sent."""
        return self._open.enter_context(self._endpoints.inputs.connect(self.identity))

    def connect_outputs(self) -> MemoryPush:
        """A connection to the output socket."""
        return self._open.enter_context(self._endpoints.outputs.connect())

    def close(self) -> None:
        """Close every connection that was made. Idempotent."""
        self._open.close()
