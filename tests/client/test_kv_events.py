"""KV cache events: which ranks publish them, and a stream of them that ends with its rank and never hangs."""

from __future__ import annotations

import gc
import os
import signal
import socket as socket_module
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from kv_publishers import REMOVED, STORED, Publisher, kv_events_config, kv_publisher

from anyengine import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ClientClosedError,
    DecodeError,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    KVEventBatch,
    KVEventsConfig,
    KVEventStream,
    RequestRejected,
    RestartPolicy,
)
from anyengine.sync import SyncEngineClient
from anyengine.testing.scripted import Script, ScriptedProcess, ScriptedTwin

pytestmark = pytest.mark.anyio


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with kv_publisher() as publisher:
        yield publisher


def publishing(endpoint: str, **changes: Any) -> Script:
    return Script(registration={"kv_events_config": kv_events_config(endpoint, **changes)})


def client_of(publisher: Publisher, **changes: Any) -> EngineClient:
    script = publishing(f"tcp://*:{publisher.port}", **changes)
    return EngineClient(engine=ScriptedTwin(script).engine, strict=True)


@pytest.mark.feature("C32")
async def test_three_published_events_are_three_items(publisher: Publisher) -> None:
    with anyio.fail_after(30):
        async with client_of(publisher) as client, client.kv_events() as events:
            assert await publisher.subscribed() == b"\x01"
            publisher.publish(0, STORED)
            publisher.publish(1, REMOVED, {"type": "FromTheFuture", "x": 1})
            publisher.publish(2, {"type": "AllBlocksCleared"}, rank=None)
            first, second, third = [await anext(events) for _ in range(3)]
    stored = BlockStored(
        block_hashes=[b"\x01" * 32, 2],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4],
        block_size=2,
        medium="GPU",
        extra_keys=[None, ["salt"]],
    )
    assert first == KVEventBatch(
        rank=0,
        sequence_number=0,
        missed=0,
        published_s=1700000000.5,
        data_parallel_rank=0,
        events=(stored,),
    )
    removed = BlockRemoved(block_hashes=[b"\x01" * 32], medium="GPU")
    assert (second.events, second.unread_events) == ((removed,), 1)
    assert (third.events, third.data_parallel_rank) == ((AllBlocksCleared(),), None)


@pytest.mark.feature("C32")
async def test_the_sources_are_what_the_ranks_have_said() -> None:
    config = kv_events_config("tcp://*:5558", replay_endpoint="tcp://*:6558", topic="kv", later=1)
    first = ScriptedTwin(Script()).engine
    second = ScriptedTwin(Script(registration={"kv_events_config": config})).engine
    third = ScriptedTwin(publishing("tcp://*:5559", publisher="null")).engine
    with anyio.fail_after(30):
        async with EngineClient(engine=[first, second, third], strict=True) as client:
            expected = KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint="tcp://*:5558",
                replay_endpoint="tcp://*:6558",
                topic="kv",
            )
            assert client.get_kv_event_sources() == {1: expected} == client.core.get_kv_event_sources()
            stream = client.kv_events(0)
            with pytest.raises(RequestRejected, match=r"engine 0 publishes no KV events.*enable_kv_cache_events"):
                await anext(stream)
            with pytest.raises(RequestRejected, match="there is no rank 3"):
                async with client.kv_events(3):
                    pass
    with pytest.raises(ClientClosedError):
        await anext(EngineClient().kv_events())


