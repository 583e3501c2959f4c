"""Aborts and drains: what they name, what they confirm, and what an engine does that takes no notice."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from anyengine import (
    DrainTimeout,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    RequestRejected,
    RequestStream,
    SamplingParams,
)
from anyengine._wire import WireSamplingParams
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, UtilityRule, expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=2000)
SLOW = Script(step_interval_s=0.001)


async def last_of(stream: RequestStream) -> tuple[list[int], str | None]:
    tokens: list[int] = []
    reason = None
    async for out in stream:
        assert reason is None, "the final item is the last one"
        tokens += out.token_ids
        reason = out.finish_reason
    return tokens, reason


@pytest.mark.feature("L10", "C04")
async def test_by_label_wire_id_stream_list_and_all() -> None:
    scripted = ScriptedTwin(SLOW)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            streams = [await client.submit([n], LONG, request_id="abc"[n // 2]) for n in range(6)]
            extra = [await client.submit([n], LONG) for n in range(6, 9)]
            ids = [stream.wire_id or "" for stream in streams]
            finished = client.generate([9], SamplingParams(max_tokens=1), request_id="done")
            assert (await last_of(finished))[1] == "length"

            assert await client.abort("a") == tuple(ids[:2])
            assert await client.abort(ids[2]) == (ids[2],)
            assert await client.abort(streams[3]) == (ids[3],)
            assert await client.abort(["c", "c", ids[0], streams[4], "nobody", "done"]) == tuple(ids[4:])
            assert await client.abort([*ids, *streams]) == ()
            assert await client.abort_all() == tuple(stream.wire_id for stream in extra)
            assert await client.abort_all() == ()
            for n, stream in enumerate([*streams, *extra]):
                tokens, reason = await last_of(stream)
                assert (tokens, reason) == (expected_tokens([n], len(tokens)), "abort")
            assert client.statistics()["requests_in_flight"] == 0
    assert [one for ids in scripted.received("abort") for one in ids] == [add[0] for add in scripted.received("add")][
        :9
    ]


@pytest.mark.parametrize("nonsense", [None, 3, b"a", ["a", 3], [None]], ids=repr)
async def test_what_names_no_request_is_refused_and_aborts_nothing(nonsense: Any) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(SLOW).engine) as client:
            stream = await client.submit([1], LONG, request_id="a")
            with pytest.raises(RequestRejected, match="names no request") as caught:
                await client.abort(nonsense)
            assert (caught.value.parameter, bool(caught.value.remedy)) == ("request", True)
            assert await client.abort("a") == (stream.wire_id,)


@pytest.mark.case("K26")
async def test_a_blocked_consumer_gets_its_last_item_though_the_engine_hangs() -> None:
    hangs = Fault(do="hang", direction="in", kind="abort")
    scripted = ScriptedTwin(Script(tokens_per_frame=5, step_interval_s=600, faults=(hangs,)))
    ends: list[tuple[list[int], str | None]] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, shutdown_grace_s=0.1) as client:

            async def consume(stream: RequestStream) -> None:
                ends.append(await last_of(stream))

            async with anyio.create_task_group() as tasks:
                stream = await client.submit([1], LONG)
                tasks.start_soon(consume, stream)
                while not (stream._completions and stream._completions._all[0]._token_ids):
                    await anyio.lowlevel.checkpoint()
                with anyio.fail_after(1):
                    with pytest.raises(DrainTimeout) as caught:
                        await client.abort(stream, timeout_s=0.05)
                    while not ends:
                        await anyio.lowlevel.checkpoint()
            assert caught.value.ranks == (0,)
            assert ends == [(expected_tokens([1], 5), "abort")]
            assert await client.abort(stream, timeout_s=0.05) == ()


@pytest.mark.case("K23")
@pytest.mark.feature("L10")
async def test_confirmed_by_every_rank_or_the_silent_ones_are_named() -> None:
    late = ScriptedTwin(Script(step_interval_s=0.001, utilities=(UtilityRule(method="is_sleeping", delay_s=0.02),)))
    never = ScriptedTwin(Script(step_interval_s=0.001, utilities=(UtilityRule(method="is_sleeping", do="never"),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=[late.engine, never.engine], shutdown_grace_s=0.1) as client:
            streams = [await client.submit([n], LONG) for n in range(4)]
            began_s = anyio.current_time()
            await client.abort([stream for stream in streams if stream.rank == 0])
            assert anyio.current_time() >= began_s + 0.02
            with pytest.raises(DrainTimeout, match="engine 1 after") as caught:
                await client.abort_all(timeout_s=0.4)
            assert caught.value.ranks == (1,)
            assert all(stream._completions is not None and stream._completions.ended for stream in streams)
            with pytest.raises(DrainTimeout) as caught:
                await client.drain(timeout_s=0.4)  # it waits for the first, and names the second
            assert caught.value.ranks == (1,)
            held = await client.submit([9], LONG, data_parallel_rank=0)
            with pytest.raises(DrainTimeout, match="still in flight") as caught:
                await client.drain(timeout_s=0.01)
            assert caught.value.ranks == (0,)
            held.close_nowait()
            await client.pause_generation()
    for scripted in (late, never):
        received = [one for one in scripted.records() if one.direction == "in"]
        orders = [one.number for one in received if one.kind == "abort"]
        pause = next(one.number for one in received if one.kind == "utility" and one.body[2] == "pause_generation")
        assert orders and max(orders) < pause


async def test_a_drain_waits_for_what_is_in_flight_and_for_nothing_else() -> None:
    scripted = ScriptedTwin(SLOW)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            await client.drain()
            short = [await client.submit([n], SamplingParams(max_tokens=5)) for n in range(3)]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.drain)
                await anyio.wait_all_tasks_blocked()
                later = await client.submit([7], LONG)
            assert [(await last_of(stream))[1] for stream in short] == ["length"] * 3
            assert client.statistics()["requests_in_flight"] == 1
            later.close_nowait()


@pytest.mark.feature("L05")
async def test_a_drain_ends_with_the_engine_however_late_the_consumers_are_told() -> None:
    """Who drains may look before them, when the session ends, and must look again behind them."""
    for _ in range(5):  # trio wakes tasks in random order
        scripted = ScriptedTwin(Script(requests=(RequestRule(silent=True),)))
        with anyio.fail_after(10):
            async with EngineClient(engine=scripted.engine) as client:
                stream = await client.submit([1], LONG)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(drain_of_the_dead, client)
                    await anyio.wait_all_tasks_blocked()
                    client.core.session.engines[0].child.kill()
                stream.close_nowait()


async def drain_of_the_dead(client: EngineClient) -> None:
    with pytest.raises(EngineDeadError):
        await client.drain()


@pytest.mark.case("K24")
@pytest.mark.parametrize("level", ["client", "core"])
async def test_an_engine_that_ignores_an_abort_is_told_once_more(level: str, caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedTwin(Script(aborts="ignore", log_outputs=True))
    with anyio.fail_after(30), caplog.at_level(logging.DEBUG, "anyengine"):
        if level == "client":
            async with EngineClient(engine=scripted.engine) as client:
                core = client.core
                stream = await client.submit([1], SamplingParams(max_tokens=300))
                taken = len((await anext(stream)).token_ids)
                assert len(await client.abort(stream)) == 1
                last = await anext(stream)
                assert last.finish_reason == "abort"
                taken += len(last.token_ids)
                while core.statistics()["late_outputs"] + taken < 300:
                    await anyio.lowlevel.checkpoint()
        else:
            async with EngineCoreClient(scripted.engine) as core:
                core.add(EngineCoreRequest("mine", [1], sampling_params=WireSamplingParams(max_tokens=300)))
                taken = len((await core.receive_outputs()).outputs)
                assert core.abort(["mine", "nobody"]) == ("mine",)
                assert core.abort("mine") == ()
                while core.statistics()["late_outputs"] + taken < 300:
                    assert (await core.receive_outputs()).outputs == []
    ids = [add[0] for add in scripted.received("add")]
    assert scripted.received("abort") == [ids, ids]
    assert sum(one.kind == "outputs" for one in scripted.records()) == 300
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.feature("L11")
async def test_outputs_that_were_under_way_cause_no_second_abort(caplog: pytest.LogCaptureFixture) -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001, outputs_after_abort=5))
    with anyio.fail_after(30), caplog.at_level(logging.DEBUG, "anyengine"):
        async with EngineClient(engine=scripted.engine) as client:
            for _ in range(3):
                stream = await client.submit([1], LONG)
                await anext(stream)
                stream.close_nowait()
                await client.ping()
            assert client.statistics()["late_outputs"] >= 15
            await client.ping()
    assert len(scripted.received("abort")) == 3
    assert caplog.records == []


@pytest.mark.case("K27")
@pytest.mark.feature("L33")
async def test_a_label_is_used_again_while_its_abort_is_under_way() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001, abort_delay_s=0.05))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            for _ in range(10):
                async with client.generate([1], LONG, request_id="X") as stream:
                    await anext(stream)
                assert await last_of(client.generate([2], SamplingParams(max_tokens=3), request_id="X")) == (
                    expected_tokens([2], 3),
                    "length",
                )
    assert len({one for ids in scripted.received("abort") for one in ids}) == 10


async def test_what_was_not_sent_never_is() -> None:
    """One that waits to be sent is aborted by label, by its stream, by all."""
    scripted = ScriptedTwin(Script(requests=(RequestRule(silent=True),)))
    ends: list[tuple[list[int], str | None]] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=1, admission="wait") as client:

            async def consume(stream: RequestStream) -> None:
                ends.append(await last_of(stream))

            running = await client.submit([1], LONG)
            waiting = [client.generate([2], LONG, request_id="abc"[n // 2]) for n in range(6)]
            unused = client.generate([3], LONG)
            async with anyio.create_task_group() as tasks:
                for stream in waiting:
                    tasks.start_soon(consume, stream)
                await anyio.wait_all_tasks_blocked()
                assert client.statistics()["requests_waiting"] == 6
                assert await client.abort("a") == ()
                waiting[2].abort()
                assert await client.abort([waiting[3], unused]) == ()
                await anyio.wait_all_tasks_blocked()
                assert client.statistics()["requests_waiting"] == 2
                assert await client.abort_all() == (running.wire_id,)
            assert ends == [([], "abort")] * 6
            assert await last_of(unused) == ([], "abort")
    assert len(scripted.received("add")) == 1


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_rank_that_dies_while_it_is_asked_holds_nothing(ranks: int) -> None:
    dies = ScriptedTwin(Script(faults=(Fault(do="kill", direction="in", kind="abort"),)))
    others = [ScriptedTwin() for _ in range(ranks - 1)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[dies.engine, *(one.engine for one in others)]) as client:
            stream = await client.submit([1], LONG, data_parallel_rank=0)
            if ranks == 2:
                assert len(await client.abort(stream)) == 1
            else:
                with pytest.raises(Exception, match="SIGKILL"):
                    await client.abort(stream)
            assert (await last_of(stream))[1] == "abort"
