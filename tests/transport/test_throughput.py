"""The socket layer against the one it replaces, in CPU time of the event loop's thread, side by side in one run."""

from __future__ import annotations

import asyncio
import time

import anyio
import pytest
import zmq
import zmq.asyncio

from anyengine._transport.zmq_socket import ZmqSocket

MESSAGES = 100_000


def filled(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A PULL with everything queued already, so that only the receiver is measured, and its PUSH."""
    push, pull = (zmq.Socket(context, kind) for kind in (zmq.PUSH, zmq.PULL))
    for socket in (push, pull):
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
    pull.bind("inproc://throughput")
    push.connect("inproc://throughput")
    for _ in range(MESSAGES):
        push.send(b"x" * 200)
    return push, pull


def ours_s(backend: str) -> float:
    async def receive(socket: ZmqSocket) -> float:
        started, got = time.thread_time(), 0
        while got < MESSAGES:
            got += len(await socket.drain())
        return time.thread_time() - started

    with zmq.Context() as context:
        push, pull = filled(context)
        with push, ZmqSocket(pull) as socket:
            return anyio.run(receive, socket, backend=backend)


def theirs_s() -> float:
    async def receive(pull: zmq.Socket[bytes]) -> float:
        socket = zmq.asyncio.Socket.from_socket(pull)
        started = time.thread_time()
        for _ in range(MESSAGES):
            await socket.recv_multipart(copy=False)
        elapsed_s = time.thread_time() - started
        socket.close()
        return elapsed_s

    with zmq.Context() as context:
        push, pull = filled(context)
        with push, pull:
            return asyncio.run(receive(pull))


@pytest.mark.slow
@pytest.mark.feature("P03")
def test_receiving_costs_no_more_than_zmq_asyncio() -> None:
    """Measured: about one fifteenth; the promise is "no more"."""
    reference_s = theirs_s()
    for backend in ("asyncio", "trio"):
        assert ours_s(backend) < reference_s
