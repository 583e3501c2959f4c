"""What an engine refuses, one request at a time. vLLM's engine trusts its front end and dies, or falls silent, of
most of these.

Owns the checks that need the model's limits, the value ranges of sampling parameters (vLLM checks them while
decoding) and the refusal of features that need more than a token from the model runner. Whether the sampler can do
the rest is the runner's to say.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from anyengine._wire import EngineCoreRequest, WirePoolingParams, WireSamplingParams

__all__ = ["check_request"]

_UNSUPPORTED_REQUEST_FIELDS = ("mm_features", "prompt_embeds", "resumable")
_UNSUPPORTED_SAMPLING_FIELDS = (
    "thinking_token_budget",
    "trace_decode_token_ids",
)
_MAX_PROMPT_LOGPROBS_BYTES = 2**28
"""Of one request, ids and values together: a long prompt with the whole vocabulary for each token must not exhaust the
memory that all share."""
_INT_DTYPES = frozenset({"<i4", "int32", "<i8", "int64"})
_SAMPLING_RANGES = {  # field: smallest, largest
    "temperature": (0.0, 2.0),
    "top_p": (math.ulp(0.0), 1.0),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (math.ulp(0.0), sys.float_info.max),
    "max_tokens": (1, math.inf),
    "min_tokens": (0, math.inf),
    "logprobs": (-1, math.inf),
    "prompt_logprobs": (-1, math.inf),
}


def check_request(
    request: EngineCoreRequest,
    *,
    vocab_size: int,
    max_model_len: int,
    generates: bool = True,
    pooling_tasks: Sequence[str] = (),
    embedding_size: int = 0,
) -> tuple[list[int], WireSamplingParams] | str:
    """The prompt and the sampling parameters of ``request`` (of a pooling request, those that concern its prompt); or
    why it cannot be served: field, value and limit."""
    for field in _UNSUPPORTED_REQUEST_FIELDS:
        if getattr(request, field):
            return f"{field} is not supported by this engine"
    prompt, sampling = request.prompt_token_ids, request.sampling_params
    if request.pooling_params is not None:
        sampling = WireSamplingParams(skip_reading_prefix_cache=request.pooling_params.skip_reading_prefix_cache)
        if refusal := _pooling_refusal(request.pooling_params, pooling_tasks, embedding_size):
            return refusal
    elif not generates:
        return f"this model does not generate: pooling_params must name a task, {', '.join(pooling_tasks)}"
    if sampling is None:
        return "sampling_params is missing"
    if not prompt:
        return "prompt_token_ids is empty"
    refusal = (
        _sampling_refusal(sampling)
        or _prompt_refusal(prompt, vocab_size, max_model_len)
        or _prompt_logprobs_refusal(sampling.prompt_logprobs, len(prompt), vocab_size)
        or _prompt_token_ids_refusal(sampling, len(prompt), vocab_size)
    )
    return refusal or (prompt, sampling)


def _pooling_refusal(pooling: WirePoolingParams, tasks: Sequence[str], embedding_size: int) -> str | None:
    if not tasks:
        return "pooling_params is not supported by this engine"
    if pooling.task not in tasks:
        return f"pooling parameter task={pooling.task!r} is not one of {', '.join(tasks)}"
    if pooling.dimensions is not None and pooling.task != "embed":
        return f"pooling parameter dimensions={pooling.dimensions} means nothing for the task {pooling.task!r}"
    if pooling.dimensions is not None and not 1 <= pooling.dimensions <= embedding_size:
        return f"pooling parameter dimensions={pooling.dimensions} is out of range: 1 to {embedding_size}"
    for field in ("step_tag_id", "returned_token_ids", "late_interaction_params", "late_chunking_params"):
        if getattr(pooling, field) is not None:
            return f"pooling parameter {field} is not supported by this engine"
    return None


def _sampling_refusal(sampling: WireSamplingParams) -> str | None:
    for field in _UNSUPPORTED_SAMPLING_FIELDS:
        if getattr(sampling, field) is not None:
            return f"sampling parameter {field} is not supported by this engine"
    if sampling.max_tokens is None:
        return "max_tokens is missing"
    for field, (smallest, largest) in _SAMPLING_RANGES.items():
        value = getattr(sampling, field)
        if value is not None and not smallest <= value <= largest:  # NaN included
            return f"{field}={value!r} is out of range"
    if sampling.min_tokens > sampling.max_tokens:
        return f"min_tokens={sampling.min_tokens} exceeds max_tokens={sampling.max_tokens}"
    return None


def _prompt_refusal(prompt: list[int], vocab_size: int, max_model_len: int) -> str | None:
    if len(prompt) >= max_model_len:
        return (
            f"prompt_token_ids has {len(prompt)} tokens, which leaves no room for an output token: "
            f"prompt and output together are limited to {max_model_len}"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        culprit = next(token for token in prompt if not 0 <= token < vocab_size)
        return f"prompt_token_ids contains {culprit}, which is outside the vocabulary of {vocab_size} tokens"
    return None


def _prompt_logprobs_refusal(k: int | None, num_prompt_tokens: int, vocab_size: int) -> str | None:
    if k is None:
        return None
    num_columns = 1 + (vocab_size if k == -1 else min(k, vocab_size))
    if 8 * num_columns * num_prompt_tokens > _MAX_PROMPT_LOGPROBS_BYTES:
        most = max(0, _MAX_PROMPT_LOGPROBS_BYTES // (8 * num_prompt_tokens) - 1)
        return f"prompt_logprobs={k} is too much for a prompt of {num_prompt_tokens} tokens: at most {most}"
    return None


def _prompt_token_ids_refusal(sampling: WireSamplingParams, num_prompt_tokens: int, vocab_size: int) -> str | None:
    name, ids, start = "prompt_logprob_token_ids", sampling.prompt_logprob_token_ids, sampling.prompt_logprob_start
    if ids is None:
        return None if start is None else f"prompt_logprob_start={start} has nothing to start: {name} is missing"
    if ids.dtype not in _INT_DTYPES or len(ids.shape) != 2 or not ids.shape[1]:
        return f"{name} is {ids.dtype} of shape {ids.shape}, and must be int32, [rows, ids per row]"
    num_rows = num_prompt_tokens - 1 - (start or 0)
    if ids.shape[0] != num_rows or not 0 <= (start or 0) < num_prompt_tokens:
        return (
            f"{name} has {ids.shape[0]} rows, and must have {num_rows}: one for each of the {num_prompt_tokens} tokens "
            f"of the prompt that has a next one, from prompt_logprob_start={start or 0} on"
        )
    values = ids.values()
    if values and not -1 <= min(values) <= max(values) < vocab_size:
        culprit = next(value for value in values if not -1 <= value < vocab_size)
        return f"{name} contains {culprit}, which is outside the vocabulary of {vocab_size} tokens (-1 pads)"
    return None
