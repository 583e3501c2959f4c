"""What a user asks of a request: sampling, pooling, adapters, constraints on the output.

Owns names, defaults, ranges and contradictions (an engine checks nothing: a bad value ends it). Everything is refused
here, by :class:`~anyengine.exceptions.RequestRejected`, before anything is sent. The records are frozen, and keep
copies of what they are given. Must not know the wire. Names and defaults are those of vLLM 0.33.0, but for
``output_kind``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from anyengine._environment import MAX_N_SEQUENCES, MAX_NUM_BAD_WORDS
from anyengine._rules import (
    INT64_MIN,
    UINT64_MAX,
    Rule,
    apply_rules,
    flag,
    integer,
    integers,
    mapping,
    nested_integers,
    number,
    record,
    reject,
    strings,
    text,
)

__all__ = [
    "LateChunkingParams",
    "LateInteractionParams",
    "LoRARequest",
    "OutputKind",
    "PoolingParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
]

MAX_N: Final = MAX_N_SEQUENCES.value()
MAX_BAD_WORDS: Final = MAX_NUM_BAD_WORDS.value()
_LOWEST_TEMPERATURE: Final = 0.01


class OutputKind(IntEnum):
    """What each item of a request stream holds: everything so far, what is new, or everything at the end only."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: exactly one of the first six.

    Raises:
        RequestRejected: none or several are given, or one has a wrong type.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as a dict."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        apply_rules(self, _STRUCTURED_RULES)
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            found = ", ".join(given) or None
            remedy = f"give exactly one of {', '.join(_CONSTRAINTS)}"
            reject("structured_outputs", found, "does not say what to do", remedy)


def _json_schema(name: str, value: Any) -> Any:
    return value if isinstance(value, str) else mapping()(name, value)


def _choices(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, str) or not (kept := strings()(name, value)):
        reject(name, value, "gives nothing to choose from", "use a sequence of at least one str")
    return kept


def _true_or_none(name: str, value: Any) -> Any:
    if value is not None and value is not True:
        reject(name, value, "asks for nothing", "use True, or None for another constraint")
    return value


_CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_STRUCTURED_RULES: Final[dict[str, Rule]] = {
    "json": _json_schema,
    "regex": text(optional=True, empty=False),
    "choice": _choices,
    "grammar": text(optional=True, empty=False),
    "json_object": _true_or_none,
    "structural_tag": text(optional=True, empty=False),
    "disable_any_whitespace": flag(),
    "disable_additional_properties": flag(),
    "whitespace_pattern": text(optional=True),
}


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """End a request that repeats a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens ``min_count`` times.

    Raises:
        RequestRejected: sizes or count out of range, or the smaller size above the larger.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        apply_rules(self, _REPETITION_RULES)
        if self.min_pattern_size > self.max_pattern_size:
            remedy = f"use at most max_pattern_size={self.max_pattern_size}"
            reject("min_pattern_size", self.min_pattern_size, "exceeds max_pattern_size", remedy)
        if self.max_pattern_size and self.min_count < 2:
            reject("min_count", self.min_count, "is no repetition", "use an int of at least 2")


_REPETITION_RULES: Final[dict[str, Rule]] = {
    "max_pattern_size": integer(0),
    "min_pattern_size": integer(0),
    "min_count": integer(0),
}


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate. Sequences are kept as tuples and mappings as copies: later changes by the caller have no effect.

    Normalised: a temperature between 0 and 0.01 becomes 0.01 (0 itself is greedy), ``seed=-1`` becomes ``None``, one
    stop string a tuple of one.

    Raises:
        RequestRejected: a value of the wrong type, out of range, or in contradiction to another.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """``None``: as many as the model's length leaves."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives for each generated token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None  # [num_prompt_tokens, k]; -1 pads
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.DELTA
    stream_interval: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    """For engine extensions, such as ``kv_transfer_params``."""
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        apply_rules(self, _SAMPLING_RULES)
        if 0 < self.temperature < _LOWEST_TEMPERATURE:
            msgspec.structs.force_setattr(self, "temperature", _LOWEST_TEMPERATURE)
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        self._check_contradictions()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reject("min_tokens", self.min_tokens, "exceeds max_tokens", f"use at most max_tokens={self.max_tokens}")
        if self.n > 1 and self.greedy:
            reject("n", self.n, "asks for copies of one answer at temperature 0", "use n=1 or a temperature above 0")
        if self.stop and not self.detokenize:
            reject("stop", self.stop, "needs the text of the output", "use detokenize=True, or stop_token_ids")


