"""``AsyncLLM`` over the client: what its items hold, every way out of a stream, and the ends of the object."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from anyengine import OverloadedError, RequestRejected
from anyengine.compat import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    EngineGenerateError,
    OutputStream,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
)
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.blocking_ok,  # AsyncLLM's constructor and shutdown() block, as vLLM's do
]

SCRIPT = Script(
    step_interval_s=0.001,
    registration={"max_model_len": 20_000},
    requests=(RequestRule(first_token=66, finish="error", after_tokens=3), RequestRule(first_token=77, silent=True)),
    faults=(Fault(do="exit", direction="in", kind="reset_mm_cache", exit_code=7),),
)
ENDLESS = SamplingParams(max_tokens=10_000)


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The caller's loop; the client's is asyncio in any case."""
    return request.param


@pytest.fixture
def twin() -> ScriptedTwin:
    return ScriptedTwin(SCRIPT)


@pytest.fixture
async def engine(twin: ScriptedTwin) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(twin.engine)
    yield engine
    engine.shutdown()


async def items(stream: OutputStream) -> list[RequestOutput]:
    with anyio.fail_after(30):
        return [item async for item in stream]


async def in_flight(engine: AsyncLLM, count: int) -> None:
    with anyio.fail_after(30):
        while (await engine.get_statistics())["requests_in_flight"] != count:  # noqa: ASYNC110 - in another loop
            await anyio.sleep(0.001)


@pytest.mark.feature("P10")
async def test_cumulative_items_are_the_default(engine: AsyncLLM) -> None:
    """Each has everything so far, in a record of its own, which nothing changes later."""
    expected = expected_tokens([1, 2], 9)
    prompt = TokensPrompt(prompt_token_ids=[1, 2], prompt="one two")
    found = await items(engine.generate(prompt, SamplingParams(max_tokens=9), "r"))
    for item in found:
        [completion] = item.outputs
        assert completion.token_ids == expected[: len(completion.token_ids)]
        assert (item.request_id, item.prompt, item.prompt_token_ids) == ("r", "one two", [1, 2])
        assert item.finished is completion.finished() is (completion.finish_reason == "length")
    assert found[-1].finished and found[-1].outputs[0].token_ids == expected
    assert sum(item.finished for item in found) == 1
    assert len(found[0].outputs[0].token_ids) < 9


@pytest.mark.feature("P10")
async def test_deltas_and_final_items(engine: AsyncLLM) -> None:
    expected = expected_tokens([1, 2], 9)
    for n in (1, 3):
        params = SamplingParams(max_tokens=9, n=n, output_kind=RequestOutputKind.DELTA)
        tokens: dict[int, list[int]] = {index: [] for index in range(n)}
        found = await items(engine.generate([1, 2], params, "r"))
        for item in found:
            for completion in item.outputs:
                tokens[completion.index] += completion.token_ids
        assert list(tokens.values()) == [expected] * n
        assert [item.finished for item in found] == [False] * (len(found) - 1) + [True]
        params = SamplingParams(max_tokens=9, n=n, output_kind=RequestOutputKind.FINAL_ONLY)
        [item] = await items(engine.generate([1, 2], params, "r"))
        assert [completion.token_ids for completion in item.outputs] == [expected] * n
        assert item.finished and [completion.index for completion in item.outputs] == list(range(n))
        found = await items(engine.generate([1, 2], SamplingParams(max_tokens=9, n=n), "r"))
        ended = {one.index: one.token_ids for item in found for one in item.outputs if one.finished()}
        assert ended == dict.fromkeys(range(n), expected)


async def test_a_slow_consumer_gets_what_has_arrived(engine: AsyncLLM) -> None:
    """In one item, whatever the kind."""
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        stream = engine.generate([1], SamplingParams(max_tokens=50, output_kind=kind), "r")
        first = await anext(stream)
        await in_flight(engine, 0)
        assert not await engine.is_paused()  # a fence: all of it has come over
        assert len(stream._arrivals._accumulator._new) == 1  # in one piece already
        [rest] = await items(stream)
        assert rest.finished
        known = first.outputs[0].token_ids if kind is RequestOutputKind.DELTA else []
        assert known + rest.outputs[0].token_ids == expected_tokens([1], 50)


async def leave_by_break(stream: OutputStream) -> None:
    async for _ in stream:
        break


async def leave_by_aclose(stream: OutputStream) -> None:
    await anext(stream)
    await stream.aclose()
    assert await items(stream) == []


async def leave_by_cancellation(stream: OutputStream) -> None:
    with anyio.move_on_after(0.01):
        async for _ in stream:
            pass


