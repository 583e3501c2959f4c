"""What a request carries beside its prompt and its parameters.

Owns the names, types and checks of these fields, shared by everything that makes a request. They are vLLM's names
(``AsyncLLM.generate``), save for ``tenant``; each goes on the wire as it is, if nothing else is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn, TypedDict

from anyengine._protocol import EngineLimits
from anyengine._rules import INT64_MIN, Rule, a_type, flag, integer, mapping, record, reject, text
from anyengine._wire import KvHintsEnvelope, MultiModalFeatureSpec
from anyengine.exceptions import RequestRejected
from anyengine.params import LoRARequest

__all__ = [
    "GenerateOptions",
    "GroupOptions",
    "RequestFields",
    "check_features",
    "check_field_names",
    "check_fields",
    "check_multimodal",
    "tenant_of",
]


class RequestFields(TypedDict, total=False):
    """The keyword arguments of ``generate``, ``submit`` and ``encode``."""

    priority: int
    """Lower runs first; of no effect unless the engine schedules by priority."""
    data_parallel_rank: int | None
    """The rank that shall run it; by default the one whose turn it is."""
    lora_request: LoRARequest | str | None
    """The adapter to use, or the name of one that has been loaded. The first request with it waits until the engine has
    loaded it."""
    cache_salt: str | None
    """Cached prefixes are shared only between requests with the same one."""
    trace_headers: Mapping[str, str] | None
    """``traceparent`` and its like, for the engine's spans. By default those of the OpenTelemetry span that the calling
    task is in, if it is in one; ``None``: none."""
    session_id: str | None
    mm_features: Sequence[MultiModalFeatureSpec] | None
    """Images, sounds, ... as a processor of the engine's release made them, in the order of their positions."""
    reasoning_ended: bool | None
    """Whether a structured output applies from the first token on, for models that reason first."""
    reasoning_parser_kwargs: Mapping[str, Any] | None
    kv_hints: KvHintsEnvelope | None
    """For the engine's KV-cache connector."""
    prompt_text: str | None
    """The text behind a prompt of token ids: its outputs tell it as ``prompt``. Not sent."""
    tenant: str | None
    """Whose quota it uses, for the client's ``limiter``. Not sent."""
    tokenization_kwargs: Mapping[str, Any] | None
    """``truncate_prompt_tokens`` (-1: to what the model's length allows), ``truncation_side``,
    ``add_special_tokens``."""


class GenerateOptions(RequestFields, total=False):
    """All keyword arguments of ``generate``, for what passes them on to it."""

    request_id: str | None
    timeout_s: float | None
    first_token_timeout_s: float | None
    inter_token_timeout_s: float | None
    nowait: bool


class GroupOptions(RequestFields, total=False):
    """The keyword arguments of ``generate_many``, but for ``on_error``, which decides what it gives."""

    ordered: bool
    concurrency: int | None
    request_id: str | None
    timeout_s: float | None
    first_token_timeout_s: float | None
    inter_token_timeout_s: float | None


def _check_header(name: str, key: Any, value: Any) -> None:
    if not isinstance(key, str) or not isinstance(value, str):
        reject(f"{name}[{key!r}]", value, "is no header", "use str for names and values")


def _check_keyword(name: str, key: Any, _value: Any) -> None:
    if not isinstance(key, str):
        reject(f"{name} key", key, f"is {a_type(key)}", "use str keys")


def check_features(name: str, value: Any) -> list[MultiModalFeatureSpec] | None:
    """A list of its own; ``None`` if there are none.

    Raises:
        RequestRejected: something else is in it.
    """
    if value is None:
        return None
    remedy = "use a sequence of MultiModalFeatureSpec"
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        reject(name, value, f"is {a_type(value)}", remedy)
    for feature in value:
        if not isinstance(feature, MultiModalFeatureSpec):
            reject(name, value, f"has a {type(feature).__name__} in it", remedy)
    return list(value) or None


_RULES: Final[dict[str, Rule]] = {
    "priority": integer(INT64_MIN, 2**63 - 1),
    "data_parallel_rank": integer(0, 0xFFFF, optional=True),
    "lora_request": record(LoRARequest),
    "cache_salt": text(optional=True, empty=False),
    "trace_headers": mapping(_check_header),
    "session_id": text(optional=True, empty=False),
    "mm_features": check_features,
    "reasoning_ended": flag(optional=True),
    "reasoning_parser_kwargs": mapping(_check_keyword),
    "kv_hints": record(KvHintsEnvelope),
    "prompt_text": text(optional=True),
    "tenant": text(optional=True, empty=False),
    "tokenization_kwargs": mapping(),  # what is in it has been used by now
}


def check_field_names(function: str, fields: RequestFields) -> None:
    """Refuse an argument that there is not, as Python itself would.

    Raises:
        TypeError: there is one.
    """
    for name in fields.keys() - _RULES.keys():
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def tenant_of(fields: RequestFields) -> str | None:
    """Whose request it is.

    Raises:
        RequestRejected: it is no name.
    """
    tenant: str | None = _RULES["tenant"]("tenant", fields.get("tenant"))
    return tenant


def check_fields(fields: RequestFields, limits: EngineLimits, *, multimodal: bool | None) -> dict[str, Any]:
    """Private copies of ``fields``; those that are ``None`` are left out.

    ``multimodal`` says whether the model takes more than text; ``None``: nobody knows.

    Raises:
        RequestRejected: a wrong type or value, or something that the engine cannot do and would not say so.
    """
    given: Mapping[str, Any] = fields
    checked = {name: kept for name, value in given.items() if (kept := _RULES[name](name, value)) is not None}
    if checked.get("lora_request") is not None and limits.lora is False:
        problem = "LoRA is not enabled in the engine, which would use the base model"
        _refuse("lora_request", fields, problem, limits.enabled_by("enable_lora=True"))
    if checked.get("priority") and limits.priorities is False:
        problem = "the engine schedules first come, first served"
        _refuse("priority", fields, problem, limits.enabled_by("scheduling_policy='priority'"))
    if "mm_features" in checked:
        check_multimodal("mm_features", checked["mm_features"], multimodal)
    return checked


def check_multimodal(name: str, value: object, multimodal: bool | None) -> None:
    """Refuse ``value`` where the model takes text alone, or nobody knows.

    Raises:
        RequestRejected: it does.
    """
    if not multimodal:
        # A vLLM engine with a model of text alone never schedules such a request, nor anything behind it.
        problem = "the model takes text alone" if multimodal is False else "nothing is known of the model"
        remedy = "use a multimodal model; or describe the engine with a model_dir, whose config.json says what it is"
        raise RequestRejected(f"{name}: {problem}", parameter=name, value=value, remedy=remedy)


def _refuse(name: str, fields: RequestFields, problem: str, way: str) -> NoReturn:
    value, remedy = fields.get(name), f"leave it out, or {way}"
    raise RequestRejected(f"{name}={value!r:.200}: {problem}", parameter=name, value=value, remedy=remedy)
