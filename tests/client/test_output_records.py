"""What an output tells beside its tokens: the prompt, figures, what only some engines send. And that it travels."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import anyio
import msgspec
import pytest
from built_tokenizers import write_model
from memory_engines import in_loop

from anyengine import (
    EngineClient,
    LoRARequest,
    OutputKind,
    RequestFailed,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    WeightVersionSpan,
    output_from_json,
    output_to_json,
)
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin

pytestmark = pytest.mark.anyio

REQUEST_OUTPUT = (  # vLLM 0.32.0, outputs.py
    "request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "prompt_token_id_logprobs", "outputs", "finished",
    "metrics", "lora_request", "encoder_prompt", "encoder_prompt_token_ids", "num_cached_tokens",
    "num_cache_creation_tokens", "kv_transfer_params", "ec_transfer_params",
)  # fmt: skip
COMPLETION_OUTPUT = (
    "index", "text", "token_ids", "cumulative_logprob", "logprobs", "routed_experts", "finish_reason", "stop_reason",
    "lora_request", "sampling_mask", "spec_decode_metrics", "weight_versions",
)  # fmt: skip
METRICS = (  # v1/metrics/stats.py, RequestStateStats
    "num_generation_tokens", "num_preemptions", "arrival_time", "queued_ts", "scheduled_ts", "first_token_ts",
    "last_token_ts", "first_token_latency", "is_corrupted", "is_watermarked", "is_watermark_skipped",
)  # fmt: skip
SPECULATION = {"num_spec_tokens": 3, "histogram": [1, 0, 2, 1], "num_draft_tokens": 12}


def tensor(values: list[int], *shape: int) -> list[Any]:
    data = b"".join(value.to_bytes(8, "little") for value in values)
    return ["int64", list(shape), msgspec.msgpack.Ext(3, data)]


TALKATIVE = RequestRule(  # docs/protocol.md §7: positions of EngineCoreOutput
    tokens=(5, 6, 7),
    output={12: tensor([1, 2, 3, 4], 1, 2, 2), 13: 1, 15: [tensor([9, 8, 7], 3), None, None], 21: None},
    last={8: {"block": 3}, 9: {"encoder": "x"}, 16: SPECULATION, 19: "news", 20: None, 21: {"more": 1}},
)


@pytest.fixture
def model_dir(tmp_path: Any) -> str:
    return str(write_model(tmp_path / "model", config={"vocab_size": 400, "max_position_embeddings": 2048}))


async def answers(script: Script, prompt: Any = (1, 2), params: Any = None, **fields: Any) -> list[RequestOutput]:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(script).engine) as client:
            return [out async for out in client.generate(prompt, params or SamplingParams(), **fields)]


def travels(out: RequestOutput) -> bool:
    return out == pickle.loads(pickle.dumps(out)) and output_to_json(
        output_from_json(output_to_json(out))
    ) == output_to_json(out)


@pytest.mark.feature("O01", "O02", "O16", "O17", "O18")
async def test_everything_that_an_engine_says_is_there() -> None:
    outs = await answers(Script(requests=(TALKATIVE,)), prompt_text="ab")
    last = outs[-1]
    for name in REQUEST_OUTPUT:
        getattr(last, name)
    for name in COMPLETION_OUTPUT:
        getattr(last.outputs[0], name)
    assert (last.prompt, last.prompt_token_ids) == ("ab", (1, 2))
    assert (last.kv_transfer_params, last.ec_transfer_params) == ({"block": 3}, {"encoder": "x"})
    assert last.routed_experts is not None and last.routed_experts.tolist() == [[[1, 2], [3, 4]]] * 3
    masks = [mask for out in outs if out.sampling_mask for mask in out.sampling_mask.token_ids]
    assert masks == [(9, 8, 7)] * 3
    speculation = last.spec_decode_metrics
    assert speculation is not None
    figures = speculation.to_dict()
    assert figures["mean_acceptance_length"] == 1 + (0 * 1 + 1 * 0 + 2 * 2 + 3 * 1) / 4
    assert figures["draft_acceptance_rate"] == 7 / 12
    assert last.metrics.is_corrupted
    assert last.extra == {"position_19": "news", "position_21": {"more": 1}}
    assert [out.extra or out.kv_transfer_params or out.routed_experts for out in outs[:-1]] == [None] * (len(outs) - 1)
    assert all(map(travels, outs))
    assert output_from_json(output_to_json(last)).kv_transfer_params == {"block": 3}


@pytest.mark.feature("O01", "O17")
@pytest.mark.parametrize("kind", list(OutputKind))
async def test_masks_come_with_their_tokens(kind: OutputKind) -> None:
    outs = await answers(Script(requests=(TALKATIVE,)), params=SamplingParams(output_kind=kind))
    for out in outs:
        assert out.sampling_mask is not None and len(out.sampling_mask.token_ids) == len(out.token_ids)


@pytest.mark.feature("O01")
async def test_the_prompt_is_told(model_dir: str) -> None:
    """Text as it was given, or as the chat template wrote it; the ids as they were sent."""
    scripted = ScriptedTwin(model_dir=model_dir)
    one = SamplingParams(max_tokens=1)
    chat = {"chat_template": "{{ messages[0].content }}!"}
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [
                await client.complete("the fox", one),
                await client.complete("the fox", one, tokenization_kwargs={"truncate_prompt_tokens": 2}),
                await client.chat([{"role": "user", "content": "hey"}], one, **chat).final(),
                await client.complete([1, 2], one),
                await client.complete([1, 2], SamplingParams(n=2, max_tokens=1), prompt_text="told"),
            ]
    assert [out.prompt for out in outs] == ["the fox", "the fox", "hey!", None, "told"]
    assert {out.prompt for out in outs[-1].outputs} == {"told"}
    sent = [record.body[1] for record in scripted.records() if record.kind == "add"]
    assert [list(out.prompt_token_ids or ()) for out in outs] == sent[:-1]
    assert len(outs[1].prompt_token_ids or ()) == 2


@pytest.mark.feature("O01", "O02")
async def test_an_adapter_is_told() -> None:
    lora = LoRARequest("a", 1, "/a")
    script = Script(registration={"supports_lora": True, "max_loras": 1})
    (out,) = await answers(script, params=SamplingParams(max_tokens=1), lora_request=lora)
    assert out.lora_request == out.outputs[0].lora_request == lora
    assert travels(out)


async def test_scores_travel_as_json() -> None:
    rows = {2: [tensor([5, 6], 1, 2), ["float32", [1, 2], msgspec.msgpack.Ext(3, b"\0" * 8)], tensor([1], 1), None]}
    outs = await answers(Script(requests=(RequestRule(tokens=(5, 6), output=rows),)), params=SamplingParams(logprobs=1))
    for out in outs:
        back = output_from_json(output_to_json(out))
        assert back.logprobs is not None and back.logprobs == out.logprobs


CODES = [(0, "stop"), (1, "length"), (4, "repetition"), (9, "unknown:9")]


@pytest.mark.feature("O03")
@pytest.mark.parametrize(("code", "reason"), CODES)
async def test_every_finish_reason_has_its_name(code: int, reason: str) -> None:
    """One that is newer than the client is no reason to lose the answer."""
    outs = await answers(Script(requests=(RequestRule(tokens=(5, 6), last={5: code}),)))
    assert [out.finish_reason for out in outs] == [None] * (len(outs) - 1) + [reason]
    assert [token for out in outs for token in out.token_ids] == [5, 6]


@pytest.mark.feature("O03")
@pytest.mark.parametrize(("code", "error_code"), [(2, "engine_aborted"), (3, None)])
async def test_an_end_that_nobody_asked_for_is_an_error(code: int, error_code: str | None) -> None:
    with pytest.raises(RequestFailed) as caught:
        await answers(Script(requests=(RequestRule(tokens=(5, 6), last={5: code}),)))
    assert caught.value.code == error_code or error_code is None
    assert isinstance(caught.value.partial, RequestOutput) and caught.value.partial.token_ids == [5, 6]


@pytest.mark.feature("O06", "O07", "O14")
@pytest.mark.case("K81")
async def test_every_item_has_figures() -> None:
    """On one clock, which never goes back; a preemption counts; the engine's queue is known from its first output."""
    events = [{"type": 1, "timestamp": 7.0}, {"type": 2, "timestamp": 7.25}, {"type": 3, "timestamp": 7.5}]
    prefill = {
        "num_prompt_tokens": 2, "num_computed_tokens": 1, "num_cached_tokens": 1, "num_local_cached_tokens": 1,
        "num_external_cached_tokens": 0, "num_cache_creation_tokens": 5,
    }  # fmt: skip
    rule = RequestRule(tokens=(5, 6, 7), output={7: events, 11: prefill})
    outs = await answers(Script(requests=(rule,), step_interval_s=0.01))
    former = 0.0
    for out in outs:
        figures, number = out.metrics, out.num_output_tokens
        assert all(hasattr(figures, name) for name in METRICS)
        assert (figures.num_generation_tokens, figures.num_preemptions) == (number, number)
        assert figures.queued_s == pytest.approx(0.25)
        assert figures.first_token_ts is not None and figures.last_token_ts is not None
        assert figures.queued_ts <= figures.first_token_ts <= figures.last_token_ts
        assert figures.last_token_ts >= former
        former = figures.last_token_ts
        assert figures.first_token_latency == figures.first_token_s
        assert figures.prefill_s is not None and figures.decode_s is not None and figures.inference_s is not None
        assert figures.first_token_s == pytest.approx(figures.queued_s + figures.prefill_s)
        assert figures.inference_s == pytest.approx(figures.prefill_s + figures.decode_s)
        assert figures.total_s >= figures.first_token_s + figures.decode_s - 1e-6
        assert out.prefill is not None and msgspec.to_builtins(out.prefill) == prefill
        assert (out.num_cached_tokens, out.num_cache_creation_tokens) == (1, 5)
    assert outs[-1].metrics.tokens_per_second == pytest.approx(1 / outs[-1].metrics.mean_token_gap_s)  # type: ignore[operator]
    assert not outs[-1].metrics.is_corrupted


