"""Smaller things that vLLM's AsyncLLM has, under its names: on the wire as it writes them."""

from __future__ import annotations

import math
import struct
from typing import Any

import anyio
import msgspec
import pytest
from memory_engines import in_loop

from anyengine import (
    CommandEngine,
    EngineClient,
    EngineDeadError,
    KvHintAction,
    KvHintsEnvelope,
    LateChunkingParams,
    PoolingOutput,
    PoolingParams,
    RequestFailed,
    RequestRejected,
    SamplingParams,
    Tensor,
    UtilityError,
)
from anyengine._wire import dialect_for, pooling_to_wire
from anyengine._wire.requests import EngineCoreRequest
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio

ONE = SamplingParams(max_tokens=1)
POOL = {"tasks": ("embed", "classify", "token_embed")}


def answer(method: str, value: Any) -> UtilityRule:
    return UtilityRule(method=method, do="reply", value=value)


@pytest.mark.feature("C03")
async def test_a_request_is_sent_when_submit_returns() -> None:
    """Nobody iterates: the engine has it all the same, and answers."""
    scripted = ScriptedTwin()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            inert = client.generate([1], ONE)
            stream = await client.submit([2], ONE)
            await client.ping()  # a fence
            assert [add[1] for add in scripted.received("add")] == [[2]]
            assert (await stream.final()).finished
            await inert.aclose()


@pytest.mark.feature("C05")
async def test_a_request_that_will_not_come() -> None:
    engines = [ScriptedTwin(), ScriptedTwin()]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            params = {"remote_block_ids": [1, 2]}
            await client.notify_kv_transfer_request_rejected("x", params, data_parallel_rank=1)
            for _ in range(2):
                await client.notify_kv_transfer_request_rejected("x", params)
            with pytest.raises(RequestRejected, match="no rank 7"):
                await client.notify_kv_transfer_request_rejected("x", params, data_parallel_rank=7)
            await client.is_paused()  # a fence
            assert client.stats().in_flight == 0
    adds = [one.received("add") for one in engines]
    assert [len(received) for received in adds] == [1, 2]
    for add in adds[0] + adds[1]:
        assert (add[1], add[3]["max_tokens"], add[19]) == ([0], 1, True)
        assert add[3]["extra_args"] == {"kv_transfer_params": {"remote_block_ids": [1, 2]}}
    assert len({add[0] for add in adds[0] + adds[1]}) == 3


@pytest.mark.feature("C08")
@pytest.mark.parametrize("endpoint", [None, "http://collector:4317"])
async def test_whether_the_engine_sends_spans(endpoint: str | None, tmp_path: Any) -> None:
    from anyengine.testing.scripted import ScriptedProcess

    args = {} if endpoint is None else {"otlp_traces_endpoint": endpoint}
    engine = CommandEngine(argv=ScriptedProcess().engine.argv, args=args)
    with anyio.fail_after(30):
        async with EngineClient(engine=engine) as client:
            assert await client.is_tracing_enabled() is (endpoint is not None)


