"""The rules of a request's parameters, one table for each record: names, ranges, contradictions.

Owns what is allowed, for the public records (``anyengine.params``) and for their wire forms alike: an engine checks
nothing, and a bad value ends it. Must not know either kind of record, but for the names of their fields. Ranges are
those of vLLM 0.32.0 ``sampling_params.py`` (__post_init__, verify) and its like.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from anyengine._environment import MAX_N_SEQUENCES, MAX_NUM_BAD_WORDS
from anyengine._rules import (
    INT64_MAX,
    INT64_MIN,
    UINT64_MAX,
    Rule,
    a_type,
    flag,
    integer,
    integers,
    mapping,
    nested_integers,
    number,
    reject,
    strings,
    text,
)

__all__ = [
    "BEAM_RULES",
    "LATE_CHUNKING_RULES",
    "LATE_INTERACTION_RULES",
    "LORA_RULES",
    "POOLING_RULES",
    "REPETITION_RULES",
    "SAMPLING_RULES",
    "STRUCTURED_RULES",
    "check_bias",
    "check_constraints",
    "check_foreign",
    "check_repetition",
    "check_together",
]

_MAX_N: Final = MAX_N_SEQUENCES.value()
_MAX_BAD_WORDS: Final = MAX_NUM_BAD_WORDS.value()


def check_bias(name: str, key: Any, value: Any) -> None:
    """Refuse an entry of a logit bias that is none.

    Raises:
        RequestRejected: ``key`` is no token id, or ``value`` not finite.
    """
    integer(0)(f"{name} key", key)
    number()(f"{name}[{key!r}]", value)


def _check_extra(name: str, key: Any, value: Any) -> None:
    if not isinstance(key, str):
        reject(f"{name} key", key, f"is {a_type(key)}", "use str keys")
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


SAMPLING_RULES: Final[dict[str, Rule]] = {
    "n": integer(1, _MAX_N),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(above=0),
    "temperature": number(0, 2),
    "top_p": number(high=1, above=0),
    "top_k": integer(-1),
    "min_p": number(0, 1),
    "seed": integer(high=INT64_MAX, optional=True),
    "stop": strings(),
    "stop_token_ids": integers(),
    "bad_words": strings(most=_MAX_BAD_WORDS),
    "ignore_eos": flag(),
    "max_tokens": integer(1, optional=True),
    "min_tokens": integer(0),
    "logprobs": integer(-1, optional=True),
    "prompt_logprobs": integer(-1, optional=True),
    "logprob_token_ids": integers(optional=True, empty=False),
    "prompt_logprob_start": integer(0, optional=True),
    "prompt_logprob_token_ids": nested_integers(-1, 2**31 - 1),
    "flat_logprobs": flag(),
    "detokenize": flag(),
    "skip_special_tokens": flag(),
    "spaces_between_special_tokens": flag(),
    "include_stop_str_in_output": flag(),
    "stream_interval": integer(1, optional=True),
    "logit_bias": mapping(check_bias),
    "allowed_token_ids": integers(optional=True, empty=False),
    "extra_args": mapping(_check_extra),
    "skip_reading_prefix_cache": flag(optional=True),
    "thinking_token_budget": integer(-1, optional=True),
    "routed_experts_prompt_start": integer(0),
    "trace_decode_token_ids": integers(optional=True),
    "watermarking": flag(optional=True),
}


_FOREIGN: Final = {
    "best_of": "use n and take the answer with the best cumulative_logprob (logprobs=0), or EngineClient.beam_search()",
    "top_p_decay": "use a fixed top_p, or min_p, which follows each distribution",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty; or repetition_detection, which ends it",
    "early_stopping": "use EngineClient.beam_search(), whose BeamSearchParams have max_tokens to end a search",
}


def check_foreign(values: Mapping[str, Any]) -> None:
    """Refuse sampling parameters of other engines that have no meaning here: ignored, they would be missed.

    Raises:
        RequestRejected: there is one, whatever its value.
    """
    for name, remedy in _FOREIGN.items():
        if name in values:
            reject(name, values[name], "is a parameter of other engines", remedy)


def check_together(params: Any, prefix: str = "") -> None:
    """Refuse sampling parameters, public or on the wire, that contradict each other.

    Raises:
        RequestRejected: they do.
    """
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        remedy = f"use at most max_tokens={params.max_tokens}"
        reject(f"{prefix}min_tokens", params.min_tokens, "exceeds max_tokens", remedy)
    if params.n > 1 and params.temperature == 0:
        remedy = "use n=1 or a temperature above 0"
        reject(f"{prefix}n", params.n, "asks for copies of one answer at temperature 0", remedy)
    if params.stop and not params.detokenize:
        remedy = "use detokenize=True, or stop_token_ids"
        reject(f"{prefix}stop", params.stop, "needs the text of the output", remedy)
    _check_log_probs(params, prefix)


def _check_log_probs(params: Any, prefix: str) -> None:
    if (ids := params.logprob_token_ids) is not None and params.logprobs not in (None, len(ids)):
        remedy = f"use logprobs={len(ids)}, or None"
        reject(f"{prefix}logprobs", params.logprobs, "is not the number of logprob_token_ids", remedy)
    if params.prompt_logprob_token_ids is None and params.prompt_logprob_start is not None:
        remedy = "give prompt_logprob_token_ids too, or leave it out"
        reject(f"{prefix}prompt_logprob_start", params.prompt_logprob_start, "has nothing to start", remedy)


def check_constraints(params: Any, prefix: str = "") -> None:
    """Refuse structured-output parameters, public or on the wire, that give none or several of the constraints.

    Raises:
        RequestRejected: they do.
    """
    given = [name for name in _CONSTRAINTS if getattr(params, name) is not None]
    if len(given) != 1:
        found = ", ".join(given) or None
        remedy = f"give exactly one of {', '.join(_CONSTRAINTS)}"
        reject(f"{prefix}structured_outputs", found, "does not say what to do", remedy)


def _document(name: str, value: Any) -> Any:
    if value is not None and not text()(name, value).strip():
        reject(name, value, "is blank", "use a str with something in it, or None")
    return value


def _json_schema(name: str, value: Any) -> Any:
    return _document(name, value) if isinstance(value, str) else mapping()(name, value)


def _regex(name: str, value: Any) -> Any:
    if value is not None and "\0" in text(empty=False)(name, value):
        reject(name, value, "has a NUL in it", "use a pattern without it")
    return value


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
STRUCTURED_RULES: Final[dict[str, Rule]] = {
    "json": _json_schema,
    "regex": _regex,
    "choice": _choices,
    "grammar": _document,
    "json_object": _true_or_none,
    "structural_tag": _document,
    "disable_any_whitespace": flag(),
    "disable_additional_properties": flag(),
    "whitespace_pattern": text(optional=True),
}


def check_repetition(params: Any, prefix: str = "") -> None:
    """Refuse sizes and counts, public or on the wire, that contradict each other.

    Raises:
        RequestRejected: they do.
    """
    if params.min_pattern_size > params.max_pattern_size:
        remedy = f"use at most max_pattern_size={params.max_pattern_size}"
        reject(f"{prefix}min_pattern_size", params.min_pattern_size, "exceeds max_pattern_size", remedy)
    if params.max_pattern_size and params.min_count < 2:
        reject(f"{prefix}min_count", params.min_count, "is no repetition", "use an int of at least 2")


REPETITION_RULES: Final[dict[str, Rule]] = {
    "max_pattern_size": integer(0),
    "min_pattern_size": integer(0),
    "min_count": integer(0),
}


BEAM_RULES: Final[dict[str, Rule]] = {
    "beam_width": integer(1, _MAX_N),
    "max_tokens": integer(1),
    "ignore_eos": flag(),
    "temperature": number(0, 2),
    "length_penalty": number(),
    "include_stop_str_in_output": flag(),
    "skip_special_tokens": flag(),
}


POOLING_RULES: Final[dict[str, Rule]] = {
    "task": text(optional=True, empty=False),
    "dimensions": integer(1, optional=True),
    "use_activation": flag(optional=True),
    "step_tag_id": integer(0, optional=True),
    "returned_token_ids": integers(optional=True),
    "requires_token_ids": flag(),
    "skip_reading_prefix_cache": flag(optional=True),
    "extra_kwargs": mapping(_check_extra),
}


LATE_INTERACTION_RULES: Final[dict[str, Rule]] = {
    "mode": text(empty=False),
    "query_key": text(empty=False),
    "query_uses": integer(1, optional=True),
}
LATE_CHUNKING_RULES: Final[dict[str, Rule]] = {"chunk_size": integer(1)}


LORA_RULES: Final[dict[str, Rule]] = {
    "lora_name": text(empty=False),
    "lora_int_id": integer(1),
    "lora_path": text(empty=False),
    "base_model_name": text(optional=True),
    "load_inplace": flag(),
    "is_3d_lora_weight": flag(),
}