@pytest.mark.feature("O06")
async def test_the_times_of_a_real_scheduler() -> None:
    """Our own engine core says when it has scheduled a request: behind its arrival, before its first token."""
    with anyio.fail_after(30):
        async with EngineClient(engine=in_loop()) as client:
            out = await client.complete([1, 2], SamplingParams(max_tokens=3))
    figures = out.metrics
    assert figures.queued_s is not None and figures.scheduled_ts is not None
    assert figures.first_token_ts is not None and figures.last_token_ts is not None
    assert figures.queued_ts <= figures.scheduled_ts <= figures.first_token_ts <= figures.last_token_ts


@pytest.mark.feature("O15", "C30")
async def test_new_weights_begin_a_span() -> None:
    """Frozen in between, so that nobody doubts which token was the last of the old ones."""
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(step_interval_s=0.001)).engine) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=400))
            plain = await client.complete([2], SamplingParams(max_tokens=2))
            async with client.paused("keep"):
                before = (await anext(stream)).num_output_tokens
                assert await client.get_weight_version() == "default"
                await client.update_weight_version("v2")
                assert await client.get_weight_version() == "v2"
            out = await stream.final()
    assert plain.weight_versions == (WeightVersionSpan("default", 0, 2),)
    assert out.weight_versions == (WeightVersionSpan("default", 0, before), WeightVersionSpan("v2", before, 400))


