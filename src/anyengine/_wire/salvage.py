"""The second, slow look at an engine message that cannot be decoded: whom does it concern?

Owns the reading of what is left: request ids, a call id, and the outputs that are sound. Must not know who waits for
them. With it the trouble of one output is the trouble of its request, instead of a hole in what the others get.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from anyengine.exceptions import DecodeError

from .codec import BAD_BYTES, read_custom
from .constants import Frame
from .outputs import EngineCoreOutput, EngineCoreOutputs, UndecodableOutput, UtilityOutput
from .tensors import read_extension

__all__ = ["salvage_outputs"]

_OUTPUTS, _UTILITY = 1, 4  # positions in EngineCoreOutputs, in every release


def salvage_outputs(
    batch: type[EngineCoreOutputs], frames: Sequence[Frame], error: DecodeError
) -> EngineCoreOutputs | None:
    """What can be told from ``frames``, which could not be decoded as a ``batch`` because of ``error``.

    An output that is not sound becomes an :class:`UndecodableOutput`, a reply that is not, the failure of its call;
    all else is left out. ``None`` when nobody is named.
    """
    raw = _decode_plain(frames)
    if type(raw) is not list:
        return None
    rank = raw[0] if raw and type(raw[0]) is int else 0
    reply = _salvage_reply(raw[_UTILITY], error) if len(raw) > _UTILITY else None
    if reply is not None:
        return EngineCoreOutputs(engine_index=rank, utility_output=reply)
    items = raw[_OUTPUTS] if len(raw) > _OUTPUTS and type(raw[_OUTPUTS]) is list else []
    kind = next(get_args(info.type)[0] for info in msgspec.structs.fields(batch) if info.name == "outputs")
    outputs = [_salvage_output(item, kind, frames, error) for item in items if _names_a_request(item)]
    return EngineCoreOutputs(engine_index=rank, outputs=outputs) if outputs else None


def _decode_plain(frames: Sequence[Frame]) -> Any:
    try:
        return msgspec.msgpack.decode(frames[0], ext_hook=_keep_extension) if frames else None
    except BAD_BYTES:
        return None


def _keep_extension(code: int, data: memoryview) -> Any:
    """As :func:`read_extension`, but what that refuses stays in its place, closed: see :func:`_holds_refused`."""
    try:
        return read_extension(code, data)
    except ValueError:
        return msgspec.msgpack.Ext(code, data)


def _names_a_request(item: Any) -> bool:
    return type(item) is list and bool(item) and type(item[0]) is str


def _salvage_output(
    item: list[Any], kind: type[EngineCoreOutput], frames: Sequence[Frame], error: DecodeError
) -> EngineCoreOutput:
    try:
        if _holds_refused(item):
            raise ValueError
        return msgspec.convert(item, kind, dec_hook=read_custom(frames))
    except BAD_BYTES:
        return UndecodableOutput(request_id=item[0], new_token_ids=[], trouble=error)


def _holds_refused(value: Any) -> bool:
    if type(value) is dict:
        return any(_holds_refused(part) for part in value.values())
    if type(value) is list:
        return any(_holds_refused(part) for part in value)
    return type(value) is msgspec.msgpack.Ext


def _salvage_reply(item: Any, error: DecodeError) -> UtilityOutput | None:
    if type(item) is not list or not item or type(item[0]) is not int:
        return None
    return UtilityOutput(item[0], f"its reply cannot be read: {error}")
