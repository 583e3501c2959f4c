"""An engine's cache of multi-modal items: a feature without data stands for an item that is in it.

Owns which features that are, and how they get the data that an engine turned out not to have. Mirrors vLLM 0.32.0
``multimodal/cache/base.py`` (``get_and_update_features``, ``MultiModalCacheMissError``). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from anyengine._wire import EngineCoreRequest, MultiModalFeatureSpec

__all__ = ["cache_key", "lacks_data", "with_data"]


def cache_key(feature: MultiModalFeatureSpec) -> str:
    """What an engine calls the item: its hash, which several adapters may share, or else its identifier."""
    return feature.mm_hash or feature.identifier


def lacks_data(request: EngineCoreRequest) -> bool:
    """Whether a part of it is taken for cached in the engine."""
    return request.mm_features is not None and any(feature.data is None for feature in request.mm_features)


def with_data(
    features: Sequence[MultiModalFeatureSpec], missing: AbstractSet[str], found: Iterable[MultiModalFeatureSpec]
) -> tuple[list[MultiModalFeatureSpec], list[str]]:
    """``features``, where those that are ``missing`` have the data of the same item in ``found``; and the missing ones
    that have none there. Nothing that was given is changed."""
    data = {cache_key(feature): feature.data for feature in found if feature.data is not None}
    filled: list[MultiModalFeatureSpec] = []
    lacking: list[str] = []
    for feature in features:
        key = cache_key(feature)
        if feature.data is not None or key not in missing:
            filled.append(feature)
        elif key in data:
            filled.append(msgspec.structs.replace(feature, data=data[key]))
        else:
            filled.append(feature)
            lacking.append(key)
    return filled, list(dict.fromkeys(lacking))
