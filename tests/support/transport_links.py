"""Connected sockets for tests, of every implementation: ZeroMQ over ipc, ZeroMQ in one process, and memory."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import zmq

from anyengine._transport.abc import MessageReceiver, MessageSender, MessageSocket
from anyengine._transport.memory import MemoryPull, MemoryRouter
from anyengine._transport.zmq_socket import ZmqSocket

IMPLEMENTATIONS = ("memory", "zmq-inproc", "zmq-ipc")


class Links(Protocol):
    def pipe(self, high_water_mark: int = 0) -> tuple[MessageReceiver, MessageSender]: ...

    async def router(self, *identities: bytes) -> tuple[MessageSocket, Sequence[MessageSocket]]:
        """A router and peers that it knows already."""
        ...


class MemoryLinks:
    def pipe(self, high_water_mark: int = 0) -> tuple[MessageReceiver, MessageSender]:
        pull = MemoryPull(high_water_mark)
        return pull, pull.connect()

    async def router(self, *identities: bytes) -> tuple[MessageSocket, list[MessageSocket]]:
        router = MemoryRouter()
        return router, [router.connect(identity) for identity in identities]


class ZmqLinks:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], prefix: str) -> None:
        self._context = context
        self._addresses = (f"{prefix}{number}" for number in itertools.count())
        self._opened: list[ZmqSocket] = []

    def open(self, kind: int, high_water_mark: int = 0, **options: int | bytes) -> ZmqSocket:
        socket = self._context.socket(kind)
        socket.set(zmq.SNDHWM, high_water_mark)
        socket.set(zmq.RCVHWM, high_water_mark)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        self._opened.append(ZmqSocket(socket))
        return self._opened[-1]

    def listen(self, socket: ZmqSocket) -> str:
        return socket.bind(next(self._addresses))

    def join(self, listening: ZmqSocket, *connecting: ZmqSocket) -> None:
        address = self.listen(listening)
        for socket in connecting:
            socket.connect(address)

    def pipe(self, high_water_mark: int = 0) -> tuple[ZmqSocket, ZmqSocket]:
        ends = self.open(zmq.PULL, high_water_mark), self.open(zmq.PUSH, high_water_mark)
        self.join(*ends)
        return ends

    async def router(self, *identities: bytes) -> tuple[ZmqSocket, list[ZmqSocket]]:
        router = self.open(zmq.ROUTER, ROUTER_MANDATORY=1, ROUTER_HANDOVER=1)
        peers = [self.open(zmq.DEALER, IDENTITY=identity) for identity in identities]
        self.join(router, *peers)
        for peer in peers:
            peer.send_nowait([b"hello"])
        for _ in peers:
            await router.drain(1)
        return router, list(peers)

    def close(self) -> None:
        for socket in self._opened:
            socket.close()


@contextmanager
def open_links(implementation: str, directory: Path) -> Iterator[Links]:
    """``directory`` has to be short: it holds ipc files."""
    if implementation == "memory":
        yield MemoryLinks()
        return
    if implementation == "zmq-inproc":
        with open_zmq_links() as links:
            yield links
        return
    with tempfile.TemporaryDirectory(prefix="l", dir=directory) as own, open_zmq_links(Path(own)) as links:
        yield links


@contextmanager
def open_zmq_links(directory: Path | None = None) -> Iterator[ZmqLinks]:
    """Over ipc files in ``directory``, or inside the process."""
    context = zmq.Context()
    links = ZmqLinks(context, f"ipc://{directory}/" if directory else "inproc://")
    try:
        yield links
    finally:
        links.close()
        context.destroy(linger=0)


def loads(part: bytes | memoryview) -> int:
    return int(bytes(part))


def numbered(number: int) -> list[bytes]:
    return [b"%d" % number]


async def take(receiver: MessageReceiver, count: int) -> list[list[bytes]]:
    """Exactly ``count`` messages, as bytes."""
    messages: list[list[bytes]] = []
    while len(messages) < count:
        messages += [[bytes(part) for part in message] for message in await receiver.drain()]
    assert len(messages) == count
    return messages
