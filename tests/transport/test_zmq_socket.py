"""What only the ZeroMQ implementation has: the descriptor, the context, two kinds of parked tasks on one socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import zmq
import zmq.asyncio
from transport_links import ZmqLinks, numbered, open_zmq_links

from anyengine._transport.zmq_socket import ZmqSocket

pytestmark = pytest.mark.anyio


@pytest.fixture
def links() -> Iterator[ZmqLinks]:
    with open_zmq_links() as links:
        yield links


class Counting:
    """Counts the calls into libzmq."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._socket, name)


async def until_parked(socket: ZmqSocket, count: int) -> None:
    while socket.statistics().waits < count:
        await anyio.lowlevel.checkpoint()


def full_pair(links: ZmqLinks) -> tuple[ZmqSocket, ZmqSocket]:
    """Two PAIR ends; the first one can neither send nor receive."""
    ends = links.open(zmq.PAIR, 1), links.open(zmq.PAIR, 1)
    links.join(*ends)
    with pytest.raises(anyio.WouldBlock):
        while True:
            ends[0].send_nowait([b"filler"])
    return ends


# --------------------------------------------------------------------------------------------------- construction


async def test_only_plain_sockets_are_taken() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as raw, pytest.raises(TypeError, match="plain"):
        ZmqSocket(raw)  # type: ignore[arg-type]  # the point of the test


async def test_a_router_has_no_high_water_mark() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as raw, pytest.raises(ValueError, match="SNDHWM"):
        ZmqSocket(raw)


async def test_an_address_that_cannot_be_used(links: ZmqLinks) -> None:
    pull = links.open(zmq.PULL)
    for call in (pull.bind, pull.connect):
        with pytest.raises(anyio.BrokenResourceError) as caught:
            call("nonsense://x")
        assert isinstance(caught.value.__cause__, zmq.ZMQError)


async def test_a_wildcard_port_is_resolved(links: ZmqLinks) -> None:
    address = links.open(zmq.PULL).bind("tcp://127.0.0.1:*")
    assert int(address.removeprefix("tcp://127.0.0.1:")) > 0


# ----------------------------------------------------------------------------------------------------------- parts


async def test_small_parts_are_bytes_and_large_ones_views(links: ZmqLinks) -> None:
    pull, push = links.pipe()
    sent = [msgspec.msgpack.encode(b"x" * size) for size in (10, 100_000)]
    push.send_nowait(sent)
    with anyio.fail_after(10):
        [[small, large]] = await pull.drain()
    assert type(small) is bytes
    assert type(large) is memoryview
    pull.close()
    assert [msgspec.msgpack.decode(part) for part in (small, large)] == [b"x" * 10, b"x" * 100_000]


async def test_a_message_dropped_half_way_is_sent_again_whole(links: ZmqLinks) -> None:
    """libzmq answers EAGAIN to a later part when the connection has gone, and then drops parts up to a last one."""

    class Dropping:
        def __init__(self) -> None:
            self.sent: list[tuple[bytes, int]] = []

        def send(self, part: bytes, flags: int) -> None:
            self.sent.append((part, flags & zmq.SNDMORE))
            if len(self.sent) == 2:
                raise zmq.Again

        def close(self, linger: int) -> None:
            pass

    _pull, push = links.pipe()
    real, push._socket = push._socket, (fake := Dropping())  # type: ignore[assignment]  # no peer dies so exactly
    try:
        with pytest.raises(anyio.WouldBlock):
            push.send_nowait([b"1", b"2", b"3", b"4"])
        push.send_nowait([b"1", b"2"])
    finally:
        push._socket = real
    more = zmq.SNDMORE
    assert fake.sent == [(b"1", more), (b"2", more), (b"4", 0), (b"1", more), (b"2", 0)]


# --------------------------------------------------------------------------------------- calls while a task is parked


async def test_connecting_wakes_a_parked_sender(links: ZmqLinks) -> None:
    pull, push = links.open(zmq.PULL), links.open(zmq.PUSH)
    address = links.listen(pull)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push.send, [b"x"])
            await until_parked(push, 1)
            push.connect(address)
        assert await pull.drain() == [[b"x"]]


