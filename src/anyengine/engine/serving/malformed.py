"""What to make of a message that cannot be decoded: as much of it as can be saved, and what to tell its sender.

vLLM's input thread dies of such a message; ours answers it when it can tell whom to answer. Owns no sockets and no
counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from anyengine._wire import Frame, RequestType

__all__ = ["Malformed", "salvage"]

_CLIENT_INDEX_POSITION = 11  # of EngineCoreRequest, in every layout from 0.21.0 on

_decoder = msgspec.msgpack.Decoder()


@dataclass(slots=True, frozen=True)
class Malformed:
    """A message that means nothing. ``kind`` is what log lines are counted by; ``request_id`` or ``call_id`` and
    ``method`` are there when an answer is possible."""

    kind: str
    reason: str
    client_index: int
    request_id: str | None = None
    call_id: int | None = None
    method: str = ""


def salvage(frames: Sequence[Frame], reason: str, *, input_index: int) -> Malformed:
    """Read whatever can be read of ``frames``. ``input_index``: the input socket it came from, the best guess at the
    client."""
    try:
        kind = RequestType(bytes(frames[0])).name
    except (ValueError, IndexError):
        return Malformed("unknown type", reason, input_index)
    values = _positions(frames)
    if kind == "ADD" and values and isinstance(values[0], str):
        client_index = values[_CLIENT_INDEX_POSITION] if len(values) > _CLIENT_INDEX_POSITION else input_index
        return Malformed(kind, reason, _as_index(client_index, input_index), request_id=values[0])
    if kind == "UTILITY" and len(values) >= 2 and isinstance(values[1], int):
        method = values[2] if len(values) > 2 and isinstance(values[2], str) else "unknown"
        return Malformed(kind, reason, _as_index(values[0], input_index), call_id=values[1], method=method)
    return Malformed(kind, reason, input_index)


def _positions(frames: Sequence[Frame]) -> list[object]:
    if len(frames) < 2:
        return []
    try:
        decoded = _decoder.decode(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return decoded if isinstance(decoded, list) else []


def _as_index(value: object, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default
