"""What a program gives to ``AsyncLLM`` and what it gets: engine arguments, parameters, prompts, items."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import anyengine
from anyengine import EmbeddedEngine, RequestRejected
from anyengine import outputs as ours
from anyengine.compat import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EmbedsPrompt,
    RequestOutputKind,
    SamplingParams,
)
from anyengine.compat.outputs import Accumulator
from anyengine.compat.params import split_prompt


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
    for refused in (
        {"tensor_parallel_size": 2}, {"quantization": "awq"}, {"tokenizer": "other"}, {"data_parallel_size": 0},
        {"data_parallel_size": "2"}, {"cpu_offload_gb": 4}, {"hf_overrides": {"a": 1}}, {"api_server_count": 2},
        {"speculative_config": {"method": "ngram"}}, {"nonsense": 1}, {"load_format": "dummy"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{next(iter(refused))}=.*(leave it out|at least 1)"):
            AsyncEngineArgs("m", **refused)
    assert AsyncEngineArgs("m", api_server_count=1, cpu_offload_gb=0, hf_overrides={}, limit_mm_per_prompt={},
                           scheduling_policy="priority").engines() == [EmbeddedEngine(model="m")]  # fmt: skip
    ours_too = {"device": "cpu", "num_threads": 2, "profile_dir": "traces", "in_process": True}
    assert AsyncEngineArgs("m", **ours_too).engines() == [EmbeddedEngine(model="m", **ours_too)]
    for loras, expected in (
        ({"enable_lora": True}, 1), ({"enable_lora": True, "max_loras": 3, "max_lora_rank": 64}, 3),
        ({"max_loras": 3}, 0),
    ):  # fmt: skip
        assert AsyncEngineArgs("m", **loras).engines() == [EmbeddedEngine(model="m", max_loras=expected)]
    parser = AsyncEngineArgs.add_cli_args(argparse.ArgumentParser())
    for own in ("--port", "--device", "--num-threads", "--profile-dir"):
        parser.add_argument(own)
    given = parser.parse_args(["--model", "m", "--max-num-seqs", "4", "--device", "mine", "--enforce-eager"])
    assert AsyncEngineArgs.from_cli_args(given).engines() == [EmbeddedEngine(model="m", max_num_seqs=4)]
    with pytest.raises(ValueError, match="stat_loggers"):
        AsyncLLM.from_engine_args(args, stat_loggers=[print])
    assert AsyncLLMEngine is AsyncLLM
    with pytest.raises(TypeError, match=r"AsyncLLM\(AsyncEngineArgs\(model='facebook/opt-125m'\)\)"):
        AsyncLLM("facebook/opt-125m")  # type: ignore[arg-type]


def test_prompts_in_all_of_vllms_forms() -> None:
    """What says nothing is no reason for a refusal; what would be lost is."""
    nothing = {"multi_modal_data": None, "mm_processor_kwargs": {}, "multi_modal_uuids": {}}
    assert split_prompt({"prompt": "x", "cache_salt": "s", **nothing}) == ("x", "x", "s")
    assert split_prompt({"prompt_token_ids": None, "prompt": "x"}) == ("x", "x", None)
    assert split_prompt({"prompt_token_ids": [1], "prompt": "x"}) == ([1], "x", None)
    rows = [[0.5], [0.25]]
    given, text, _ = split_prompt(
        EmbedsPrompt(prompt_embeds=rows, prompt="x", prompt_token_ids=[1, 2], prompt_is_token_ids=[True, False])
    )
    assert isinstance(given, anyengine.EmbedsPrompt)
    assert (given.prompt_embeds, given.prompt_token_ids, given.prompt_is_token_ids) == (rows, [1, 2], [True, False])
    assert text == "x"
    for refused in ({"prompt": "x", "multi_modal_data": {"image": 1}}, {"prompt_token_ids": None}, {}):
        with pytest.raises(RequestRejected, match="give text, token ids or embeddings"):
            split_prompt(refused)


def test_sampling_parameters() -> None:
    params = SamplingParams.from_optional(temperature=None, max_tokens=3, stop=None, skip_clone=True)
    assert params == SamplingParams(max_tokens=3, skip_clone=True)
    assert params.clone() is params
    assert SamplingParams.from_optional(logit_bias={"7": 200, "8": -1.5}).logit_bias == {7: 100, 8: -1.5}
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"seven": 1})
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


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
