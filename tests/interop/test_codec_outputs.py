"""Differential: engine messages that vLLM's own encoder writes decode with us to the values that it was given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from output_strategies import MESSAGES
from vllm_codec import VLLMCodec
from wire_strategies import ROUNDS, examples, plain

import anyengine._wire as wire
from anyengine._wire.layouts import LEGACY


def value_of(description: Any) -> Any:
    """What a description stands for, as our plain data."""
    if isinstance(description, list):
        return [value_of(item) for item in description]
    if not isinstance(description, dict):
        return description
    if "$struct" in description:
        fields = {name: value_of(item) for name, item in description["fields"].items()}
        if description["$struct"] in ("FinishReason", "EngineCoreEventType"):
            return fields["value"]
        return fields["result"] if description["$struct"] == "UtilityResult" else fields
    for marker in ("$torch", "$numpy"):
        if marker in description:
            return {"tensor": description[marker], "shape": description["shape"], "data": description["data"]}
    for marker in ("$set", "$tuple"):
        if marker in description:
            return [value_of(item) for item in description[marker]]
    return {key: value_of(item) for key, item in description.items()}


def unequal(codec: VLLMCodec, description: Any, ours: Any, path: str = "$") -> list[str]:
    """Where we decoded something else than ``description``; what its release cannot say must have its default."""
    if isinstance(description, list) and isinstance(ours, list) and len(description) == len(ours):
        return [
            d
            for i, pair in enumerate(zip(description, ours, strict=True))
            for d in unequal(codec, *pair, f"{path}[{i}]")
        ]
    if isinstance(description, dict) and description.get("$struct") == "FinishReason":
        number = description["fields"]["value"]
        description = number if number in codec.finish_reasons else None
    if not (isinstance(description, dict) and "$struct" in description and isinstance(ours, msgspec.Struct)):
        expected, found = value_of(description), plain(ours)
        return [] if expected == found else [f"{path}: vLLM sent {expected!r:.200}, we have {found!r:.200}"]
    kind = description["$struct"]
    written = codec.fields.get(kind, description["fields"])
    found = []
    for name, item in description["fields"].items():
        if name in written:
            found += unequal(codec, item, getattr(ours, name), f"{path}.{name}")
        elif name not in LEGACY and kind in codec.fields:  # what the release cannot say
            found += [] if not getattr(ours, name) or name == "prefill_stats" else [f"{path}.{name}: not sent"]
    if kind == "EngineCoreOutput" and "num_cached_tokens" in written:  # where it stands today
        stats = ours.prefill_stats  # type: ignore[attr-defined]
        if stats.num_cached_tokens != description["fields"]["num_cached_tokens"]:
            found.append(f"{path}.prefill_stats: {stats!r}")
    return found


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.feature("F08")
@pytest.mark.feature("O21")
def test_engine_messages_of_vllm_decode_to_the_same_values(vllm_codec: VLLMCodec, number: int) -> None:
    descriptions = examples(MESSAGES, number)
    dialects = [wire.dialect_for(vllm_codec.version)]
    if dialects[0].since < (0, 20, 0):
        dialects.append(wire.select_dialect(None))  # told by the length of its outputs
    for dialect in dialects:
        reader = wire.RankDialects({0: dialect})
        wrong = []
        for description, frames in zip(descriptions, vllm_codec.encode_outputs(descriptions), strict=True):
            assert not wire.is_engine_dead(frames)
            assert len(frames) == 1 or max(map(len, frames[1:])) >= 256
            if found := unequal(vllm_codec, description, reader.decode_outputs(frames)):
                wrong.append((sum(map(len, frames)), found, description))
        assert not reader.warnings
        if wrong:
            _, found, description = min(wrong, key=lambda item: item[0])
            pytest.fail(
                f"{len(wrong)} of {len(descriptions)} differ ({dialect}); the smallest:\n{found}\n{description}"
            )