async def test_a_config_without_sense_is_an_error_of_whoever_asks_and_of_nobody_else() -> None:
    script = Script(registration={"kv_events_config": {"enable_kv_cache_events": True, "hwm": "many"}})
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(script).engine, strict=True) as client:
            with pytest.raises(DecodeError, match="many") as caught:
                client.get_kv_event_sources()
            assert caught.value.rank == 0
            await client.ping()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"endpoint": "inproc://events"},
            "events at 'inproc://events', which is no address",
        ),
        ({"endpoint": "tcp://*:5557", "publisher": "kafka"}, "'kafka', which this client does not know"),
    ],
)
async def test_publishers_that_cannot_be_reached_are_refused(changes: dict[str, Any], why: str) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(publishing(**changes)).engine, strict=True) as client:
            with pytest.raises(RequestRejected, match=why):
                await anext(client.kv_events())
            with pytest.raises(RequestRejected, match="'inproc://x' is no address"):
                await anext(client.kv_events(endpoint="inproc://x"))
            with pytest.raises(RequestRejected, match="endpoint"):
                await anext(client.kv_events(endpoint=5557))  # type: ignore[arg-type]


async def test_what_is_missing_is_counted_and_what_is_malformed_left_out(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    with anyio.fail_after(30):
        async with client_of(publisher, topic="kv") as client, client.kv_events() as events:
            assert await publisher.subscribed() == b"\x01kv"
            publisher.publish(7, topic="kv")
            publisher.publish(9, topic="other")  # not subscribed to
            publisher.publish(10, topic="kv@0")
            publisher.send(b"kv", (11).to_bytes(8, "big"), b"\xc1")
            publisher.send(b"kv", b"11", b"\x92\x01\x90")
            publisher.send(b"kv", b"\xff" * 8, b"")  # the end of a replay, which nobody has asked for
            publisher.send(b"kv")
            publisher.publish(12, topic="kv")
            publisher.publish(2, topic="kv")  # the publisher has begun anew
            batches = [await anext(events) for _ in range(4)]
            assert events.malformed_messages == 4
    assert [(one.sequence_number, one.missed, one.topic) for one in batches] == [
        (7, 0, "kv"),
        (10, 2, "kv@0"),
        (12, 1, "kv"),
        (2, 2, "kv"),
    ]
    told = [record.message for record in caplog.records if "KV events" in record.message]
    assert (len(told) == 3 and "0xc1" in told[0].lower()) or "cannot be decoded" in told[0]  # the 1st, 2nd and 4th


async def read_one(events: KVEventStream, read: list[KVEventBatch]) -> None:
    read.append(await anext(events))


async def test_a_publisher_that_connects_finds_us_listening() -> None:
    read: list[KVEventBatch] = []
    with socket_module.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with anyio.fail_after(30):
        script = publishing(f"tcp://localhost:{port}")
        async with EngineClient(engine=ScriptedTwin(script).engine, strict=True) as client:
            async with client.kv_events() as events, anyio.create_task_group() as tasks:
                tasks.start_soon(read_one, events, read)  # libzmq subscribes at a new connection in the reader's call
                with kv_publisher(connect_to=f"tcp://127.0.0.1:{port}") as publisher:
                    await publisher.subscribed()
                    publisher.publish(0)
                    while not read:
                        await checkpoint()


async def test_a_publisher_that_listens_at_a_full_address_is_found(publisher: Publisher) -> None:
    with anyio.fail_after(30):
        script = publishing(f"tcp://127.0.0.1:{publisher.port}")
        async with EngineClient(engine=ScriptedTwin(script).engine, strict=True) as client:
            async with client.kv_events() as events:
                await publisher.subscribed()
                publisher.publish(0)
                assert (await anext(events)).sequence_number == 0


async def test_a_publisher_that_connects_has_one_listener_here() -> None:
    """A second one would wait for ever: whoever listens gets it all."""
    with socket_module.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = publishing(f"tcp://127.0.0.1:{port}")
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(script).engine, strict=True) as client:
            async with client.kv_events():
                with pytest.raises(RequestRejected, match="another stream listens already"):
                    await anext(client.kv_events())
            async with client.kv_events():
                pass


async def test_nobody_listens_where_other_hosts_can_reach() -> None:
    script = publishing("tcp://10.1.2.3:5557")
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(script).engine, strict=True) as client:
            with pytest.raises(RequestRejected, match="does not listen at"):
                await anext(client.kv_events())


