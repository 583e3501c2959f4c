"""Connections that come and go, as a stream of events."""

from __future__ import annotations

import anyio
import pytest
import zmq

from anyengine._transport.endpoints import open_endpoints
from anyengine._transport.monitor import PeerEvent, open_monitor

pytestmark = pytest.mark.anyio


async def test_a_peer_comes_and_goes() -> None:
    with open_endpoints() as endpoints, open_monitor(endpoints.inputs) as monitor, zmq.Context() as context:
        peer = context.socket(zmq.DEALER)
        peer.connect(endpoints.input_address)
        with anyio.fail_after(10):
            arrival = await anext(monitor)
            peer.close(0)
            departure = await anext(monitor)
    assert arrival == PeerEvent("connected", arrival.connection, endpoints.input_address)
    assert departure == PeerEvent("disconnected", arrival.connection, endpoints.input_address)


@pytest.mark.parametrize("closing", ["socket", "monitor", "endpoints"])
async def test_closing_ends_a_parked_iteration(closing: str) -> None:
    ended = False

    async def follow() -> None:
        nonlocal ended
        async for _ in monitor:
            pass
        ended = True

    with open_endpoints() as endpoints:
        monitor = open_monitor(endpoints.inputs)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(follow)
                await anyio.wait_all_tasks_blocked()
                closers = {"socket": endpoints.inputs.close, "monitor": monitor.close, "endpoints": endpoints.close}
                closers[closing]()
    assert ended
    with pytest.raises(StopAsyncIteration):
        await anext(monitor)


async def test_a_reader_may_be_parked_beside_it() -> None:
    with open_endpoints() as endpoints, zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(endpoints.inputs.drain)
                await anyio.wait_all_tasks_blocked()
                with open_monitor(endpoints.inputs) as monitor:
                    peer.connect(endpoints.input_address)
                    peer.send(b"wakes the reader")
                    assert (await anext(monitor)).kind == "connected"