def _output_kind(name: str, value: Any) -> OutputKind:
    if not isinstance(value, OutputKind):
        reject(name, value, "is unknown", f"use one of {', '.join(f'OutputKind.{kind.name}' for kind in OutputKind)}")
    return value


def _check_bias(name: str, key: Any, value: Any) -> None:
    integer(0)(f"{name} key", key)
    number()(f"{name}[{key!r}]", value)


def _check_extra(name: str, key: Any, value: Any) -> None:
    if not isinstance(key, str):
        reject(f"{name} key", key, f"is a {type(key).__name__}", "use str keys")
    _check_int_sizes(f"{name}[{key!r}]", value)


def _check_int_sizes(name: str, value: Any) -> None:
    if isinstance(value, int) and not INT64_MIN <= value <= UINT64_MAX:
        reject(name, value, "does not fit on the wire", "use ints of at most 64 bits, or a str")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_int_sizes(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_int_sizes(f"{name}[{index}]", item)


_SAMPLING_RULES: Final[dict[str, Rule]] = {
    "n": integer(1, MAX_N),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(above=0),
    "temperature": number(0, 2),
    "top_p": number(high=1, above=0),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "seed": integer(optional=True),
    "stop": strings(),
    "stop_token_ids": integers(),
    "bad_words": strings(most=MAX_BAD_WORDS),
    "ignore_eos": flag(),
    "max_tokens": integer(1, optional=True),
    "min_tokens": integer(0),
    "logprobs": integer(-1, optional=True),
    "prompt_logprobs": integer(-1, optional=True),
    "logprob_token_ids": integers(optional=True),
    "prompt_logprob_start": integer(0, optional=True),
    "prompt_logprob_token_ids": nested_integers(-1, 2**31 - 1),
    "flat_logprobs": flag(),
    "detokenize": flag(),
    "skip_special_tokens": flag(),
    "spaces_between_special_tokens": flag(),
    "include_stop_str_in_output": flag(),
    "output_kind": _output_kind,
    "stream_interval": integer(1, optional=True),
    "structured_outputs": record(StructuredOutputsParams),
    "logit_bias": mapping(_check_bias),
    "allowed_token_ids": integers(optional=True, empty=False),
    "extra_args": mapping(_check_extra),
    "skip_reading_prefix_cache": flag(optional=True),
    "thinking_token_budget": integer(-1, optional=True),
    "repetition_detection": record(RepetitionDetectionParams),
    "routed_experts_prompt_start": integer(0),
    "trace_decode_token_ids": integers(optional=True),
    "watermarking": flag(optional=True),
}


class LateInteractionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Scoring by late interaction: the engine caches a query under ``query_key`` for ``query_uses`` documents.

    Raises:
        RequestRejected: a value of the wrong type or out of range.
    """

    mode: str
    query_key: str
    query_uses: int | None = None

    def __post_init__(self) -> None:
        apply_rules(
            self, {"mode": text(empty=False), "query_key": text(empty=False), "query_uses": integer(1, optional=True)}
        )


class LateChunkingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Embed chunks of ``chunk_size`` tokens of one long input.

    Raises:
        RequestRejected: ``chunk_size`` is not a positive int.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        apply_rules(self, {"chunk_size": integer(1)})


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute from the hidden states instead of generating.

    Raises:
        RequestRejected: a value of the wrong type or out of range.
    """

    task: str | None = None
    """``"embed"``, ``"classify"``, ...: one of what the engine says it supports."""
    dimensions: int | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: LateInteractionParams | None = None
    late_chunking_params: LateChunkingParams | None = None
    extra_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        apply_rules(self, _POOLING_RULES)


_POOLING_RULES: Final[dict[str, Rule]] = {
    "task": text(optional=True, empty=False),
    "dimensions": integer(1, optional=True),
    "use_activation": flag(optional=True),
    "step_tag_id": integer(0, optional=True),
    "returned_token_ids": integers(optional=True),
    "requires_token_ids": flag(),
    "skip_reading_prefix_cache": flag(optional=True),
    "late_interaction_params": record(LateInteractionParams),
    "late_chunking_params": record(LateChunkingParams),
    "extra_kwargs": mapping(_check_extra),
}


class LoRARequest(msgspec.Struct, frozen=True):
    """A LoRA adapter to apply. Takes its first three fields by position too, as vLLM's does.

    Raises:
        RequestRejected: an id below 1, an empty name or path, or a value of the wrong type.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        apply_rules(self, _LORA_RULES)


_LORA_RULES: Final[dict[str, Rule]] = {
    "lora_name": text(empty=False),
    "lora_int_id": integer(1),
    "lora_path": text(empty=False),
    "base_model_name": text(optional=True),
    "load_inplace": flag(),
    "is_3d_lora_weight": flag(),
}