async def test_an_address_of_the_caller_needs_no_word_of_the_engine(publisher: Publisher) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine, strict=True) as client:
            async with client.kv_events(endpoint=f"tcp://*:{publisher.port}") as events:
                await publisher.subscribed()
                publisher.publish(0)
                assert (await anext(events)).sequence_number == 0


async def read_all(events: KVEventStream, read: list[KVEventBatch], errors: list[BaseException]) -> None:
    try:
        async for batch in events:
            read.append(batch)  # noqa: PERF401 - what was read before a failure shall be seen
    except EngineDeadError as exc:
        errors.append(exc)


@pytest.mark.feature("C32")
async def test_the_death_of_the_rank_ends_the_stream_behind_what_had_arrived(publisher: Publisher) -> None:
    engines = [ScriptedProcess(publishing(f"tcp://*:{publisher.port}")).engine, ScriptedProcess().engine]
    read: list[KVEventBatch] = []
    errors: list[BaseException] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=engines, strict=True) as client, client.kv_events() as events:
            await publisher.subscribed()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_all, events, read, errors)
                publisher.publish(0)
                while not read:
                    await checkpoint()
                os.kill(next(one.child.pid for one in client.core.session.children if one.rank == 0), signal.SIGKILL)
            assert [type(one) for one in errors] == [EngineDeadError]
            assert errors[0].signal == "SIGKILL"  # type: ignore[attr-defined]
            for _ in range(2):
                with pytest.raises(EngineDeadError):
                    await anext(events)
            with pytest.raises(EngineDeadError):
                await anext(client.kv_events())
            assert await publisher.subscribed() == b"\x00"  # and nobody listens any more


async def test_a_rank_that_is_started_again_has_a_new_stream(publisher: Publisher) -> None:
    engine = ScriptedProcess(publishing(f"tcp://*:{publisher.port}")).engine
    with anyio.fail_after(60):
        async with EngineClient(engine=engine, restart=RestartPolicy(backoff_s=0.01), strict=True) as client:
            async with client.kv_events() as waiting, client.kv_events() as idle:
                await publisher.subscribed()
                await publisher.subscribed()
                os.kill(client.core.session.children[0].child.pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await anext(waiting)
                async for event in client.events():
                    if client.core.session.restarts.count and not event.degraded:
                        break
                with pytest.raises(EngineDeadError, match="was started again"):  # nobody looked meanwhile
                    await anext(idle)
            async with client.kv_events() as anew:
                while await publisher.subscribed() != b"\x01":
                    pass
                publisher.publish(0)
                assert (await anext(anew)).missed == 0


async def test_the_end_of_the_client_ends_it_wherever_it_is_read(publisher: Publisher) -> None:
    """In the block, which closes the client early; and in a task that outlives it."""
    read: list[KVEventBatch] = []
    errors: list[BaseException] = []
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            async with client_of(publisher) as client:
                outside = client.kv_events()
                tasks.start_soon(read_all, outside, read, errors)
                await publisher.subscribed()
        assert [type(one) for one in errors] == [ClientClosedError]
        with pytest.raises(ClientClosedError):
            await anext(outside)
        async with client_of(publisher) as client, client.kv_events() as events, anyio.create_task_group() as tasks:
            tasks.start_soon(read_all, events, read, errors)
            await anyio.wait_all_tasks_blocked()
            await client.aclose()
        assert [type(one) for one in errors] == [ClientClosedError] * 2 and not read


async def test_cancellation_loses_nothing_in_a_block_and_closes_outside_of_one(publisher: Publisher) -> None:
    with anyio.fail_after(30):
        async with client_of(publisher) as client:
            async with client.kv_events() as events:
                await publisher.subscribed()
                publisher.publish(0)
                for _ in range(3):
                    with anyio.CancelScope() as scope:
                        scope.cancel()
                        await anext(events)
                assert (await anext(events)).sequence_number == 0
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(anext, events)
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(anyio.BusyResourceError):
                        await anext(events)
                    tasks.cancel_scope.cancel()
                publisher.publish(1)
                assert (await anext(events)).sequence_number == 1
            with pytest.raises(StopAsyncIteration):
                await anext(events)
            assert await publisher.subscribed() == b"\x00"
            plain = client.kv_events()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(anext, plain)
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            with pytest.raises(StopAsyncIteration):
                await anext(plain)
            assert not client.core.session.subscriptions


async def test_a_dropped_stream_is_told_and_closed_by_the_next_one(publisher: Publisher) -> None:
    read: list[KVEventBatch] = []
    with anyio.fail_after(30):
        async with client_of(publisher) as client:
            events = client.kv_events()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read_one, events, read)
                await publisher.subscribed()
                publisher.publish(0)
            with pytest.warns(ResourceWarning, match="KV events of rank 0"):
                del events
                gc.collect()
            async with client.kv_events():
                assert len(client.core.session.subscriptions) == 1
                assert sorted([await publisher.subscribed(), await publisher.subscribed()]) == [b"\x00", b"\x01"]
    assert len(read) == 1