@pytest.mark.parametrize("parked", [True, False])
async def test_binding_shows_a_message_that_waited(links: ZmqLinks, parked: bool) -> None:
    pull, push = links.open(zmq.PULL), links.open(zmq.PUSH)
    push.connect("inproc://later")
    push.send_nowait([b"x"])
    assert pull.drain_nowait() == []  # so that the socket remembers "nothing there"
    got: list[list[bytes | memoryview]] = []

    async def read() -> None:
        got.extend(await pull.drain())

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            if parked:
                tasks.start_soon(read)
                await until_parked(pull, 1)
            pull.bind("inproc://later")
            if not parked:
                tasks.start_soon(read)
    assert got == [[b"x"]]


@pytest.mark.case("K69")
@pytest.mark.parametrize("leaving", ["reader", "sender"])
async def test_a_cancelled_task_passes_the_watch_on(links: ZmqLinks, leaving: str) -> None:
    """Two tasks wait for different things, one of them on the descriptor; it leaves, and the other must still wake."""
    here, there = full_pair(links)
    with anyio.fail_after(1):
        async with anyio.create_task_group() as tasks:
            scope = anyio.CancelScope()

            async def leave() -> None:
                with scope:
                    await (here.drain() if leaving == "reader" else here.send([b"never"]))

            async def stay() -> None:
                await (here.send([b"sent"]) if leaving == "reader" else here.drain())

            tasks.start_soon(leave)
            await until_parked(here, 1)
            tasks.start_soon(stay)
            await until_parked(here, 2)
            scope.cancel()
            await anyio.wait_all_tasks_blocked()
            if leaving == "reader":
                there.drain_nowait()
            else:
                there.send_nowait([b"x"])


async def test_close_wakes_reader_and_senders_of_one_socket(links: ZmqLinks) -> None:
    here, _there = full_pair(links)
    closed: list[str] = []

    async def expect_closed(name: str, call: Any, *args: Any) -> None:
        with pytest.raises(anyio.ClosedResourceError):
            await call(*args)
        closed.append(name)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(expect_closed, "reader", here.drain)
            for _ in range(3):
                tasks.start_soon(expect_closed, "sender", here.send, [b"x"])
            await until_parked(here, 4)
            here.close()
    assert sorted(closed) == ["reader", "sender", "sender", "sender"]


@pytest.mark.case("K43")
async def test_an_idle_reader_makes_no_calls(links: ZmqLinks) -> None:
    pull, push = links.pipe()
    counting = Counting(pull._socket)
    pull._socket = counting  # type: ignore[assignment]  # a real socket behind a counter
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pull.drain)
            await until_parked(pull, 1)
            counting.calls.clear()
            await anyio.sleep(0.5)  # the idle time that is looked at
            assert not counting.calls
            push.send_nowait([b"x"])
    assert counting.calls == {"recv": 1, "get": 1}


# ---------------------------------------------------------------------------------------------------------- errors


@pytest.mark.feature("P03")
async def test_the_end_of_the_context_reaches_the_readers_task_group() -> None:
    context = zmq.Context()
    pull = ZmqSocket(context.socket(zmq.PULL))
    with anyio.fail_after(10), pytest.raises(ExceptionGroup) as caught:
        async with anyio.create_task_group() as tasks, anyio.create_task_group() as terminating:

            async def read() -> None:
                try:
                    await pull.drain()
                finally:
                    pull.close()

            terminating.start_soon(anyio.to_thread.run_sync, context.term)
            tasks.start_soon(read)
    assert caught.group_contains(anyio.ClosedResourceError)


@pytest.mark.feature("P03")
async def test_a_failing_call_keeps_its_cause(links: ZmqLinks) -> None:
    push = links.open(zmq.PUSH)
    with anyio.fail_after(10), pytest.raises(anyio.BrokenResourceError) as caught:
        await push.drain()
    assert isinstance(caught.value.__cause__, zmq.ZMQError)
    assert caught.value.__cause__.errno == zmq.ENOTSUP


async def test_messages_come_before_the_error_behind_them(links: ZmqLinks) -> None:
    pull, push = links.pipe()
    for number in range(3):
        push.send_nowait(numbered(number))

    class Failing:
        def __init__(self, socket: zmq.Socket[bytes]) -> None:
            self._socket = socket
            self._left = 2

        def recv(self, *args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise zmq.ZMQError(zmq.EFSM)
            return self._socket.recv(*args, **kwargs)

        def get(self, option: int) -> Any:
            return self._socket.get(option)

    real, pull._socket = pull._socket, Failing(pull._socket)  # type: ignore[assignment]  # an error at a chosen moment
    try:
        with anyio.fail_after(10):
            assert await pull.drain() == [numbered(0), numbered(1)]
            with pytest.raises(anyio.BrokenResourceError):
                await pull.drain()
    finally:
        pull._socket = real
