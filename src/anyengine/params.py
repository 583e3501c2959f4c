"""What a user asks of a request: sampling, pooling, adapters, constraints on the output.

Owns names and defaults, and the checking of a whole record (an engine checks nothing: a bad value ends it). Everything
is refused here, by :class:`~anyengine.exceptions.RequestRejected`, before anything is sent. The rules themselves are
in ``_param_rules``, since they hold on the wire too. The records are frozen, and keep copies of what they are given.
Must not know the wire. Names and defaults are those of vLLM 0.33.0, but for ``output_kind`` and ``stop_regex``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from anyengine._param_rules import (
    BEAM_RULES,
    LATE_CHUNKING_RULES,
    LATE_INTERACTION_RULES,
    LORA_RULES,
    POOLING_RULES,
    REPETITION_RULES,
    SAMPLING_RULES,
    STRUCTURED_RULES,
    check_constraints,
    check_foreign,
    check_repetition,
    check_together,
)
from anyengine._pattern_rules import stop_patterns
from anyengine._rules import Rule, apply_rules, record, reject

__all__ = [
    "BeamSearchParams",
    "LateChunkingParams",
    "LateInteractionParams",
    "LoRARequest",
    "OutputKind",
    "PoolingParams",
    "RepetitionDetectionParams",
    "SamplingParams",
    "StructuredOutputsParams",
]

_LOWEST_TEMPERATURE: Final = 0.01
_MOST_BIAS: Final = 100.0


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
        apply_rules(self, STRUCTURED_RULES)
        check_constraints(self)


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True):
    """End a request that repeats a pattern of ``min_pattern_size`` to ``max_pattern_size`` tokens ``min_count`` times.

    Raises:
        RequestRejected: sizes or count out of range, or the smaller size above the larger.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        apply_rules(self, REPETITION_RULES)
        check_repetition(self)


class _SamplingParamsType(msgspec.StructMeta):
    """Of :class:`SamplingParams`: a name of another engine's is refused in words that help."""

    if not TYPE_CHECKING:  # a checker takes the parameters from the fields only where nothing stands before them

        def __call__(self, *args: Any, **values: Any) -> Any:
            check_foreign(values)
            return super().__call__(*args, **values)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_SamplingParamsType):
    """How to generate. Sequences are kept as tuples and mappings as copies: later changes by the caller have no effect.

    Normalised: a temperature between 0 and 0.01 becomes 0.01 (0 itself is greedy), ``seed=-1`` and
    ``thinking_token_budget=-1`` become ``None``, one stop string or pattern a tuple of one.

    Raises:
        RequestRejected: a value of the wrong type, out of range, or in contradiction to another; or a parameter of
            another engine's, such as ``best_of``, that has no meaning here.
        TypeError: a name that is nobody's.
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
    stop_regex: Sequence[str] = ()
    """Regular expressions of Python's ``re``, beside ``stop``: the output ends with the first character at which some
    part of its text, up to it, is matched as a whole, and the longest such part is the match. So ``a+`` ends it at the
    first ``a``. No pattern may match the empty text, or ask what follows (lookaheads, ``$``, ``\\b`` behind its
    beginning). ``stop_reason`` is the pattern. The engine knows nothing of it. Needs the package ``regex``."""
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """``None``: as many as the model's length leaves."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives for each generated token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""
    logprob_token_ids: Sequence[int] | None = None
    """Score these tokens at each position, instead of the likeliest ones."""
    prompt_logprob_start: int | None = None
    """Where in the prompt the rows of ``prompt_logprob_token_ids`` begin."""
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    """Which tokens to score at each scored position of the prompt: [num_prompt_tokens - 1 - start, k]; -1 pads."""
    flat_logprobs: bool = False
    """vLLM's name for the columnar form, which is always given here (:class:`FlatLogprobs`)."""
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
    """For engine extensions, such as ``kv_transfer_params``, and for logits processors that the engine has loaded."""
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
        for name in ("seed", "thinking_token_budget"):
            if getattr(self, name) == -1:
                msgspec.structs.force_setattr(self, name, None)
        check_together(self)
        if self.stop_regex and not self.detokenize:
            remedy = "use detokenize=True, or stop_token_ids"
            reject("stop_regex", self.stop_regex, "needs the text of the output", remedy)

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """Parameters of what a request in JSON may say: ``None`` stands for the default, the keys of ``logit_bias`` may
        be text, and its values are limited to -100 to 100, as in OpenAI's API.

        Raises:
            RequestRejected: keys of ``logit_bias`` that are no token ids, all of them; or see :class:`SamplingParams`.
        """
        given = {name: value for name, value in values.items() if value is not None}
        if isinstance(bias := given.get("logit_bias"), Mapping):
            if bad := [key for key in bias if not _is_token_id(key)]:
                reject("logit_bias", bad, "are no token ids", "use ints, or their digits as keys")
            given["logit_bias"] = {
                int(key): min(_MOST_BIAS, max(-_MOST_BIAS, value)) if isinstance(value, int | float) else value
                for key, value in bias.items()
            }
        return cls(**given)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to search with beams: ``beam_width`` answers are followed at once, token by token, up to ``max_tokens``.

    Answers are ranked by their log-probability over ``length ** length_penalty``, where the length is that of prompt
    and answer together, as in vLLM.

    Raises:
        RequestRejected: a value of the wrong type or out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    """Whether the end-of-sequence token is among an answer's tokens (never in its text)."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        apply_rules(self, BEAM_RULES)


def _is_token_id(key: Any) -> bool:
    return (isinstance(key, int) and not isinstance(key, bool)) or (
        isinstance(key, str) and key.isascii() and key.isdigit()
    )


def _output_kind(name: str, value: Any) -> OutputKind:
    if not isinstance(value, OutputKind):
        reject(name, value, "is unknown", f"use one of {', '.join(f'OutputKind.{kind.name}' for kind in OutputKind)}")
    return value


_SAMPLING_RULES: Final[dict[str, Rule]] = {
    **SAMPLING_RULES,
    "stop_regex": stop_patterns(),
    "output_kind": _output_kind,
    "structured_outputs": record(StructuredOutputsParams),
    "repetition_detection": record(RepetitionDetectionParams),
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
        apply_rules(self, LATE_INTERACTION_RULES)


class LateChunkingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Embed chunks of ``chunk_size`` tokens of one long input.

    Raises:
        RequestRejected: ``chunk_size`` is not a positive int.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        apply_rules(self, LATE_CHUNKING_RULES)


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
    **POOLING_RULES,
    "late_interaction_params": record(LateInteractionParams),
    "late_chunking_params": record(LateChunkingParams),
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
        apply_rules(self, LORA_RULES)
