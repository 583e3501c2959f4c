"""Runs inside vLLM's environment: decodes and encodes messages with vLLM's own codec, for whoever asks on stdin.

Each message is 4 bytes of length (big endian) and msgpack: nothing is pickled. Must not import anything of ours.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
os.environ.pop("VLLM_MSGPACK_ZERO_COPY_THRESHOLD", None)

import msgspec
import numpy as np
import torch
import vllm
import vllm.v1.engine as engine
from vllm.lora import request as lora
from vllm.v1 import outputs
from vllm.v1.metrics import stats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

MODULES = (engine, lora, outputs, stats)
FACTORIES = {"MultiModalBatchedField": "batched", "MultiModalFlatField": "flat", "MultiModalSharedField": "shared"}


def class_named(name: str) -> Any:
    if name == "UtilityResult":
        return UtilityResult
    if name == "SpecDecodingStats":
        from vllm.v1.spec_decode.metrics import SpecDecodingStats

        return SpecDecodingStats
    return next((getattr(module, name) for module in MODULES if hasattr(module, name)), None)


def field_names(kind: Any) -> list[str]:
    if hasattr(kind, "__struct_fields__"):
        return list(kind.__struct_fields__)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)


def plain(value: Any) -> Any:
    """Anything vLLM decodes, as maps, lists, numbers, strings and bytes."""
    if isinstance(value, torch.Tensor):
        raw = value.flatten().contiguous().view(torch.uint8).numpy().tobytes()
        return {"tensor": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": raw}
    if isinstance(value, np.ndarray):
        return {"tensor": value.dtype.str, "shape": list(value.shape), "data": value.tobytes()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        fields = {name: plain(getattr(value, name)) for name in field_names(type(value))}
        factory = FACTORIES.get(type(value).__name__)
        return {"factory": factory, "options": fields} if factory else fields
    if hasattr(value, "items"):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def build(value: Any) -> Any:
    """The objects of a description: ``$struct``, ``$torch``, ``$numpy``, ``$set``, ``$tuple``; fields that this release
    lacks are left out, and structs that it lacks are None."""
    if isinstance(value, list):
        return [build(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$struct" in value:
        kind = class_named(value["$struct"])
        if kind is UtilityResult:
            return UtilityResult(build(value["fields"]["result"]))
        if kind is None:
            return None
        if issubclass(kind, enum.Enum):
            members = {member.value: member for member in kind}
            return members.get(value["fields"]["value"])
        known = field_names(kind)
        return kind(**{name: build(item) for name, item in value["fields"].items() if name in known})
    if "$torch" in value:
        flat = torch.frombuffer(bytearray(value["data"]), dtype=torch.uint8) if value["data"] else torch.empty(0).byte()
        return flat.view(getattr(torch, value["$torch"])).reshape(value["shape"])
    if "$numpy" in value:
        return np.frombuffer(value["data"], dtype=value["$numpy"]).reshape(value["shape"])
    if "$set" in value:
        return set(value["$set"])
    if "$tuple" in value:
        return tuple(build(item) for item in value["$tuple"])
    return {key: build(item) for key, item in value.items()}


def hello() -> dict[str, Any]:
    kinds = (
        "EngineCoreOutput", "EngineCoreOutputs", "SchedulerStats", "PrefillStats", "PrefixCacheStats",
        "LogprobsTensors", "SamplingMaskLists", "RequestSpecDecodeMetrics",
    )  # fmt: skip
    known = {name: class_named(name) for name in kinds}
    return {
        "version": vllm.__version__,
        "path": vllm.__file__,
        "fields": {name: field_names(kind) for name, kind in known.items() if kind is not None},
        "finish_reasons": [reason.value for reason in engine.FinishReason],
    }


def decode_requests(messages: list[list[bytes]]) -> list[Any]:
    decoder = MsgpackDecoder(engine.EngineCoreRequest)
    answers = []
    for frames in messages:
        try:
            answers.append(plain(decoder.decode(frames)))
        except Exception as exc:  # noqa: BLE001 -- whatever it is would have ended the engine's input thread
            answers.append({"$refused": f"{type(exc).__name__}: {exc}"})
    return answers


def encode_outputs(descriptions: list[Any]) -> list[list[bytes]]:
    return [[bytes(frame) for frame in MsgpackEncoder().encode(build(description))] for description in descriptions]


def read(stream: BinaryIO) -> Any:
    head = stream.read(4)
    return msgspec.msgpack.decode(stream.read(int.from_bytes(head, "big"))) if len(head) == 4 else None


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever vLLM prints must not look like an answer
    commands = {"decode": decode_requests, "encode": encode_outputs}
    while (command := read(sys.stdin.buffer)) is not None:
        name, argument = command
        reply = msgspec.msgpack.encode(hello() if name == "hello" else commands[name](argument))
        answers.write(len(reply).to_bytes(4, "big") + reply)
        answers.flush()


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    main()