async def leave_in_a_cycle(stream: OutputStream) -> None:
    await anext(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del cycle, stream
    gc.collect()


async def test_every_way_out_is_one_abort(engine: AsyncLLM, twin: ScriptedTwin) -> None:
    ways = [leave_by_break, leave_by_aclose, leave_by_cancellation, leave_in_a_cycle]
    for way in ways:
        await way(engine.generate([1], ENDLESS, way.__name__))
        gc.collect()
        await in_flight(engine, 0)
    engine.generate([1], ENDLESS, "never used")
    assert await engine.get_supported_tasks() == ("generate",)  # a fence
    assert [len(ids) for ids in twin.received("abort")] == [1] * len(ways)
    assert len(twin.received("add")) == len(ways)


async def test_aborts_by_id_give_a_last_item(engine: AsyncLLM) -> None:
    streams = [engine.generate([77], ENDLESS, f"r{number}") for number in range(3)]
    found: list[list[RequestOutput]] = []

    async def consume(stream: OutputStream) -> None:
        found.append(await items(stream))

    async with anyio.create_task_group() as tasks:
        for stream in streams:
            tasks.start_soon(consume, stream)
        await in_flight(engine, 3)
        with pytest.raises(anyio.BusyResourceError):
            await anext(streams[0])
        streams.clear()
        await engine.abort("r0")
        await engine.abort(["r1", "r2", "nobody"])
    # The stream that a second task touched was left by it, as a generator would be; the others have their last items.
    reasons = sorted(str(item.outputs[0].finish_reason) for got in found for item in got)
    assert reasons in (["abort"] * 3, ["abort"] * 2)


async def test_errors(engine: AsyncLLM) -> None:
    """Bad input is a ValueError, as in vLLM; one request's failure is its own."""
    for prompt, params in (([], SamplingParams()), ("text", SamplingParams()), ([1], SamplingParams(logprobs=10**6))):
        with pytest.raises(RequestRejected):
            await items(engine.generate(prompt, params, "r"))
    with pytest.raises(ValueError, match="multi_modal_data"):
        engine.generate({"prompt": "x", "multi_modal_data": {"image": 1}}, SamplingParams(), "r")
    got: list[RequestOutput] = []
    with pytest.raises(EngineGenerateError) as failed:
        async for item in engine.generate([66], ENDLESS, "r"):
            got.append(item)  # noqa: PERF401 - what comes before the error counts
    assert failed.value.partial.num_output_tokens == 3
    assert len(got[-1].outputs[0].token_ids) == 3
    with pytest.raises(ValueError, match="embed"):
        async for _ in engine.encode([1], PoolingParams(task="embed"), "r"):
            pass


async def test_requests_wait_for_the_end_of_a_pause(engine: AsyncLLM) -> None:
    """As in vLLM: they are not refused. A call that returns is a fence."""
    await engine.pause_generation(mode="wait")
    assert await engine.is_paused()
    got: list[RequestOutput] = []

    async def consume() -> None:
        got.extend(await items(engine.generate([1], SamplingParams(max_tokens=5), "r")))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        with anyio.fail_after(30):
            while not (await engine.get_statistics())["requests_waiting"]:  # noqa: ASYNC110 - in another loop
                await anyio.sleep(0.001)
        assert got == []
        await engine.resume_generation()
    assert got[-1].outputs[0].token_ids == expected_tokens([1], 5)
    await engine.wait_for_requests_to_drain(5)


async def test_the_engines_death(engine: AsyncLLM) -> None:
    stream = engine.generate([1], ENDLESS, "r")
    await anext(stream)
    await engine.check_health()
    assert engine.is_running and not engine.errored
    with pytest.raises(EngineDeadError):
        await engine.reset_mm_cache()
    with pytest.raises(EngineDeadError) as caught:
        await items(stream)
    assert caught.value.exit_code == 7
    assert engine.errored and engine.is_stopped
    assert isinstance(engine.dead_error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    with pytest.raises(EngineDeadError):
        await items(engine.generate([1], ENDLESS, "r"))


async def test_logging_of_statistics(engine: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "anyengine.statistics"):
        await items(engine.generate([1], SamplingParams(max_tokens=3), "r"))
        await engine.do_log_stats()
    assert caplog.records
    assert await engine.is_tracing_enabled() is False


# --------------------------------------------------------------------------------------- the ends of the object


def num_client_threads() -> int:
    return sum(thread.name == "anyengine client" for thread in threading.enumerate())


async def test_it_ends_with_the_last_reference(twin: ScriptedTwin) -> None:
    """That of a stream which is not over included: an iteration that has begun goes on, as with vLLM's generators."""
    engine = AsyncLLM(twin.engine)
    gone = weakref.ref(engine)
    stream = engine.generate([1], SamplingParams(max_tokens=60), "r")
    left = engine.generate([1], ENDLESS, "left")
    await anext(left)
    await anext(stream)
    del engine
    await left.aclose()
    assert gone() is not None
    assert (await items(stream))[-1].outputs[0].finish_reason == "length"
    gc.collect()
    assert gone() is None
    with anyio.fail_after(30):
        while num_client_threads():  # noqa: ASYNC110 - in another loop
            await anyio.sleep(0.001)


async def test_a_stream_that_is_dropped_keeps_nothing(twin: ScriptedTwin) -> None:
    """Not even from the client's side, where its request is still served."""
    stream = AsyncLLM(twin.engine).generate([1], ENDLESS, "r")
    await anext(stream)
    del stream
    gc.collect()
    with anyio.fail_after(30):
        while num_client_threads():  # noqa: ASYNC110 - in another loop
            await anyio.sleep(0.001)


async def test_shutdown_ends_what_is_in_flight(twin: ScriptedTwin) -> None:
    """Or lets it finish for a while; twice is once; and then nothing more can be asked."""
    for params, timeout, reason in ((ENDLESS, None, "abort"), (SamplingParams(max_tokens=60), 30, "length")):
        engine = AsyncLLM(twin.engine)
        stream = engine.generate([1], params, "r")
        await anext(stream)
        engine.shutdown(timeout=timeout)
        assert num_client_threads() == 0
        engine.shutdown(timeout=timeout)
        assert (await items(stream))[-1].outputs[0].finish_reason == reason
        assert await items(stream) == []
        for late in (engine.is_paused, lambda: anext(engine.generate([1], ENDLESS, "r"))):  # noqa: B023 - used at once
            with pytest.raises(EngineDeadError):
                await late()
        assert engine.errored


def test_one_object_in_several_event_loops() -> None:
    """One after the other, of each kind, and two at a time: vLLM's belongs to the first."""
    engine = AsyncLLM(ScriptedTwin(SCRIPT).engine)

    async def use() -> list[int]:
        found = await items(engine.generate([1], SamplingParams(max_tokens=20), "r"))
        return list(found[-1].outputs[0].token_ids)

    results: list[list[int]] = []
    others = [threading.Thread(target=lambda: results.append(asyncio.run(use()))) for _ in range(4)]
    try:
        for other in others:
            other.start()
        results += [anyio.run(use, backend=backend) for backend in ("asyncio", "trio", "asyncio")]
        for other in others:
            other.join()
    finally:
        engine.shutdown()
    assert results == [expected_tokens([1], 20)] * 7


async def test_limits_of_the_queue_refuse_as_vllm_does(twin: ScriptedTwin, monkeypatch: pytest.MonkeyPatch) -> None:
    """And do not wait; during a pause a request waits all the same."""
    args = AsyncEngineArgs(max_num_queued_reqs=1)
    monkeypatch.setattr(args, "engines", lambda: [twin.engine])
    engine = AsyncLLM(args)
    try:
        engine.check_admission()
        assert engine.get_kv_event_sources() == {}
        assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (0, 0)
        silent = engine.generate([77, 1, 2], ENDLESS, "silent")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(items, silent)
            await in_flight(engine, 1)
            assert (engine.get_num_unfinished_requests(), engine.get_num_queued_tokens()) == (1, 3)
            with pytest.raises(OverloadedError, match="max_num_queued_reqs=1"):
                engine.check_admission(request_id="r")
            with pytest.raises(OverloadedError, match="max_num_queued_reqs=1"):
                await items(engine.generate([1], SamplingParams(max_tokens=3), "r"))
            await engine.abort("silent")
        await engine.pause_generation()
        engine.check_admission()
        found: list[RequestOutput] = []

        async def ask() -> None:
            found.extend(await items(engine.generate([1], SamplingParams(max_tokens=3), "r")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert not found
            await engine.resume_generation()
        assert found[-1].finished
    finally:
        engine.shutdown()


async def test_parameters_of_another_kind_are_refused_at_once(engine: AsyncLLM) -> None:
    for value in (None, {"max_tokens": 3}, PoolingParams()):
        with pytest.raises(RequestRejected, match="give SamplingParams") as caught:
            engine.generate([1], value, "r")  # type: ignore[arg-type]
        assert (caught.value.parameter, caught.value.value) == ("sampling_params", value)
    with pytest.raises(RequestRejected, match="give PoolingParams"):
        engine.encode([1], SamplingParams(), "r")  # type: ignore[arg-type]
