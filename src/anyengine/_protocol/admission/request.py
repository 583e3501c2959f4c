"""A whole request, judged by what the engine would read of it.

Owns the order of the checks, and the translation of a wrong type somewhere into a parameter with a name. The rules
themselves are in the modules beside. vLLM's input thread decodes without a safety net: bytes that its decoder refuses
leave it deaf for everybody. So the written frames are read back with the decoder of the same dialect: what is judged
is what would be sent, of whatever types the caller's values are.
"""

from __future__ import annotations

import math
import re
import reprlib
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import msgspec

from anyengine._rules import INT64_MAX, Rule, integer, reject
from anyengine._wire import NEWEST, Dialect, EngineCoreRequest, Frame
from anyengine.exceptions import DecodeError, RequestRejected

from .features import check_features, check_prompt_embeds
from .limits import EngineLimits
from .parameters import check_lora, check_pooling, check_sampling
from .prompt import check_in_vocabulary, check_prompt_length

__all__ = ["check_request"]

_PLACE: Final = r"\[(\d+|\.\.\.)\]|\.([^.\[]+)"
_SCALARS: Final[dict[str, Rule]] = {
    "data_parallel_rank": integer(0, optional=True),
    "current_wave": integer(0),
    "priority": integer(high=INT64_MAX),
}


def check_request(
    request: EngineCoreRequest,
    frames: Sequence[Frame],
    dialect: Dialect,
    limits: EngineLimits,
    adapters: Mapping[int, str],
) -> None:
    """Check a request and its ``frames``, as ``dialect`` wrote them, before they are sent.

    ``adapters`` are the LoRA adapters that the engine has loaded: id -> path.

    Raises:
        RequestRejected: the engine would not survive it, or would give an answer that means nothing.
    """
    request_id = request.request_id
    if type(request_id) is not str or not request_id:  # exactly: outputs are matched by it
        reject("request_id", request_id, "cannot name a request", "use a str that is not empty")
    try:
        if dialect.lists_features and request.mm_features:  # older forms of the same, which we write and never read
            dialect = NEWEST
            frames = dialect.encode_add(request)
        sent = typing.cast(EngineCoreRequest, dialect.decode_input(frames))  # or has at least its attributes
        _check(sent, limits, adapters)
    except DecodeError as exc:
        _reject_type(exc, request, dialect.request_type)
    except RequestRejected as exc:
        exc.request_id = request_id
        raise


def _check(sent: EngineCoreRequest, limits: EngineLimits, adapters: Mapping[int, str]) -> None:
    for name, rule in _SCALARS.items():
        rule(name, getattr(sent, name))
    if not math.isfinite(sent.arrival_time):
        reject("arrival_time", sent.arrival_time, "is no time", "use seconds since the epoch: time.time()")
    num_prompt_tokens = _check_prompt(sent, limits)
    sampling, pooling = sent.sampling_params, sent.pooling_params
    if (sampling is None) == (pooling is None):
        found = "neither" if sampling is None else "both"
        reject("sampling_params", found, "of sampling_params and pooling_params are given", "give exactly one of them")
    if sampling is not None:
        check_sampling(sampling, limits, num_prompt_tokens)
    if pooling is not None:
        check_pooling(pooling, limits)
    if sent.lora_request is not None:
        check_lora(sent.lora_request, limits, adapters)
    if sent.mm_features:
        check_features(sent.mm_features, num_prompt_tokens, limits)


def _check_prompt(sent: EngineCoreRequest, limits: EngineLimits) -> int:
    """The number of tokens of the prompt."""
    ids, embeds, mask = sent.prompt_token_ids, sent.prompt_embeds, sent.prompt_is_token_ids
    if ids is None and embeds is None:
        reject("prompt_token_ids", None, "leaves no prompt", "give token ids, or prompt_embeds")
    if mask is not None and (ids is None or embeds is None or len(mask) != len(ids)):
        problem = "does not say of each token id whether prompt_embeds stands in its place"
        reject("prompt_is_token_ids", mask, problem, "give it with both, one bool for each token id")
    if embeds is not None:
        check_prompt_embeds(embeds, limits, None if ids is None else len(ids))
    num_tokens = len(ids) if ids is not None else embeds.shape[0] if embeds is not None else 0
    parameter = "prompt_token_ids" if embeds is None else "prompt_embeds"
    check_prompt_length(num_tokens, limits, parameter=parameter, generates=sent.pooling_params is None)
    if ids is not None:
        read = ids if mask is None else [token for token, is_token in zip(ids, mask, strict=True) if is_token]
        check_in_vocabulary(read, limits.vocab_size, parameter="prompt_token_ids")
    return num_tokens


# ------------------------------------------------------------------------------------------------------- wrong types


def _reject_type(error: DecodeError, request: EngineCoreRequest, kind: type[msgspec.Struct]) -> NoReturn:
    parameter, value = _place(error.path or "", request, kind)
    if not parameter:
        parameter = (error.message_type or "").partition(".")[2] or "request"
        value = getattr(request, parameter, request)
    why = str(error.__cause__ or error).partition(" - at ")[0]
    raise RequestRejected(
        f"{parameter}={reprlib.repr(value)}: {why}; the engine's decoder would end over it, for everybody",
        parameter=parameter,
        value=value,
        remedy=f"give what the field is typed with: {why[0].lower()}{why[1:]}",
        request_id=request.request_id,
    ) from error


def _place(path: str, request: Any, kind: Any) -> tuple[str, Any]:
    """The parameter at msgspec's ``path`` into a message of type ``kind``, by name, and the caller's value there.

    An array's elements are ``[...]`` in a path: then the value is the array.
    """
    names: list[str] = []
    value, known = request, True
    for index, key in re.findall(_PLACE, path):
        struct = _struct_in(kind)
        kind = None
        step = f"[{index}]" if index else key
        if struct is not None:
            for position, info in enumerate(msgspec.structs.fields(struct)):
                if index == str(position) if struct.__struct_config__.array_like else key == info.encode_name:
                    kind, step = info.type, info.name
        names.append(step if step.startswith("[") or not names else f".{step}")
        if known:
            known, value = _step(value, step)
        if index == "..." and kind is None:
            kind = struct  # an element of a list of structs
    return "".join(names), value


def _step(value: Any, step: str) -> tuple[bool, Any]:
    if step.startswith("["):
        try:
            return True, value[int(step[1:-1])]
        except (ValueError, LookupError, TypeError):
            return False, value
    return (True, getattr(value, step)) if hasattr(value, step) else (False, value)


def _struct_in(annotation: Any) -> type[msgspec.Struct] | None:
    """The struct that ``annotation`` is, or is an option or the element of."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := _struct_in(arg)) is not None), None)
