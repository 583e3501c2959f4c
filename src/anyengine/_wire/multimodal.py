"""Multimodal features of a request: placeholders in the prompt and the processor's tensors for them.

Owns the map structs; tensors may be nested to any depth in ``MultiModalFieldElem.data``, which msgspec sees as untyped:
:func:`revive_features` turns the wire's triples in it into records.
Mirrors vLLM 0.33.0 ``multimodal/inputs.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .constants import Frame
from .tensors import Tensor, revive_nested

__all__ = [
    "MultiModalFeatureSpec",
    "MultiModalField",
    "MultiModalFieldElem",
    "PlaceholderRange",
    "listed_features",
    "revive_features",
]


class PlaceholderRange(msgspec.Struct, gc=False):
    """Where in the prompt an item stands, in tokens; ``is_embed`` marks the positions that take embeddings."""

    offset: int
    length: int
    is_embed: Tensor | None = None  # [length], bool


class MultiModalField(msgspec.Struct, array_like=True, gc=False):
    """How a tensor is batched: ``"batched"``, ``"flat"`` (slices, dim) or ``"shared"`` (batch_size)."""

    factory: str
    options: dict[str, Any] = {}


class MultiModalFieldElem(msgspec.Struct, gc=False):
    """One named input of the model: a tensor, a number, or a list of these to any depth."""

    data: Any
    field: MultiModalField


class MultiModalFeatureSpec(msgspec.Struct, gc=False):
    """One image, sound, ...; ``data=None`` means that the engine has it in its cache under ``mm_hash``."""

    data: dict[str, MultiModalFieldElem] | None
    modality: str
    identifier: str
    mm_position: PlaceholderRange
    mm_hash: str | None = None


def listed_features(features: Sequence[MultiModalFeatureSpec], *, named_options: bool) -> list[MultiModalFeatureSpec]:
    """``features`` as releases before 0.16 want them: an item is an array of elements that carry modality and key.

    Without ``named_options`` (0.12) the options of a field follow its factory as bare values.
    """
    return [
        msgspec.structs.replace(
            feature,
            data=[
                _listed(feature.modality, key, elem, named_options=named_options) for key, elem in feature.data.items()
            ],
        )
        if feature.data is not None
        else feature
        for feature in features
    ]


def _listed(modality: str, key: str, elem: MultiModalFieldElem, *, named_options: bool) -> dict[str, Any]:
    field: Any = elem.field
    if not named_options:
        field = [field.factory, *(value for name, value in field.options.items() if name != "keep_on_cpu")]
    return {"modality": modality, "key": key, "data": elem.data, "field": field}


def revive_features(features: list[MultiModalFeatureSpec], frames: Sequence[Frame]) -> None:
    """Turn the tensor triples in ``features`` into records, in place.

    Raises:
        ValueError: a triple that contradicts itself or ``frames``.
    """
    for feature in features:
        for elem in (feature.data or {}).values():
            elem.data = revive_nested(elem.data, frames)
