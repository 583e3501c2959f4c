"""From what a user asks to what an engine is told.

Owns the translation of the public parameter records into their wire structs; what concerns the output side only (stop
strings, detokenizing, kind and interval of items) stays on this side, ``n`` is fanned out by the client. Must not know
ranges: ``anyengine.params`` has checked them.
Mirrors vLLM 0.32.0 ``sampling_params.py`` (__post_init__, update_from_generation_config).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from anyengine.params import (
    LoRARequest,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

from .requests import (
    WireLateChunkingParams,
    WireLateInteractionParams,
    WireLoRARequest,
    WirePoolingParams,
    WireRepetitionDetection,
    WireSamplingParams,
    WireStructuredOutputs,
)
from .tensors import Tensor

__all__ = ["lora_to_wire", "pooling_to_wire", "sampling_to_wire"]

_ALIKE: Final = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "watermarking", "seed", "ignore_eos",
    "min_tokens", "logprobs", "prompt_logprobs", "prompt_logprob_start", "logprob_token_ids", "logit_bias",
    "allowed_token_ids", "extra_args", "skip_reading_prefix_cache", "thinking_token_budget",
    "routed_experts_prompt_start", "trace_decode_token_ids",
)  # fmt: skip
_ALIKE_UNLESS_GREEDY: Final = ("top_p", "top_k", "min_p")
_DEFAULTS: Final = {info.name: info.default for info in msgspec.structs.fields(WireSamplingParams)}


def sampling_to_wire(
    params: SamplingParams,
    *,
    eos_token_id: int | None,
    extra_stop_token_ids: Sequence[int] = (),
    max_tokens: int,
    seed: int | None = None,
    bad_words_token_ids: Sequence[Sequence[int]] = (),
    structured_outputs_backend: str = "xgrammar",
) -> WireSamplingParams:
    """The wire form of ``params`` for one answer (``n=1``); only what is off vLLM's defaults gets written.

    ``extra_stop_token_ids`` are the generation config's further end-of-sequence ids. ``max_tokens`` is the resolved
    limit, and ``seed``, if given, replaces the one in ``params`` (answers of one request differ in it).
    ``bad_words_token_ids`` are the tokenized ``bad_words``: the engine does not tokenize.
    """
    names = _ALIKE if params.greedy else _ALIKE + _ALIKE_UNLESS_GREEDY
    values = {name: _plain(value) for name in names if (value := getattr(params, name)) != _DEFAULTS[name]}
    further = sorted(set(extra_stop_token_ids) - {eos_token_id, *params.stop_token_ids})
    wire = WireSamplingParams(**values, max_tokens=max_tokens)
    if seed is not None:
        wire.seed = seed
    if stop_token_ids := [*params.stop_token_ids, *(() if params.ignore_eos else further)]:
        wire.stop_token_ids = stop_token_ids
    # With ignore_eos too: min_tokens and grammars must know every id that could end the text.
    wire.all_stop_token_ids = {*params.stop_token_ids, *further, *(() if eos_token_id is None else (eos_token_id,))}
    if not params.ignore_eos:
        wire.eos_token_id = eos_token_id
    scores_prompt = params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None
    if scores_prompt and params.skip_reading_prefix_cache is None:
        wire.skip_reading_prefix_cache = True  # cached prompt tokens would have no log-probabilities
    if bad_words_token_ids:
        wire.bad_words_token_ids = [list(word) for word in bad_words_token_ids]
    if params.prompt_logprob_token_ids is not None:
        wire.prompt_logprob_token_ids = _int32_matrix(params.prompt_logprob_token_ids)
    if params.structured_outputs is not None:
        wire.structured_outputs = _structured_to_wire(params.structured_outputs, structured_outputs_backend)
    if params.repetition_detection is not None:
        wire.repetition_detection = _repetition_to_wire(params.repetition_detection)
    return wire


def pooling_to_wire(params: PoolingParams) -> WirePoolingParams:
    """The wire form of ``params``. ``use_activation`` stays unset unless the user chose: the model decides."""
    late, chunking = params.late_interaction_params, params.late_chunking_params
    return WirePoolingParams(
        use_activation=params.use_activation,
        dimensions=params.dimensions,
        step_tag_id=params.step_tag_id,
        returned_token_ids=_plain(params.returned_token_ids),
        task=params.task,
        requires_token_ids=params.requires_token_ids,
        skip_reading_prefix_cache=params.skip_reading_prefix_cache,
        late_interaction_params=None
        if late is None
        else WireLateInteractionParams(late.mode, late.query_key, late.query_uses),
        extra_kwargs=_plain(params.extra_kwargs),
        late_chunking_params=None if chunking is None else WireLateChunkingParams(chunking.chunk_size),
    )


def lora_to_wire(request: LoRARequest) -> WireLoRARequest:
    """The wire form of ``request``."""
    return WireLoRARequest(**msgspec.structs.asdict(request))


def _plain(value: Any) -> Any:
    """Tuples as the lists that wire structs are typed with."""
    return list(value) if isinstance(value, tuple) else value


def _int32_matrix(rows: Sequence[Sequence[int]]) -> Tensor:
    flat = array("i", [item for row in rows for item in row])
    return Tensor("<i4", (len(rows), len(rows[0]) if rows else 0), flat.tobytes())


def _structured_to_wire(params: StructuredOutputsParams, backend: str) -> WireStructuredOutputs:
    fields = {name: _plain(value) for name, value in msgspec.structs.asdict(params).items()}
    return WireStructuredOutputs(**fields, backend=backend)


def _repetition_to_wire(params: RepetitionDetectionParams) -> WireRepetitionDetection:
    return WireRepetitionDetection(**msgspec.structs.asdict(params))
