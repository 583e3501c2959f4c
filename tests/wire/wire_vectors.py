"""The golden vectors of vLLM's own encoders: loading them, and values of them as our structs and as plain data.

A vector's ``value`` is plain JSON with markers (``$struct``, ``$tensor``, ``$set``, ...); ``build`` makes our structs
of it, ``plain`` and ``plain_value`` bring ours and the vector's to one form that can be compared.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

import anyengine._wire as wire
from anyengine._wire.derive import restrict
from anyengine._wire.layouts import LEGACY
from anyengine._wire.outputs import EngineCoreEvent

_FILE = json.loads(lzma.decompress((Path(__file__).parent / "data" / "vectors.json.xz").read_bytes()))
RELEASES: tuple[str, ...] = tuple(_FILE["releases"])
"""One release of each dialect that vLLM's encoder was run under, oldest first."""

STRUCTS: dict[str, type[msgspec.Struct]] = {
    "EngineCoreRequest": wire.EngineCoreRequest,
    "SamplingParams": wire.WireSamplingParams,
    "StructuredOutputsParams": wire.WireStructuredOutputs,
    "RepetitionDetectionParams": wire.WireRepetitionDetection,
    "PoolingParams": wire.WirePoolingParams,
    "LateInteractionParams": wire.WireLateInteractionParams,
    "LateChunkingParams": wire.WireLateChunkingParams,
    "LoRARequest": wire.WireLoRARequest,
    "KvHintsEnvelope": wire.KvHintsEnvelope,
    "KvHintAction": wire.KvHintAction,
    "MultiModalFeatureSpec": wire.MultiModalFeatureSpec,
    "MultiModalFieldElem": wire.MultiModalFieldElem,
    "PlaceholderRange": wire.PlaceholderRange,
    "EngineCoreOutputs": wire.EngineCoreOutputs,
    "EngineCoreOutput": wire.EngineCoreOutput,
    "EngineCoreEvent": EngineCoreEvent,
    "LogprobsLists": wire.LogprobsLists,
    "LogprobsTensors": wire.LogprobsTensors,
    "SamplingMaskLists": wire.SamplingMaskLists,
    "RequestError": wire.EngineRequestError,
    "UtilityOutput": wire.UtilityOutput,
    "PrefillStats": wire.PrefillStats,
    "SchedulerStats": wire.SchedulerStats,
    "PrefixCacheStats": wire.PrefixCacheStats,
    "EngineHandshakeMetadata": wire.HandshakeInit,
    "EngineZmqAddresses": wire.EngineAddresses,
    "EngineCoreReadyResponse": wire.EngineCoreReadyResponse,
    "ReconfigureDistributedRequest": wire.ReconfigureDistributedRequest,
}
FIELD_FACTORIES = {
    "MultiModalBatchedField": "batched", "MultiModalFlatField": "flat", "MultiModalSharedField": "shared",
}  # fmt: skip


@cache
def load(release: str) -> list[dict[str, Any]]:
    """The vectors of ``release``; a vector that several releases write alike is the same object. Not to be changed."""
    return [vector for vector in _FILE["vectors"] if release in vector["releases"]]


def frames_of(vector: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in vector["frames"]]


def watermarks_by_default(dialect: wire.Dialect) -> bool:
    """0.30 and 0.31 spell the default ``True``, later ones (and we) ``None``; both leave it out."""
    return (0, 30, 0) <= dialect.since < (0, 32, 0)


def build(value: Any, frames: list[bytes], dialect: wire.Dialect) -> Any:
    """Our structs for a vector's value. Large tensors show only a digest there: ``frames`` have their bytes."""
    if isinstance(value, list):
        return [build(item, frames, dialect) for item in value]
    if not isinstance(value, dict):
        return value
    if "$struct" in value:
        return _build_struct(value["$struct"], value["fields"], frames, dialect)
    if "$tensor" in value or "$ndarray" in value:
        data = bytes.fromhex(value["hex"]) if "hex" in value else _by_digest(value["sha256"], frames)
        return wire.Tensor(value.get("$tensor") or value["$ndarray"], tuple(value["shape"]), data)
    if "$set" in value:
        return set(value["$set"])
    if "$bin" in value:
        return bytes.fromhex(value["$bin"])
    if "$map" in value:
        return {build(key, frames, dialect): build(item, frames, dialect) for key, item in value["$map"]}
    for marker in ("$tuple", "$slice"):
        if marker in value:
            return tuple(build(item, frames, dialect) for item in value[marker])
    if "$enum" in value:
        return value["value"]
    return {key: build(item, frames, dialect) for key, item in value.items()}


