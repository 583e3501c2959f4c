"""What only the in-memory implementation promises: everything at once, and nothing by chance."""

from __future__ import annotations

import anyio
import pytest

from anyengine._transport.abc import ClientEndpoints, PeerUnreachable
from anyengine._transport.memory import MemoryEndpoints, MemoryLink, MemoryPull, MemoryRouter
from anyengine._transport.monitor import open_monitor

pytestmark = pytest.mark.anyio


async def test_a_peer_is_known_from_connect_to_close() -> None:
    router = MemoryRouter()
    with pytest.raises(PeerUnreachable):
        router.send_nowait([b"peer", b"x"])
    peer = router.connect(b"peer")
    router.send_nowait([b"peer", b"x"])
    assert peer.drain_nowait() == [[b"x"]]
    peer.send_nowait([b"last words"])
    peer.close()
    assert router.drain_nowait() == [[b"peer", b"last words"]]
    with pytest.raises(PeerUnreachable):
        router.send_nowait([b"peer", b"x"])


async def test_a_second_peer_takes_the_identity_over() -> None:
    router = MemoryRouter()
    former = router.connect(b"peer")
    latter = router.connect(b"peer")
    router.send_nowait([b"peer", b"x"])
    former.send_nowait([b"lost"])
    former.close()  # does not take the name from its successor
    latter.send_nowait([b"heard"])
    assert router.drain_nowait() == [[b"peer", b"heard"]]
    assert latter.drain_nowait() == [[b"x"]]


async def test_taking_an_identity_over_frees_the_senders_of_the_former_peer() -> None:
    router = MemoryRouter(high_water_mark=1)
    former = router.connect(b"peer")
    former.send_nowait([b"fills the inbox"])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(former.send, [b"lost"])
            await anyio.wait_all_tasks_blocked()
            router.connect(b"peer")


async def test_the_end_of_the_receiver_frees_the_senders() -> None:
    pull = MemoryPull(high_water_mark=1)
    push = pull.connect()
    push.send_nowait([b"fills the inbox"])
    with pytest.raises(anyio.WouldBlock):
        push.send_nowait([b"x"])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push.send, [b"lost, as on a connection without a peer"])
            await anyio.wait_all_tasks_blocked()
            pull.close()
    with pytest.raises(anyio.ClosedResourceError):
        pull.connect()


async def test_endpoints_close_all_three() -> None:
    endpoints = MemoryEndpoints()
    as_a_client_sees_them: ClientEndpoints = endpoints
    engine = endpoints.inputs.connect(b"\x00\x00")
    as_a_client_sees_them.inputs.send_nowait([b"\x00\x00", b"x"])
    assert engine.drain_nowait() == [[b"x"]]
    endpoints.close()
    for socket in (endpoints.handshake, endpoints.inputs, endpoints.outputs):
        with pytest.raises(anyio.ClosedResourceError):
            socket.drain_nowait()


async def test_a_monitor_tells_of_every_peer_at_once() -> None:
    """In the words of libzmq; the end of the watched socket ends the iteration."""
    router, pull = MemoryRouter(), MemoryPull()
    monitors = open_monitor(router), open_monitor(pull)
    with pytest.raises(anyio.BrokenResourceError):
        open_monitor(router)
    first, second, pusher = router.connect(b"1"), router.connect(b"2"), pull.connect()
    second.close()
    pusher.close()
    router.close()
    pull.close()
    first.close()  # nobody is told any more
    seen = [[(event.kind, event.connection) async for event in monitor] for monitor in monitors]
    assert seen == [
        [("connected", 1), ("connected", 2), ("disconnected", 2)],
        [("connected", 1), ("disconnected", 1)],
    ]


async def test_a_link_closes_what_it_opened() -> None:
    with MemoryEndpoints() as endpoints:
        with MemoryLink(endpoints, b"\0\0") as link:
            link.connect_handshake().send_nowait([b"hello"])
            link.connect_inputs()
            link.connect_outputs().send_nowait([b"output"])
            endpoints.inputs.send_nowait([b"\0\0", b"x"])
        with pytest.raises(PeerUnreachable):
            endpoints.inputs.send_nowait([b"\0\0", b"x"])
        assert endpoints.handshake.drain_nowait() == [[b"\0\0", b"hello"]]
        assert endpoints.outputs.drain_nowait() == [[b"output"]]
