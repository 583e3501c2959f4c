"""Values that hurt an engine: of a wrong type at each position of a request, out of range, outside the vocabulary."""

from __future__ import annotations

from typing import Any

from tiny_models import VOCAB_SIZE

from anyengine import EngineCoreRequest, SamplingParams
from anyengine._wire import WireLoRARequest, WireSamplingParams

__all__ = ["IN_VOCABULARY", "OUT_OF_RANGE", "PUBLIC", "WRONG_TYPES"]

WRONG_TYPES: dict[str, list[Any]] = {  # each position of a request
    "request_id": [7, b"a", "", None, ["a"]],
    "prompt_token_ids": ["abc", [1, "2"], [1.5], [True], 5, [None], {"a": 1}],
    "mm_features": ["x", [5], [{}]],
    "sampling_params": [5, WireSamplingParams(temperature="hot"), WireSamplingParams(max_tokens=4.5)],  # type: ignore[arg-type]
    "pooling_params": [5, [1]],
    "arrival_time": ["now", float("nan"), float("inf")],
    "lora_request": ["adapter", WireLoRARequest("x", "1", "/x")],  # type: ignore[arg-type]
    "cache_salt": [5],
    "data_parallel_rank": ["0", 1.5],
    "prompt_embeds": [[[0.1]], "x"],
    "prompt_is_token_ids": [[1, 0, 1], True],
    "client_index": [0.0, False],
    "current_wave": ["1", None],
    "priority": [1.5, True, 2**63],
    "trace_headers": [{"a": 1}, [], {1: "a"}],
    "resumable": [1, None],
    "external_req_id": [5],
    "reasoning_ended": [1],
    "reasoning_parser_kwargs": [[], {1: 2}],
    "abort_immediately": [None, 0],
    "session_id": [5],
    "kv_hints": [{}, 5],
}
assert tuple(WRONG_TYPES) == EngineCoreRequest.__struct_fields__
OUT_OF_RANGE: dict[str, list[Any]] = {  # each rule of "Ranges"
    "n": [0, -1, 16385],
    "presence_penalty": [-2.1, 2.1, float("nan")],
    "frequency_penalty": [-2.1, 2.1, float("nan")],
    "repetition_penalty": [0.0, -1.0, float("inf"), float("nan")],
    "temperature": [-1.0, 2.1, float("inf"), float("nan")],
    "top_p": [0.0, -0.1, 1.1, float("nan")],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1, float("nan")],
    "max_tokens": [0, -1],
    "min_tokens": [-1, 5],
    "stream_interval": [0],
    "logprobs": [-2, VOCAB_SIZE + 1],
    "prompt_logprobs": [-2, VOCAB_SIZE + 1],
    "stop": [[""]],
    "bad_words": [[""]],
    "thinking_token_budget": [-2, 1.5],
}
IN_VOCABULARY: dict[str, Any] = {
    "stop_token_ids": [VOCAB_SIZE],
    "all_stop_token_ids": {VOCAB_SIZE},
    "allowed_token_ids": [-1],
    "logprob_token_ids": [VOCAB_SIZE],
    "trace_decode_token_ids": [VOCAB_SIZE],
    "logit_bias": {VOCAB_SIZE: 1.0},
    "bad_words_token_ids": [[VOCAB_SIZE]],
    "eos_token_id": VOCAB_SIZE,
}
PUBLIC = {*SamplingParams.__struct_fields__} - {"logprobs", "prompt_logprobs"}  # refused as a whole, so far