def _build_struct(name: str, fields: dict[str, Any], frames: list[bytes], dialect: wire.Dialect) -> Any:
    built = {key: build(item, frames, dialect) for key, item in fields.items()}
    if name == "UtilityResult":
        return built["result"]
    if name in FIELD_FACTORIES:
        return wire.MultiModalField(FIELD_FACTORIES[name], built)
    if name not in STRUCTS:
        return built  # kept as a plain map by us
    struct = STRUCTS[name]
    known = {info.encode_name: info for info in msgspec.structs.fields(struct)}
    if not (_relocate(built, known) and _required(known) <= built.keys()):
        own = dialect._written[struct].struct  # what only this release has is written by way of its own struct
        return own(**{key: restrict(item, dialect._written) for key, item in built.items()})
    if struct is wire.WireSamplingParams:  # json.load makes new floats; msgspec omits only the default object itself
        built = {key: item for key, item in built.items() if key == "_all_stop_token_ids" or item != known[key].default}
        if watermarks_by_default(dialect) and built.get("watermarking") is True:
            del built["watermarking"]
    return struct(**{known[key].name: item for key, item in built.items()})


def _required(known: dict[str, Any]) -> set[str]:
    return {name for name, info in known.items() if info.required}


def _relocate(built: dict[str, Any], known: dict[str, Any]) -> bool:
    """Put fields that the canonical struct lacks to where it has them; False if one has no such place."""
    for key in built.keys() - known.keys():
        legacy = LEGACY.get(key)
        head, _, tail = legacy.path.partition(".") if legacy is not None and legacy.path else ("", "", "")
        if built[key] == (legacy.default if legacy is not None else None):
            pass
        elif head == "prefill_stats":
            part = built.setdefault(head, None) or wire.PrefillStats()
            built[head] = msgspec.structs.replace(part, **{tail: built[key]})
        elif head and built[head] is not None:
            setattr(built[head], tail, built[key])
        else:
            return False
        del built[key]
    return True


def _by_digest(sha256: str, frames: list[bytes]) -> bytes:
    return next(frame for frame in frames if hashlib.sha256(frame).hexdigest() == sha256)


def plain_value(value: Any) -> Any:
    """A vector's value, without the names of classes: structs as maps, sets sorted, tensors by digest."""
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$struct" in value:
        name, fields = value["$struct"], {key: plain_value(item) for key, item in value["fields"].items()}
        if name == "UtilityResult":
            return fields["result"]
        return {"factory": FIELD_FACTORIES[name], "options": fields} if name in FIELD_FACTORIES else fields
    if "$tensor" in value or "$ndarray" in value:
        digest = hashlib.sha256(bytes.fromhex(value["hex"])).hexdigest() if "hex" in value else value["sha256"]
        return {"tensor": value.get("$tensor") or value["$ndarray"], "shape": value["shape"], "sha256": digest}
    for marker in ("$tuple", "$slice"):
        if marker in value:
            return [plain_value(item) for item in value[marker]]
    if "$set" in value:
        return sorted(value["$set"])
    if "$enum" in value:
        return value["value"]
    if "$map" in value:
        return {str(key): plain_value(item) for key, item in value["$map"]}
    return {key: plain_value(item) for key, item in value.items()}


def plain(value: Any) -> Any:
    """What we decoded, in the same form."""
    if isinstance(value, wire.Tensor):
        return {
            "tensor": value.dtype,
            "shape": list(value.shape),
            "sha256": hashlib.sha256(bytes(value.data)).hexdigest(),
        }
    if isinstance(value, msgspec.Struct):
        return {info.encode_name: plain(getattr(value, info.name)) for info in msgspec.structs.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return {"$bin": value.hex()}
    return value


def differences(expected: Any, found: Any, path: str = "$") -> list[str]:
    """Where ``found`` is not ``expected``. Fields that only newer releases have must be unset."""
    if isinstance(expected, dict) and isinstance(found, dict):
        surplus = [f"{path}.{key}: surplus" for key in found.keys() - expected.keys() if found[key]]
        missing = [f"{path}.{key}: missing" for key in expected.keys() - found.keys()]
        inner = [
            d for key in expected.keys() & found.keys() for d in differences(expected[key], found[key], f"{path}.{key}")
        ]
        return surplus + missing + inner
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [
            d for i, pair in enumerate(zip(expected, found, strict=True)) for d in differences(*pair, f"{path}[{i}]")
        ]
    return [] if expected == found else [f"{path}: expected {expected!r}, found {found!r}"]