async def test_a_slow_consumer_bounds_memory_and_is_told_what_it_has_missed() -> None:
    """The publisher's queue takes ten messages for a subscriber that does not read, and drops the rest, as PUB does."""
    large = ["BlockRemoved", [b"x" * 20_000]]
    with kv_publisher(sndhwm=10) as publisher, anyio.fail_after(60):
        async with client_of(publisher) as client, client.kv_events() as events:
            await publisher.subscribed()
            for number in range(4000):
                publisher.publish(number, large)
            last = read = missed = 0
            while last < 4000:
                number += 1
                publisher.publish(number)  # a small one, until one has found room behind all that was kept
                batch = await anext(events)
                last, read, missed = batch.sequence_number, read + len(batch.events), missed + batch.missed
    assert read < 2500 and missed > 1500


async def test_it_belongs_to_the_core_too(publisher: Publisher) -> None:
    engine = ScriptedTwin(publishing(f"tcp://*:{publisher.port}")).engine
    with anyio.fail_after(30):
        async with EngineCoreClient(engine, strict=True) as core, core.kv_events() as events:
            await publisher.subscribed()
            publisher.publish(0)
            assert (await anext(events)).rank == 0


def test_what_a_host_does_not_tell_has_to_be_given() -> None:
    from anyengine._transport.subscription import publisher_address

    assert publisher_address("tcp://*:5557", is_local=True) == ("tcp://127.0.0.1:5557", False)
    assert publisher_address("tcp://[::]:5557", is_local=True) == ("tcp://[::1]:5557", False)
    assert publisher_address("ipc:///run/kv", is_local=True) == ("ipc:///run/kv", False)
    assert publisher_address("tcp://10.0.0.5:5557", is_local=False) == ("tcp://10.0.0.5:5557", True)
    assert publisher_address("tcp://localhost:5557", is_local=True) == ("tcp://127.0.0.1:5557", True)
    for endpoint in ("tcp://*:5557", "tcp://127.0.0.1:5557", "ipc:///run/kv"):
        with pytest.raises(ValueError, match="host"):
            publisher_address(endpoint, is_local=False)


@pytest.mark.feature("C32", "C45")
def test_threads_read_it_too() -> None:
    with kv_publisher() as publisher:
        with SyncEngineClient(engine=ScriptedTwin(publishing(f"tcp://*:{publisher.port}")).engine) as client:
            assert [*client.get_kv_event_sources()] == [0]
            with client.kv_events() as events:
                while not publisher.socket.drain_nowait():
                    pass
                for number in range(3):
                    publisher.publish(number, STORED)
                assert [next(events).sequence_number for _ in range(3)] == [0, 1, 2]
                assert (events.rank, events.malformed_messages) == (0, 0)
            with pytest.raises(StopIteration):
                next(events)
            late = client.kv_events()
            client.run(lambda _: late._stream.__aenter__())
        with pytest.raises(ClientClosedError):
            next(late)
        late.close()
