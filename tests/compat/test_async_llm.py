"""``AsyncLLM`` over the client: what its items hold, every way out of a stream, and the ends of the object."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from anyengine import EmbeddedEngine, EngineStartupError, RequestRejected
from anyengine import outputs as ours
from anyengine.compat import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineDeadError,
    EngineGenerateError,
    OutputStream,
    PoolingParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TokensPrompt,
)
from anyengine.compat.async_llm import _stop_all
from anyengine.compat.outputs import Accumulator
from anyengine.sync.client_thread import ClientThread
from anyengine.testing.scripted import End, Fault, RequestRule, Script, ScriptedTwin, StartupStage, expected_tokens

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


def test_items_are_merged_as_they_come() -> None:
    """Every field of an item, and of its completions; those that were given out stay as they are."""
    scores = [[0.5]]

    def piece(token: int, **fields: Any) -> ours.RequestOutput:
        mask = ours.SamplingMask(((token, token + 1),))
        details = ours.OutputDetails(sampling_mask=mask, **fields.pop("details", {}))
        fields |= {"details": details, "cumulative_logprob": -float(token)}
        return ours.RequestOutput(request_id="r", text=chr(token), token_ids=[token], **fields)

    drafts = ours.SpecDecodeMetrics()
    ends = {"routed_experts": "experts", "spec_decode_metrics": drafts, "ec_transfer_params": {"a": 1}}
    pieces = [
        piece(97, prompt_token_id_logprobs=scores),
        piece(98),
        piece(99, details=ends, finish_reason="stop", stop_reason="c"),
    ]
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        gathers = kind is RequestOutputKind.CUMULATIVE
        accumulator = Accumulator(kind, "prompt")
        accumulator.add(pieces[0])
        first = accumulator.take()
        for one in pieces[1:]:
            accumulator.add(one)
        item = accumulator.take()
        assert not accumulator.has_new
        [begun], [ended] = first.outputs, item.outputs
        assert (begun.text, begun.token_ids, begun.finish_reason) == ("a", [97], None)
        assert begun.sampling_mask == ours.SamplingMask(((97, 98),))
        assert first.prompt_token_id_logprobs is scores
        assert item.prompt_token_id_logprobs is (scores if gathers else None)
        tokens = [97, 98, 99] if gathers else [98, 99]
        assert (ended.text, ended.token_ids) == ("".join(map(chr, tokens)), tokens)
        assert ended.sampling_mask == ours.SamplingMask(tuple((token, token + 1) for token in tokens))
        assert (ended.routed_experts, ended.spec_decode_metrics) == ("experts", drafts)
        assert (ended.finish_reason, ended.stop_reason, ended.cumulative_logprob) == ("stop", "c", -99.0)
        assert (item.finished, item.ec_transfer_params, item.encoder_prompt) == (True, {"a": 1}, None)


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
        engine.generate({"prompt": "x", "multi_modal_data": {}}, SamplingParams(), "r")
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


def test_all_are_stopped_at_the_end_whatever_one_of_them_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [AsyncLLM(ScriptedTwin(SCRIPT).engine) for _ in range(2)]
    interrupted: list[ClientThread] = []
    stop = ClientThread.stop

    def stop_and_be_interrupted(self: ClientThread, *, in_hurry: bool = False) -> None:
        stop(self, in_hurry=in_hurry)
        if not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(ClientThread, "stop", stop_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        _stop_all()
    assert interrupted
    assert all(engine._thread.has_ended for engine in engines)


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


def test_a_failed_start_is_raised_by_the_constructor() -> None:
    script = Script(startup=(StartupStage(name="loading", end=End(error="RuntimeError: no such weights")),))
    with pytest.raises(EngineStartupError, match="no such weights"):
        AsyncLLM(ScriptedTwin(script).engine)
    assert num_client_threads() == 0


@pytest.mark.parametrize("keeps", [True, False], ids=["global", "local"])
def test_a_program_that_forgets_it_ends_in_order(keeps: bool) -> None:
    """The engine is told to stop, and has time to: at the end of the interpreter at the latest."""
    program = f"""
        import asyncio, faulthandler
        from anyengine.compat import AsyncLLM, SamplingParams
        from anyengine.testing.scripted import Script, ScriptedProcess

        async def main():
            {"global engine" if keeps else ""}
            engine = AsyncLLM(ScriptedProcess(Script(step_interval_s=0.001, shutdown_delay_s=0.05)).engine)
            async for item in engine.generate([1], SamplingParams(max_tokens=500), "r"):
                break

        asyncio.run(main())
        faulthandler.dump_traceback_later(5, exit=True)
        print("ended", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


# ------------------------------------------------------------------------------------------- engine arguments


def test_engine_arguments() -> None:
    args = AsyncEngineArgs(
        model="m", dtype="float32", max_model_len=64, seed=3, enforce_eager=True, gpu_memory_utilization=0.5,
        tensor_parallel_size=1, tokenizer="m", enable_lora=False, quantization=None, data_parallel_size=2,
    )  # fmt: skip
    assert args.engines() == [EmbeddedEngine(model="m", dtype="float32", max_model_len=64, seed=3)] * 2
    assert (args.max_model_len, args.enforce_eager, args.model) == (64, True, "m")
    with pytest.raises(AttributeError, match="block_size"):
        _ = args.block_size
    assert AsyncEngineArgs().engines() == [EmbeddedEngine()]
    assert AsyncEngineArgs("m", max_logprobs=50).engines() == [EmbeddedEngine("m", max_logprobs=50)]
    for refused in (
        {"tensor_parallel_size": 2}, {"quantization": "awq"}, {"enable_lora": True}, {"tokenizer": "other"},
        {"speculative_config": {"method": "ngram"}}, {"nonsense": 1}, {"load_format": "dummy"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(refused))):
            AsyncEngineArgs("m", **refused)
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--port", type=int)
    given = parser.parse_args(["--model", "m", "--max-num-seqs", "4", "--port", "1", "--enforce-eager"])
    assert AsyncEngineArgs.from_cli_args(given).engines() == [EmbeddedEngine(model="m", max_num_seqs=4)]
    with pytest.raises(ValueError, match="stat_loggers"):
        AsyncLLM.from_engine_args(args, stat_loggers=[print])
    assert AsyncLLMEngine is AsyncLLM


def test_sampling_parameters() -> None:
    params = SamplingParams.from_optional(temperature=None, max_tokens=3, stop=None, skip_clone=True)
    assert params == SamplingParams(max_tokens=3, skip_clone=True)
    assert params.clone() is params
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)