@pytest.mark.feature("C12", "C14", "C31", "C40")
async def test_calls_that_are_only_passed_on() -> None:
    groups = [{"group_idx": 0, "kind": "full", "block_size": 16, "sliding_window": None}]
    rules = (answer("get_kv_cache_group_metadata", groups), answer("barrier", None))
    engines = [ScriptedTwin(Script(utilities=rules)) for _ in range(2)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            await client.reset_mm_cache()
            await client.reset_encoder_cache()
            await client.checkpoint_prepare()
            await client.checkpoint_restore()
            assert await client.get_kv_cache_group_metadata() == groups
            assert await client.supported_tasks() == ("generate",)
            assert await client.core.utility_on(None, "barrier") == {0: None, 1: None}
            with pytest.raises(UtilityError):
                await client.core.utility("no_such_method", rank=0)
    for one in engines:
        sent = [body[2:] for body in one.received("utility") if body[2] not in ("is_sleeping", "no_such_method")]
        assert sent == [
            ["reset_mm_cache", []],
            ["reset_encoder_cache", []],
            ["collective_rpc", ["checkpoint_prepare", None, [], None]],
            ["collective_rpc", ["checkpoint_restore", None, [], None]],
            ["get_kv_cache_group_metadata", []],
            ["get_supported_tasks", []],
            ["barrier", []],
        ]


@pytest.mark.feature("C27")
async def test_checksums_are_in_the_order_of_ranks() -> None:
    """Of all workers of the first rank, then of the second; whoever answers first."""
    first = UtilityRule(method="compute_weight_checksums", do="reply", value=[{"w": "0a"}, {"w": "0b"}], delay_s=0.02)
    engines = [Script(utilities=(first,)), Script(utilities=(answer("compute_weight_checksums", [{"w": "1a"}]),))]
    with anyio.fail_after(30):
        async with EngineClient(engine=[ScriptedTwin(one).engine for one in engines]) as client:
            assert await client.compute_weight_checksums() == [{"w": "0a"}, {"w": "0b"}, {"w": "1a"}]


@pytest.mark.feature("C35")
async def test_the_state_by_vllms_names() -> None:
    fault = Fault(do="kill", direction="in", kind="reset_mm_cache")
    client = EngineClient(engine=ScriptedTwin(Script(faults=(fault,))).engine)
    assert (client.is_running, client.is_stopped, client.errored, client.dead_error) == (False, True, False, None)
    with anyio.fail_after(30):
        async with client:
            assert (client.is_running, client.is_stopped, client.errored) == (True, False, False)
            async with client.paused("keep"):
                assert client.is_running
            with pytest.raises(EngineDeadError):
                await client.reset_mm_cache()
            assert (client.is_running, client.is_stopped, client.errored) == (False, True, True)
            assert isinstance(client.dead_error, EngineDeadError) and client.dead_error.signal == "SIGKILL"
        async with EngineClient(engine=in_loop()) as closed:
            await closed.aclose()
            assert (closed.is_running, closed.errored) == (False, False)


@pytest.mark.feature("C02", "O20")
async def test_pooling_in_one_call() -> None:
    """One result each, with the task that is meant; as numbers, a list, or an array."""
    scripted = ScriptedTwin(Script(**POOL))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            embedded = await client.embed([1, 2], priority=1)
            classes = await client.classify([1, 2])
            every = await client.encode([1, 2], PoolingParams(task="token_embed"))
            assert await client.score([1], [[2], [3]]) == pytest.approx([1.0, 1.0])
            assert await client.score([1], []) == []
            assert await client.rerank([1], [[2], [3], [4]], top_n=2) == [(0, pytest.approx(1)), (1, pytest.approx(1))]
            assert client.stats().in_flight == 0
    assert embedded.embedding == classes.probs == [1.0, 2.0, 3.0]
    assert embedded.data.numpy().tolist() == [1.0, 2.0, 3.0] and every.num_prompt_tokens == 2
    assert [add[4][4] for add in scripted.received("add")][:3] == ["embed", "classify", "token_embed"]


@pytest.mark.feature("C02")
async def test_the_nearest_first() -> None:
    def vector(x: float, y: float) -> list[Any]:
        return ["float32", [2], msgspec.msgpack.Ext(3, struct.pack("<2f", x, y))]

    directions = {1: (1.0, 0.0), 2: (0.0, 2.0), 3: (3.0, 3.0), 4: (5.0, 0.0), 5: (0.0, 0.0)}
    rules = tuple(RequestRule(first_token=n, output={4: vector(*xy)}) for n, xy in directions.items())
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(requests=rules, **POOL)).engine) as client:
            found = await client.rerank([1], [[2], [3], [4], [5]])
    assert [index for index, _ in found] == [2, 1, 0, 3]
    assert [score for _, score in found] == pytest.approx([1.0, math.sqrt(0.5), 0.0, 0.0])


