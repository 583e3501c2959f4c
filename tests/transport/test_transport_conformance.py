"""One suite for every implementation of the message sockets, on three loops."""

from __future__ import annotations

import random
import threading

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from transport_links import Links, numbered, take

from anyengine._transport.abc import PeerUnreachable
from anyengine.exceptions import WrongLoopError

pytestmark = pytest.mark.anyio


# ------------------------------------------------------------------------------------------------------- delivery


async def test_messages_arrive_once_and_in_order(links: Links) -> None:
    pull, push = links.pipe()
    for number in range(1000):
        push.send_nowait(numbered(number))
    with anyio.fail_after(10):
        assert await take(pull, 1000) == [numbered(number) for number in range(1000)]
    assert pull.drain_nowait() == []
    assert pull.statistics().messages_received == push.statistics().messages_sent == 1000


async def test_a_message_wakes_a_parked_reader(links: Links) -> None:
    pull, push = links.pipe()
    with anyio.fail_after(10):
        for number in range(20):
            async with anyio.create_task_group() as tasks:

                async def read(number: int = number) -> None:
                    assert await take(pull, 1) == [numbered(number)]

                tasks.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                push.send_nowait(numbered(number))


async def test_parts_stay_together_and_may_be_empty(links: Links) -> None:
    pull, push = links.pipe()
    sent = [[b"", b"a", b""], [b""], [b"x" * 1023, b"y" * 1024, b"z" * 1025], [b"p"] * 100]
    for message in sent:
        push.send_nowait(message)
    with anyio.fail_after(10):
        assert await take(pull, len(sent)) == sent


async def test_large_parts_in_both_directions(links: Links) -> None:
    router, [peer] = await links.router(b"peer")
    large = random.Random(0).randbytes(1 << 20)
    with anyio.fail_after(20):
        for _ in range(3):
            await router.send([b"peer", b"head", large])
            await peer.send([b"head", large])
        assert await take(peer, 3) == [[b"head", large]] * 3
        assert await take(router, 3) == [[b"peer", b"head", large]] * 3


async def test_a_send_takes_a_snapshot(links: Links) -> None:
    pull, push = links.pipe()
    buffer = bytearray(b"before" * 20_000)
    expected = bytes(buffer)
    push.send_nowait([buffer, memoryview(buffer)])
    buffer[:] = b"after!" * 20_000
    with anyio.fail_after(10):
        assert await take(pull, 1) == [[expected, expected]]


async def test_parts_are_checked_before_the_first_one_is_sent(links: Links) -> None:
    pull, push = links.pipe()
    with pytest.raises(TypeError):
        push.send_nowait([b"head", "text"])  # type: ignore[list-item]  # the point of the test
    with pytest.raises(ValueError, match="contiguous"):
        push.send_nowait([b"head", memoryview(b"abcd")[::2]])
    with pytest.raises(ValueError, match="at least one part"):
        push.send_nowait([])
    push.send_nowait([b"whole", b"message"])
    with anyio.fail_after(10):
        assert await take(pull, 1) == [[b"whole", b"message"]]


async def test_a_drain_keeps_its_limits(links: Links) -> None:
    pull, push = links.pipe()
    for _ in range(40):
        push.send_nowait([b"x" * (64 << 10), b"y" * (64 << 10)])
    got = 0
    with anyio.fail_after(10):
        while got < 8:
            got += len(batch := await pull.drain(3))
            assert len(batch) <= 3
        while got < 40:
            got += len(batch := await pull.drain())
            assert sum(len(part) for message in batch for part in message) <= (1 << 20) + (128 << 10)
    with pytest.raises(ValueError, match="limit"):
        await pull.drain(0)


# -------------------------------------------------------------------------------------------------------- routing


async def test_a_router_addresses_its_peers(links: Links) -> None:
    router, peers = await links.router(b"\x00\x00", b"\x01\x00")
    with anyio.fail_after(10):
        for peer in peers:
            await peer.send([b"from", b"peer"])
        heard = await take(router, 2)
        assert sorted(heard) == [[b"\x00\x00", b"from", b"peer"], [b"\x01\x00", b"from", b"peer"]]
        router.send_nowait([b"\x01\x00", b"one"])
        router.send_nowait([memoryview(b"\x00\x00"), b"zero"])
        assert [await take(peer, 1) for peer in peers] == [[[b"zero"]], [[b"one"]]]


async def test_an_unknown_peer_is_an_error(links: Links) -> None:
    router, [peer] = await links.router(b"peer")

    async def send_at_once(parts: list[bytes]) -> None:
        router.send_nowait(parts)

    for send in (send_at_once, router.send):
        with pytest.raises(PeerUnreachable, match="6e 6f") as caught:
            await send([b"no", b"x"])
        assert caught.value.identity == b"no"
        assert isinstance(caught.value, anyio.BrokenResourceError)
    router.send_nowait([b"peer", b"still works"])
    with anyio.fail_after(10):
        assert await take(peer, 1) == [[b"still works"]]