@pytest.mark.feature("R14")
async def test_scores_of_chosen_tokens_of_the_prompt() -> None:
    """A row for each position from the start on, as an array; what pads a row is minus infinity."""
    numbers = struct.pack("<4f", -1.0, float("-inf"), -2.0, -3.0)
    scores = ["float32", [2, 2], msgspec.msgpack.Ext(3, numbers)]
    rule = RequestRule(tokens=(5, 6), output={17: scores})
    params = SamplingParams(prompt_logprob_token_ids=[[7, -1], [8, 9]], prompt_logprob_start=1)
    scripted = ScriptedTwin(Script(requests=(rule,), step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            outs = [out async for out in client.generate([1, 2, 3, 4], params)]
            with pytest.raises(RequestRejected, match="rows"):  # one for each position, and no other number
                await client.complete([1, 2], params)
    (add,) = scripted.received("add")
    assert add[3]["prompt_logprob_start"] == 1 and add[3]["prompt_logprob_token_ids"][:2] == ["<i4", [2, 2]]
    assert [out.prompt_token_id_logprobs is None for out in outs] == [False] + [True] * (len(outs) - 1)  # once
    found = outs[0].prompt_token_id_logprobs
    assert found is not None and found.numpy().shape == (2, 2)
    assert found.tolist() == [[-1.0, float("-inf")], [-2.0, -3.0]]
