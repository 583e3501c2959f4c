"""Anybody may connect to a port on a network: whoever is no engine neither ends a client nor hides the death of one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import anyio
import pytest
import zmq
from remote_peers import RemotePeers

from anyengine import EngineClient, EngineDeadError, RemoteEngine, SamplingParams, Status

pytestmark = [pytest.mark.anyio, pytest.mark.blocking_ok]  # strangers are plain sockets

LOOPBACK = "tcp://127.0.0.1:*"
SHORT = SamplingParams(max_tokens=10)
ENDLESS = [9]  # a prompt for which the scripted peer goes on and on

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"x" * 4000 + b"\r\n\r\n"
"""Its first byte is none of ZMTP 2 or 3, so that libzmq takes it for ZMTP 1: lengths, and frames of them."""


@contextmanager
def visiting(address: str, *, identity: bytes | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ peer that is no engine."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as visitor:
        visitor.setsockopt(zmq.LINGER, 1000)
        if identity is not None:
            visitor.setsockopt(zmq.IDENTITY, identity)
        visitor.connect(address)
        yield visitor


def call(address: str) -> socket.socket:
    """A connection that says nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


def shout(address: str) -> None:
    """An HTTP request."""
    with call(address) as visitor, suppress(OSError):
        visitor.settimeout(1)
        visitor.sendall(HTTP)
        while visitor.recv(4096):
            pass


async def tokens(client: EngineClient) -> list[int]:
    return [token async for out in client.generate([1], SHORT) for token in out.token_ids]


def shout_a_lot(address: str) -> None:
    for _ in range(3):
        shout(address)


@pytest.mark.parametrize("who", ["http", "anonymous", "named"])
async def test_a_stranger_at_the_handshake_does_not_end_the_start(who: str) -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:

        def on_progress(status: Status) -> None:
            if who == "http":
                shout_a_lot(status.detail)
            else:
                with visiting(status.detail, identity=b"scanner" if who == "named" else None) as visitor:
                    visitor.send(b"hello?")
            peers.joining(status)

        engine = RemoteEngine(handshake=LOOPBACK)
        async with EngineClient(engine=engine, startup_timeout_s=20, on_progress=on_progress) as client:
            assert await tokens(client) == [0, 7]


@pytest.mark.parametrize("who", ["silent", "peer"])
async def test_a_stranger_does_not_hide_a_death(who: str) -> None:
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        engine = RemoteEngine(handshake=LOOPBACK)
        async with EngineClient(engine=engine, startup_timeout_s=20, on_progress=peers.joining) as client:
            at = client.core.running_engine
            async with client.generate(ENDLESS, SHORT) as stream:
                await anext(stream)
                with call(at.inputs), call(at.outputs), visiting(at.inputs), visiting(at.outputs):
                    for _ in range(5):
                        await anext(stream)
                    peers.processes[0].kill()
                    with anyio.fail_after(2), pytest.raises(EngineDeadError):
                        async for _ in stream:
                            pass


def scan(*addresses: str) -> None:
    for number in range(60):
        for address in addresses:
            call(address).close()
            if number % 20 == 0:
                shout(address)


async def test_scanners_do_not_disturb_anybody() -> None:
    with anyio.fail_after(30), RemotePeers("serve", "serve") as peers:
        engine = RemoteEngine(handshake=LOOPBACK, ranks=2)
        async with EngineClient(engine=engine, startup_timeout_s=20, on_progress=peers.joining) as client:
            at = client.core.running_engine
            async with client.generate(ENDLESS, SHORT) as stream, anyio.create_task_group() as tasks:
                await anext(stream)
                for _ in range(3):
                    tasks.start_soon(anyio.to_thread.run_sync, scan, at.inputs, at.outputs)
                for _ in range(20):
                    await anext(stream)
                    await tokens(client)
            assert client.ranks == (0, 1)
            await client.ping()
            assert client.statistics()["utility_calls_in_flight"] < 10  # many connections that end are one question