async def test_a_peer_that_left_is_unknown(links: Links) -> None:
    router, [peer] = await links.router(b"peer")
    peer.close()
    with anyio.fail_after(10), pytest.raises(PeerUnreachable):
        while True:
            router.send_nowait([b"peer", b"x"])
            await checkpoint()


async def test_a_socket_of_the_wrong_direction_says_so(links: Links) -> None:
    pull, push = links.pipe()
    with pytest.raises(anyio.BrokenResourceError):
        await push.drain()  # type: ignore[attr-defined]  # the type forbids what the test tries
    with pytest.raises(anyio.BrokenResourceError):
        await pull.send([b"x"])  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------------- misuse


async def test_a_second_reader_is_refused(links: Links) -> None:
    pull, push = links.pipe()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull.drain)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(anyio.BusyResourceError):
                await pull.drain()
            with pytest.raises(anyio.BusyResourceError):
                pull.drain_nowait()
            push.send_nowait([b"the first reader still waits"])


async def test_another_thread_is_refused(links: Links) -> None:
    pull, push = links.pipe()
    for call in (pull.drain_nowait, pull.close, push.close, lambda: push.send_nowait([b"x"])):
        with pytest.raises(WrongLoopError):
            await anyio.to_thread.run_sync(call)
    push.send_nowait([b"x"])
    with anyio.fail_after(10):
        assert await take(pull, 1) == [[b"x"]]


# ---------------------------------------------------------------------------------------------------------- close


async def test_close_wakes_the_reader(links: Links) -> None:
    pull, _push = links.pipe()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                with pytest.raises(anyio.ClosedResourceError):
                    await pull.drain()

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            pull.close()


async def test_close_wakes_the_senders(links: Links) -> None:
    _pull, push = links.pipe(high_water_mark=1)
    closed = 0
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:

            async def flood() -> None:
                nonlocal closed
                with pytest.raises(anyio.ClosedResourceError):
                    while True:
                        await push.send([b"x" * 65536])
                closed += 1

            for _ in range(3):
                tasks.start_soon(flood)
            while push.statistics().waits < 3:
                await checkpoint()
            push.close()
    assert closed == 3


async def test_use_after_close(links: Links) -> None:
    pull, push = links.pipe()
    async with anyio.create_task_group():
        for socket in (pull, push):
            await socket.aclose()
            socket.close()
    for call in (pull.drain, lambda: push.send([b"x"])):
        with pytest.raises(anyio.ClosedResourceError):
            await call()
    for call_nowait in (pull.drain_nowait, lambda: push.send_nowait([b"x"])):
        with pytest.raises(anyio.ClosedResourceError):
            call_nowait()
    assert pull.statistics().messages_received == 0


async def test_a_socket_is_a_context_manager(links: Links) -> None:
    pull, push = links.pipe()
    with pull, push:
        push.send_nowait([b"x"])
    with pytest.raises(anyio.ClosedResourceError):
        push.send_nowait([b"x"])


# --------------------------------------------------------------------------------------- fairness, idling, pressure


async def test_a_flood_is_fair(links: Links) -> None:
    pull, push = links.pipe()
    total, turns, got = 20_000, 0, 0
    for number in range(total):
        push.send_nowait(numbered(number))

    async def other() -> None:
        nonlocal turns
        while got < total:
            turns += 1
            await checkpoint()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            while got < total:
                got += len(await pull.drain())
    assert turns >= total // 256 * 0.9  # trio shuffles its tasks


async def test_a_lone_sender_is_fair(links: Links) -> None:
    _pull, push = links.pipe()
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        for number in range(100):
            await push.send(numbered(number))
        tasks.cancel_scope.cancel()
    assert turns >= 50


@pytest.mark.case("K43")
async def test_an_idle_reader_is_left_alone(links: Links) -> None:
    pull, push = links.pipe()
    push.send_nowait([b"the connection stands"])
    with anyio.fail_after(10):
        await take(pull, 1)
        threads = threading.active_count()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull.drain)
            await anyio.wait_all_tasks_blocked()
            waits = pull.statistics().waits
            assert waits >= 1
            await anyio.sleep(0.5)  # the idle time that is looked at
            assert pull.statistics().waits <= waits + 2  # libzmq may signal a state that has passed
            assert threading.active_count() == threads
            push.send_nowait([b"x"])


async def test_senders_wait_at_the_high_water_mark(links: Links) -> None:
    pull, push = links.pipe(high_water_mark=2)
    each, senders, sent, got = 60, 4, 0, 0
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:

            async def flood() -> None:
                nonlocal sent
                for _ in range(each):
                    await push.send([b"x" * 65536])
                    sent += 1

            for _ in range(senders):
                tasks.start_soon(flood)
            while push.statistics().waits < senders:
                await checkpoint()
            assert sent < each * senders
            with pytest.raises(anyio.WouldBlock):
                while True:
                    push.send_nowait([b"x" * 65536])
                    sent += 1
            while got < sent or sent < each * senders:
                got += len(await pull.drain())
    assert got == sent >= each * senders