@pytest.mark.feature("C02")
async def test_one_failure_ends_a_ranking() -> None:
    rules = (RequestRule(first_token=2, output={5: 3}), RequestRule(first_token=3, silent=True))
    scripted = ScriptedTwin(Script(requests=rules, **POOL))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with pytest.raises(RequestFailed):
                await client.score([1], [[2], [3]])
            await client.drain()
            assert client.stats().in_flight == 0


@pytest.mark.feature("O20")
def test_what_a_result_is_not() -> None:
    def made(*shape: int) -> PoolingOutput:
        data = Tensor("<f4", shape, b"\0" * 4 * math.prod(shape))
        return PoolingOutput(request_id="x", data=data)

    assert made(1).score == made(1, 1).score == 0.0
    with pytest.raises(ValueError, match="no vector"):
        _ = made(2, 2).embedding
    with pytest.raises(ValueError, match="no score"):
        _ = made(2).score


@pytest.mark.feature("R43", "R46", "R31", "R32")
async def test_fields_that_are_only_passed_on() -> None:
    hints = KvHintsEnvelope("1", "m", [KvHintAction("a", "prefetch", "1", {"k": 1})])
    scripted = ScriptedTwin()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            params = SamplingParams(max_tokens=1, watermarking=False, routed_experts_prompt_start=1)
            out = await client.complete([1, 2], params, kv_hints=hints)
            plain = await client.complete([1], ONE)
            marked = await client.complete([1], SamplingParams(max_tokens=1, watermarking=True))
    first, second, third = scripted.received("add")
    assert first[21] == msgspec.to_builtins(hints)
    assert (first[3]["watermarking"], first[3]["routed_experts_prompt_start"]) == (False, 1)
    assert not {"watermarking", "routed_experts_prompt_start"} & second[3].keys() and third[3]["watermarking"] is True
    assert (first[5], second[5]) == (out.metrics.arrival_time, plain.metrics.arrival_time)
    assert [one.metrics.is_watermarked for one in (out, plain, marked)] == [False, False, True]


@pytest.mark.feature("R29")
def test_a_budget_for_thinking() -> None:
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(thinking_token_budget=5).thinking_token_budget == 5
    for bad in (-2, 1.5, "x"):
        with pytest.raises(RequestRejected):
            SamplingParams(thinking_token_budget=bad)  # type: ignore[arg-type]


@pytest.mark.feature("R22")
async def test_parameters_are_never_copied_nor_changed() -> None:
    params = SamplingParams(max_tokens=2, stop_token_ids=[900], logit_bias={5: 1.0})
    before = msgspec.structs.asdict(params)
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine) as client:
            stream = client.generate([1], params)
            assert stream._params is params
            await stream.final()
            await client.complete([1], params)
    assert msgspec.structs.asdict(params) == before
    with pytest.raises(AttributeError):
        params.max_tokens = 3  # type: ignore[misc]


@pytest.mark.feature("R49")
@pytest.mark.parametrize(("release", "length"), [("0.32.0", 10), ("0.33.0", 11)])
def test_pooling_parameters_by_release(release: str, length: int) -> None:
    """In vLLM's order; what a release does not know is refused, not dropped."""
    params = PoolingParams(
        task="embed", dimensions=3, use_activation=True, step_tag_id=1, returned_token_ids=[2], requires_token_ids=True,
        skip_reading_prefix_cache=False, extra_kwargs={"a": 1},
    )  # fmt: skip
    dialect = dialect_for(release)
    request = EngineCoreRequest("x", [1], pooling_params=pooling_to_wire(params))
    wire = msgspec.msgpack.decode(dialect.encode_add(request)[1])[4]
    assert wire[:10] == [True, 3, 1, [2], "embed", True, False, None, {"a": 1}, 2]
    assert len(wire) == length
    chunked = pooling_to_wire(PoolingParams(task="embed", late_chunking_params=LateChunkingParams(chunk_size=4)))
    request = EngineCoreRequest("x", [1], pooling_params=chunked)
    if length == 11:
        assert msgspec.msgpack.decode(dialect.encode_add(request)[1])[4][10] == [4]
    else:
        with pytest.raises(Exception, match="late_chunking_params"):
            dialect.encode_add(request)
