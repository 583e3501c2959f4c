"""The parameters of a request in their wire form: sampling, pooling, adapter.

Owns what depends on the engine (its vocabulary, tasks, adapters) and what only the wire forms have; ranges and
contradictions are those of the public records (``anyengine._param_rules``). The values have the types of their
fields: they have been decoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from anyengine._param_rules import (
    LATE_CHUNKING_RULES,
    LATE_INTERACTION_RULES,
    LORA_RULES,
    POOLING_RULES,
    REPETITION_RULES,
    SAMPLING_RULES,
    STRUCTURED_RULES,
    check_bias,
    check_constraints,
    check_repetition,
    check_together,
)
from anyengine._rules import Rule, integer, reject
from anyengine._wire import (
    WireLoRARequest,
    WirePoolingParams,
    WireSamplingParams,
    WireStructuredOutputs,
)

from .features import check_token_matrix
from .limits import EngineLimits
from .prompt import check_in_vocabulary

__all__ = ["check_lora", "check_pooling", "check_sampling"]

GENERATION_TASKS: Final = frozenset(("generate", "transcription", "realtime"))
POOLING_TASKS: Final = frozenset(
    ("embed", "classify", "token_embed", "token_classify", "plugin", "embed&token_classify", "encode", "score")
)
"""Of any release; a name that an engine's does not know is an undecodable request."""
STRUCTURED_BACKENDS: Final = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
_MAX_LOGPROB_TOKEN_IDS: Final = 128  # vLLM's sampler has room for no more

_UNCHECKED: Final = ("extra_args", "extra_kwargs", "prompt_logprob_token_ids")  # they have no rule, or one of their own
_TOKEN_IDS: Final = (
    "stop_token_ids", "all_stop_token_ids", "allowed_token_ids", "logprob_token_ids", "trace_decode_token_ids",
    "logit_bias",
)  # fmt: skip


def _check_biases(name: str, value: dict[int, float]) -> None:
    for key, bias in value.items():
        check_bias(name, key, bias)


def _check_schema(name: str, value: Any) -> None:
    if isinstance(value, str):
        STRUCTURED_RULES["json"](name, value)


_ON_THE_WIRE: Final[dict[str, Rule]] = {  # nothing is kept of these values: the public rules would copy mappings
    "output_kind": integer(0, 2),
    "output_text_buffer_length": integer(0),
    "logit_bias": _check_biases,
    "json": _check_schema,
}


def _off_default(struct: type[msgspec.Struct], rules: dict[str, Rule]) -> list[tuple[str, Any, Rule]]:
    """Each field that has a rule, with the value that needs no look."""
    defaults = {info.name: info.default for info in msgspec.structs.fields(struct)}
    rules = rules | {name: rule for name, rule in _ON_THE_WIRE.items() if name in defaults}
    return [(name, defaults[name], rule) for name, rule in rules.items() if name in defaults and name not in _UNCHECKED]


_SAMPLING: Final = _off_default(WireSamplingParams, SAMPLING_RULES)
_STRUCTURED: Final = _off_default(WireStructuredOutputs, STRUCTURED_RULES)
_POOLING: Final = _off_default(WirePoolingParams, POOLING_RULES)
_LORA: Final = [(name, msgspec.NODEFAULT, rule) for name, rule in LORA_RULES.items()]


def _apply(record: Any, checks: Iterable[tuple[str, Any, Rule]], prefix: str) -> None:
    for name, default, rule in checks:
        value = getattr(record, name)
        if value is not default and value != default:
            rule(prefix + name, value)


def check_sampling(params: WireSamplingParams, limits: EngineLimits, num_prompt_tokens: int) -> None:
    """Check sampling parameters.

    Raises:
        RequestRejected: a rule is broken.
    """
    prefix = "sampling_params."
    if limits.tasks is not None and not limits.tasks & GENERATION_TASKS:
        tasks = ", ".join(sorted(limits.tasks))
        reject("sampling_params", "generation", "is nothing that this engine's model does", f"it can do: {tasks}")
    _apply(params, _SAMPLING, prefix)
    if params.max_tokens is None:
        remedy = f"use an int, at most {limits.max_model_len - num_prompt_tokens}"
        reject(f"{prefix}max_tokens", None, "is for the client to resolve: an engine has no default", remedy)
    check_together(params, prefix)
    if params.repetition_detection is not None:
        inner = f"{prefix}repetition_detection."
        for name, rule in REPETITION_RULES.items():
            rule(inner + name, getattr(params.repetition_detection, name))
        check_repetition(params.repetition_detection, inner)
    if params.structured_outputs is not None:
        _check_structured(params.structured_outputs, prefix)
    _check_vocabulary(params, limits.vocab_size, prefix)
    if params.prompt_logprob_token_ids is not None:
        name = f"{prefix}prompt_logprob_token_ids"
        check_token_matrix(params.prompt_logprob_token_ids, limits, num_prompt_tokens, parameter=name)


