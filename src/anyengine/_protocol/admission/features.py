"""Tensors of a request and what they belong to: prompt embeddings, multi-modal features, matrices of token ids.

Owns what vLLM's decoder and model runner take for granted of them. Their bytes fit their dtype and shape: they have
been decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from anyengine._rules import a_type, reject
from anyengine._wire import MultiModalFeatureSpec, MultiModalFieldElem, Tensor, is_torch_dtype

from .limits import EngineLimits
from .prompt import check_in_vocabulary

__all__ = ["check_features", "check_prompt_embeds", "check_token_matrix"]

_OPTIONS: Final = {
    "batched": frozenset(("keep_on_cpu",)),
    "flat": frozenset(("keep_on_cpu", "slices", "dim")),
    "shared": frozenset(("keep_on_cpu", "batch_size")),
}
"""vLLM's factories of multi-modal fields, and the arguments that each takes."""
_REQUIRED: Final = {"batched": frozenset[str](), "flat": frozenset(("slices",)), "shared": frozenset(("batch_size",))}
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_INTS: Final[dict[str, Literal["i", "q"]]] = {"<i4": "i", "<i8": "q", "int32": "i", "int64": "q"}


def _check_torch(parameter: str, tensor: Tensor) -> None:
    if not is_torch_dtype(tensor.dtype):
        remedy = "use torch's name for it, such as 'float32': Tensor.torch_spelled()"
        reject(f"{parameter}.dtype", tensor.dtype, "is no dtype of torch's, which reads this tensor", remedy)


def check_prompt_embeds(embeds: Tensor, limits: EngineLimits, num_token_ids: int | None) -> None:
    """Check prompt embeddings. ``num_token_ids``: of a prompt that has both.

    Raises:
        RequestRejected: the engine does not take them, or not in this shape.
    """
    if limits.prompt_embeds is False:
        remedy = "start the engine with prompt embeddings (vLLM: enable_prompt_embeds=True), or give token ids"
        reject("prompt_embeds", embeds, "would be ignored, and the answer mean nothing", remedy)
    hidden = limits.hidden_size
    if embeds.dtype not in _FLOATS:
        reject("prompt_embeds.dtype", embeds.dtype, "is not for embeddings", f"use one of {', '.join(_FLOATS)}")
    if len(embeds.shape) != 2 or hidden not in (None, embeds.shape[1]):
        wanted = "hidden_size" if hidden is None else hidden
        reject("prompt_embeds.shape", embeds.shape, "does not fit the model", f"use [num_prompt_tokens, {wanted}]")
    if num_token_ids not in (None, embeds.shape[0]):
        reject("prompt_embeds.shape", embeds.shape, f"is not for {num_token_ids} token ids", "use as many of both")


def check_token_matrix(ids: Tensor, limits: EngineLimits, num_prompt_tokens: int, *, parameter: str) -> None:
    """Check token ids, some for each position of the prompt; -1 pads.

    Raises:
        RequestRejected: wrong shape or dtype, more rows than positions, or ids outside the vocabulary.
    """
    code = _INTS.get(ids.dtype)
    if code is None or len(ids.shape) != 2 or 0 in ids.shape:
        remedy = "use dtype '<i4' and shape [rows, ids per row], none of them 0"
        reject(parameter, ids, "is no matrix of token ids", remedy)
    if ids.shape[0] >= num_prompt_tokens:
        reject(parameter, ids, f"has {ids.shape[0]} rows", f"use at most {num_prompt_tokens - 1}: the last has no next")
    values = memoryview(ids.data).cast("B").cast(code).tolist()
    check_in_vocabulary([value for value in values if value != -1], limits.vocab_size, parameter=parameter)


def check_features(features: Sequence[MultiModalFeatureSpec], num_prompt_tokens: int, limits: EngineLimits) -> None:
    """Check multi-modal features.

    Raises:
        RequestRejected: one is not what vLLM's decoder takes, its place is not in the prompt, or its data is left out
            for an engine that keeps none.
    """
    for index, feature in enumerate(features):
        name = f"mm_features[{index}]"
        place = feature.mm_position
        if feature.data is None and limits.mm_cache is False:
            # Its model runner would look for what no encoder has made, and the engine end.
            way = limits.enabled_by("mm_processor_cache_type='lru' and mm_processor_cache_gb above 0, as a single rank")
            reject(f"{name}.data", None, "needs an engine that keeps multi-modal items", f"give its data, or {way}")
        if place.offset < 0 or place.length < 1 or place.offset + place.length > num_prompt_tokens:
            found = (place.offset, place.length)
            problem = "(offset, length) is not in the prompt"
            reject(f"{name}.mm_position", found, problem, f"use places among its {num_prompt_tokens} tokens")
        if (mask := place.is_embed) is not None and (mask.dtype != "bool" or mask.shape != (place.length,)):
            remedy = f"use a tensor of dtype 'bool' and shape ({place.length},)"
            reject(f"{name}.mm_position.is_embed", mask, "does not say of each position whether it counts", remedy)
        # Up to 0.15 an item is an array of elements, which carry their keys.
        items = feature.data.items() if isinstance(feature.data, dict) else ()
        for key, elem in items:
            _check_elem(f"{name}.data[{key!r}]", elem)


def _check_elem(name: str, elem: MultiModalFieldElem) -> None:
    if elem.data is not None:
        _check_nested(f"{name}.data", elem.data)
    factory, options = elem.field.factory, elem.field.options
    allowed = _OPTIONS.get(factory)
    if allowed is None:
        reject(f"{name}.field.factory", factory, "is unknown", f"use one of {', '.join(_OPTIONS)}")
    if not _REQUIRED[factory] <= options.keys() <= allowed:
        remedy = f"use {', '.join(sorted(allowed))}"
        reject(f"{name}.field.options", options, f"are not those of {factory!r}", remedy)
    if factory == "flat":
        _check_slices(f"{name}.field.options['slices']", options["slices"])


def _check_nested(name: str, value: Any) -> None:
    if isinstance(value, Tensor):
        _check_torch(name, value)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_nested(f"{name}[{index}]", item)
    elif not isinstance(value, int | float):
        problem = f"is {a_type(value)}"
        reject(name, value, problem, "use a tensor, a number, or lists of them to any depth")


def _check_slices(name: str, value: Any) -> None:
    """A slice is ``[start, stop, step]``; lists of them to any depth."""
    remedy = "use [start, stop, step], or lists of them"
    if not isinstance(value, list):
        reject(name, value, f"is {a_type(value)}", remedy)
    if value and not isinstance(value[0], list):
        if len(value) > 3 or not all(item is None or type(item) is int for item in value):
            reject(name, value, "is no slice", remedy)
        return
    for index, item in enumerate(value):
        _check_slices(f"{name}[{index}]", item)
