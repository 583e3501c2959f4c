"""Differential: what Hypothesis makes of requests, encoded by us, decodes in vLLM's own decoder to the same values."""

from __future__ import annotations

from functools import reduce
from typing import Any

import msgspec
import pytest
from vllm_codec import VLLMCodec
from wire_strategies import REQUESTS, ROUNDS, examples, plain

import anyengine._wire as wire
from anyengine._wire.layouts import LEGACY, LOSABLE
from anyengine.exceptions import EncodeError

EMPTY_IS_NONE = ("stop", "stop_token_ids", "bad_words")  # vLLM's constructor makes None an empty list


def fit(request: wire.EngineCoreRequest, dialect: wire.Dialect) -> list[Any]:
    """The frames of ``request`` without what ``dialect`` refuses, which is set to its default in ``request``."""
    while True:
        try:
            return dialect.encode_add(request)
        except EncodeError as exc:
            *path, name = str(exc.field).split(".")
            part = reduce(getattr, path, request)
            info = next(info for info in msgspec.structs.fields(part) if info.name == name)
            setattr(part, name, None if info.default is msgspec.NODEFAULT else info.default)


def unequal(ours: Any, theirs: Any, path: str = "$", *, lossy: bool = False) -> list[str]:
    """Where vLLM decoded something else. Its older structs lack fields and have some of their own, at their default;
    a ``lossy`` dialect may leave out hints."""
    if isinstance(ours, msgspec.Struct):
        return unequal_struct(ours, theirs, path, lossy=lossy)
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        return [d for key in ours for d in unequal(ours[key], theirs[key], f"{path}[{key!r}]")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [d for i, pair in enumerate(zip(ours, theirs, strict=True)) for d in unequal(*pair, f"{path}[{i}]")]
    return [] if plain(ours) == theirs else [f"{path}: sent {plain(ours)!r:.200}, vLLM has {theirs!r:.200}"]


def unequal_struct(ours: msgspec.Struct, theirs: Any, path: str, *, lossy: bool) -> list[str]:
    if not isinstance(theirs, dict):
        return [f"{path}: sent {ours!r:.200}, vLLM has {theirs!r:.200}"]
    if isinstance(ours, wire.MultiModalField):
        return unequal(plain(ours), theirs | {"options": {"keep_on_cpu": False} | theirs["options"]}, path)
    hints = LOSABLE.get(type(ours).__name__.removeprefix("Wire"), frozenset()) if lossy else frozenset()
    known = {info.encode_name: info for info in msgspec.structs.fields(ours)}
    found = []
    for name, value in theirs.items():
        if name in known:
            expected = getattr(ours, known[name].name)
        elif isinstance(ours, wire.MultiModalFieldElem):  # up to 0.15 an element repeats its item's modality and key
            found += [] if name == "modality" or path.endswith(f"[{value!r}]") else [f"{path}.{name}: {value!r}"]
            continue
        else:
            expected = legacy_value(ours, name)
        if (name in hints and value == known[name].default) or (name in EMPTY_IS_NONE and not expected and value == []):
            continue
        if name == "watermarking" and expected is None and value is True:
            continue  # the default of 0.30 and 0.31
        found += unequal(expected, value, f"{path}.{name}", lossy=lossy)
    return found


def legacy_value(ours: Any, name: str) -> Any:
    if name == "eos_token_id":
        return ours.sampling_params.eos_token_id if ours.sampling_params else None
    return LEGACY[name].default if name in LEGACY else None


def dialects_of(version: str) -> dict[str, wire.Dialect]:
    """The release's own, and what its ready frame alone selects where that does not tell the release."""
    found = {"exact": wire.dialect_for(version)}
    exact = found["exact"]
    if exact.since < (0, 20, 0):
        silent = wire.select_dialect(None)
        assert silent.probe is not None
        found["ready frame"] = silent.probed(found=exact.utility_arity(silent.probe) is not None)
    elif exact.since < (0, 22, 0):
        keys = {"max_model_len": 1, "num_gpu_blocks": 1, "dp_stats_address": None}
        found["ready frame"] = wire.select_dialect(wire.decode_ready(msgspec.msgpack.encode(keys)))
    return found


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.feature("F08")
def test_requests_decode_in_vllm_to_the_same_values(vllm_codec: VLLMCodec, number: int) -> None:
    requests = examples(REQUESTS, number)
    for name, dialect in dialects_of(vllm_codec.version).items():
        fitted = [copy(request) for request in requests]
        frames = [[bytes(frame) for frame in fit(request, dialect)[1:]] for request in fitted]
        answers = vllm_codec.decode_requests(frames)
        wrong = []
        for request, sent, answer in zip(fitted, frames, answers, strict=True):
            refused = answer.get("$refused")
            if found := [refused] if refused else unequal(request, answer, lossy=name != "exact"):
                wrong.append((sum(map(len, sent)), found, request))
        if wrong:
            _, found, request = min(wrong, key=lambda item: item[0])
            pytest.fail(
                f"{len(wrong)} of {len(requests)} differ ({name} dialect {dialect}); the smallest:\n{found}\n{request}"
            )


def copy(value: Any) -> Any:
    """A copy of a request down to its structs: what a dialect refuses is taken out of it."""
    if isinstance(value, msgspec.Struct):
        return type(value)(*[copy(getattr(value, name)) for name in value.__struct_fields__])
    return [copy(item) for item in value] if isinstance(value, list) else value