def _check_vocabulary(params: WireSamplingParams, vocab_size: int | None, prefix: str) -> None:
    """Ids that the engine uses as indices, and counts of alternatives, without a look at them."""
    for name in _TOKEN_IDS:
        if ids := getattr(params, name):
            check_in_vocabulary(ids, vocab_size, parameter=prefix + name)
    if params.eos_token_id is not None:
        check_in_vocabulary((params.eos_token_id,), vocab_size, parameter=f"{prefix}eos_token_id")
    for word in params.bad_words_token_ids or ():
        if not word:
            remedy = "leave out words of no tokens"
            reject(f"{prefix}bad_words_token_ids", params.bad_words_token_ids, "has a word of no tokens", remedy)
        check_in_vocabulary(word, vocab_size, parameter=f"{prefix}bad_words_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and vocab_size is not None and count > vocab_size:
            reject(prefix + name, count, f"exceeds the vocabulary of {vocab_size}", "use -1 for all of it")
    chosen = params.logprob_token_ids
    if chosen is not None and len(chosen) > _MAX_LOGPROB_TOKEN_IDS:
        problem = f"has {len(chosen)} entries"
        reject(f"{prefix}logprob_token_ids", chosen, problem, f"use at most {_MAX_LOGPROB_TOKEN_IDS}")


def _check_structured(params: WireStructuredOutputs, prefix: str) -> None:
    inner = f"{prefix}structured_outputs."
    _apply(params, _STRUCTURED, inner)
    check_constraints(params, prefix)
    if params.backend not in STRUCTURED_BACKENDS:
        remedy = f"use one of {', '.join(STRUCTURED_BACKENDS)}; an engine stays with the first that it is asked for"
        reject(f"{inner}backend", params.backend, "is nothing that turns a constraint into a mask", remedy)


def check_pooling(params: WirePoolingParams, limits: EngineLimits) -> None:
    """Check pooling parameters.

    Raises:
        RequestRejected: a rule is broken, or the engine's model has no such task.
    """
    prefix = "pooling_params."
    possible = POOLING_TASKS if limits.tasks is None else POOLING_TASKS & limits.tasks
    if params.task not in possible:
        known = ", ".join(sorted(possible)) or "nothing of the kind: it generates text"
        reject(f"{prefix}task", params.task, "is nothing that this engine's model does", f"it can do {known}")
    _apply(params, _POOLING, prefix)
    if params.output_kind != 2:
        reject(f"{prefix}output_kind", params.output_kind, "is impossible: there is one output", "use 2 (final only)")
    for name, rules in (
        ("late_interaction_params", LATE_INTERACTION_RULES),
        ("late_chunking_params", LATE_CHUNKING_RULES),
    ):
        if (late := getattr(params, name)) is not None:
            for field, rule in rules.items():
                rule(f"{prefix}{name}.{field}", getattr(late, field))
    if params.returned_token_ids:
        check_in_vocabulary(params.returned_token_ids, limits.vocab_size, parameter=f"{prefix}returned_token_ids")


def check_lora(request: WireLoRARequest, limits: EngineLimits, adapters: Mapping[int, str]) -> None:
    """Check the adapter of a request: the engine must have it. Loading one for a request, an engine dies of a bad path.

    Raises:
        RequestRejected: it has not, or has not been started with LoRA (and would answer with the base model).
    """
    prefix = "lora_request."
    _apply(request, _LORA, prefix)
    if limits.lora is False:
        remedy = "start the engine with LoRA (vLLM: enable_lora=True), or leave lora_request out"
        reject("lora_request", request.lora_name, "is an adapter, and the engine was started without LoRA", remedy)
    if limits.lora is None:
        return
    if request.load_inplace:
        remedy = "call add_lora with load_inplace=True first, then send requests without it"
        reject(f"{prefix}load_inplace", True, "would load the adapter for this request", remedy)
    loaded = adapters.get(request.lora_int_id)
    if loaded != request.lora_path:
        what = "is not loaded" if loaded is None else f"is loaded from {loaded!r}, under the same id"
        remedy = "call add_lora and await it first: of an adapter that cannot be loaded for a request, an engine dies"
        reject(f"{prefix}lora_path", request.lora_path, what, remedy)
