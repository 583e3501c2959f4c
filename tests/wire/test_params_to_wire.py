"""From what users ask to what the engine is told."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

import anyengine._wire as wire
from anyengine.params import (
    LateChunkingParams,
    LateInteractionParams,
    LoRARequest,
    OutputKind,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)


def written(params: SamplingParams, **options: Any) -> dict[str, Any]:
    """The map that goes on the wire."""
    options = {"eos_token_id": None, "max_tokens": params.max_tokens, **options}
    decoded: dict[str, Any] = msgspec.msgpack.decode(
        msgspec.msgpack.encode(wire.sampling_to_wire(params, **options), enc_hook=repr)
    )
    return decoded


def test_defaults_write_nothing() -> None:
    assert written(SamplingParams()) == {}


def test_only_what_is_off_the_default_is_written() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=3, max_tokens=7, min_tokens=2)
    assert written(params) == {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 3, "max_tokens": 7, "min_tokens": 2,
    }  # fmt: skip


def test_the_output_side_stays_here() -> None:
    params = SamplingParams(
        n=3,
        stop=["END"],
        stop_regex=["E+ND"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        output_kind=OutputKind.FINAL_ONLY,
        stream_interval=5,
        flat_logprobs=True,
        bad_words=["x"],
    )
    assert written(params) == {}
    assert written(SamplingParams(detokenize=False)) == {}


def test_greedy_needs_no_truncation_of_the_distribution() -> None:
    assert written(SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.5)) == {"temperature": 0.0}


def stop_fields(params: SamplingParams) -> tuple[Any, list[int], list[int]]:
    found = written(params, eos_token_id=2, extra_stop_token_ids=(9, 2, 7))
    return found.get("_eos_token_id"), found.get("stop_token_ids", []), sorted(found["_all_stop_token_ids"])


@pytest.mark.feature("R08")
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), (2, [7, 9], [2, 7, 9])),
        (SamplingParams(stop_token_ids=[5, 9]), (2, [5, 9, 7], [2, 5, 7, 9])),
        (SamplingParams(ignore_eos=True), (None, [], [2, 7, 9])),
        (SamplingParams(ignore_eos=True, stop_token_ids=[2, 5]), (None, [2, 5], [2, 5, 7, 9])),
    ],
)
def test_stop_ids(params: SamplingParams, expected: tuple[Any, list[int], list[int]]) -> None:
    assert stop_fields(params) == expected


def test_resolved_values_replace_the_users() -> None:
    params = SamplingParams(max_tokens=None, seed=5)
    assert written(params, max_tokens=100, seed=6) == {"max_tokens": 100, "seed": 6}


def test_prompt_logprobs_bypass_the_prefix_cache_unless_the_user_decides() -> None:
    assert written(SamplingParams(prompt_logprobs=0)) == {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
    chosen = SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=False)
    assert written(chosen) == {"prompt_logprobs": 0, "skip_reading_prefix_cache": False}


def test_sequences_and_records() -> None:
    params = SamplingParams(
        allowed_token_ids=[1, 2],
        logprob_token_ids=[3],
        logit_bias={5: 1.5},
        extra_args={"kv_transfer_params": {"a": 1}},
        structured_outputs=StructuredOutputsParams(choice=["a", "b"]),
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3),
        prompt_logprob_token_ids=[[1, -1], [2, 3]],
    )
    frames = wire.NEWEST.encode_add(
        wire.EngineCoreRequest(
            "r",
            [1],
            sampling_params=wire.sampling_to_wire(
                params,
                eos_token_id=2,
                max_tokens=16,
                bad_words_token_ids=[(1, 2)],
                structured_outputs_backend="guidance",
            ),
        )
    )
    request = wire.NEWEST.decode_input(frames)
    assert isinstance(request, wire.EngineCoreRequest)
    sampling = request.sampling_params
    assert sampling is not None
    assert (sampling.allowed_token_ids, sampling.logprob_token_ids) == ([1, 2], [3])
    assert (sampling.logit_bias, sampling.extra_args) == ({5: 1.5}, {"kv_transfer_params": {"a": 1}})
    assert sampling.structured_outputs == wire.WireStructuredOutputs(choice=["a", "b"], backend="guidance")
    assert sampling.repetition_detection == wire.WireRepetitionDetection(4, 1, 3)
    assert sampling.bad_words_token_ids == [[1, 2]]
    assert sampling.prompt_logprob_token_ids is not None
    np.testing.assert_array_equal(sampling.prompt_logprob_token_ids.numpy(), np.array([[1, -1], [2, 3]], dtype="<i4"))


def test_pooling() -> None:
    params = PoolingParams(
        task="embed",
        dimensions=8,
        returned_token_ids=[1],
        late_interaction_params=LateInteractionParams(mode="m", query_key="k", query_uses=2),
        late_chunking_params=LateChunkingParams(chunk_size=16),
        extra_kwargs={"a": 1},
    )
    assert wire.pooling_to_wire(params) == wire.WirePoolingParams(
        task="embed",
        dimensions=8,
        returned_token_ids=[1],
        late_interaction_params=wire.WireLateInteractionParams("m", "k", 2),
        late_chunking_params=wire.WireLateChunkingParams(16),
        extra_kwargs={"a": 1},
    )
    assert wire.pooling_to_wire(PoolingParams()) == wire.WirePoolingParams()


def test_lora() -> None:
    request = LoRARequest("ad", 3, "/adapters/ad", load_inplace=True)
    assert wire.lora_to_wire(request) == wire.WireLoRARequest("ad", 3, "/adapters/ad", load_inplace=True)
