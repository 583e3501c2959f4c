"""msgpack in, msgpack out, with errors that say what, where and of which type.

Owns the translation of every way in which msgspec can fail into :class:`DecodeError` and :class:`EncodeError`; must not
know any message. A failed encode yields nothing at all, so that nothing partial is ever sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from anyengine.exceptions import DecodeError, EncodeError

from .constants import Frame
from .tensors import Tensor, read_extension, read_tensor, write_tensor

__all__ = [
    "BAD_BYTES",
    "compile_decoder",
    "decode_frame",
    "decode_frames",
    "encode_frame",
    "encode_frames",
    "raise_decode_error",
    "read_custom",
]

_T = TypeVar("_T")
_PATH = r" - at (?:`?key`? in )?`(?P<path>[^`]*)`$"  # of a bad key in a map: where the map is

BAD_BYTES = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)
"""Whatever bytes can make msgspec or our hooks raise: malformed, ill-typed, bad UTF-8, nested or big beyond reason."""

_BAD_VALUE = (TypeError, ValueError, RecursionError, OverflowError, NotImplementedError)
"""Whatever a value can make msgspec raise: unsupported types, lone surrogates, cycles, integers beyond 64 bits."""


def read_custom(frames: Sequence[Frame]) -> Any:
    """The ``dec_hook`` that reads tensors whose bytes may be in the auxiliary ones of ``frames``."""

    def read(kind: type, raw: Any) -> Any:
        if kind is Tensor:
            return read_tensor(raw, frames)
        raise NotImplementedError(kind)

    return read


_read_inline = read_custom((b"",))  # a payload alone: no auxiliary frame to point to


def compile_decoder(message: type[_T]) -> msgspec.msgpack.Decoder[_T]:
    """A decoder of ``message`` for payloads without auxiliary frames. It keeps no state: any thread may use it."""
    return msgspec.msgpack.Decoder(message, dec_hook=_read_inline, ext_hook=read_extension)


def decode_frame(decoder: msgspec.msgpack.Decoder[_T], frame: Frame, what: str) -> _T:
    """Decode a message of one frame. ``what`` names it in errors.

    Raises:
        DecodeError: the frame is not such a message.
    """
    try:
        return decoder.decode(frame)
    except BAD_BYTES as exc:
        raise_decode_error(exc, what, frame)


def decode_frames(decoder: msgspec.msgpack.Decoder[_T], frames: Sequence[Frame], what: str) -> _T:
    """Decode a message whose payload is ``frames[0]``; further frames hold the bytes of its larger tensors.

    Raises:
        DecodeError: the frames are not such a message.
    """
    if len(frames) == 1:
        return decode_frame(decoder, frames[0], what)
    if not frames:
        raise DecodeError(f"{what}: no frames at all", message_type=what, size_bytes=0)
    try:
        # A hook that knows this message's frames, instead of a decoder that remembers them: nothing is shared.
        return msgspec.msgpack.decode(
            frames[0], type=decoder.type, dec_hook=read_custom(frames), ext_hook=read_extension
        )
    except BAD_BYTES as exc:
        raise_decode_error(exc, what, frames[0])


def raise_decode_error(exc: BaseException, what: str, payload: Frame) -> NoReturn:
    """Raise the :class:`DecodeError` for ``exc``, with the path that msgspec put at the end of its text."""
    text = str(exc) or type(exc).__name__
    path = None
    if match := re.search(_PATH, text):
        path, text = match["path"], text[: match.start()]
    where = f" at {path}" if path else ""
    size_bytes = memoryview(payload).nbytes
    message = f"{what} of {size_bytes} bytes cannot be decoded{where}: {text}"
    raise DecodeError(message, message_type=what, path=path, size_bytes=size_bytes) from exc


def encode_frame(message: Any) -> bytes:
    """Encode a message that holds no tensors.

    Raises:
        EncodeError: it holds something that cannot go on the wire.
    """
    try:
        return msgspec.msgpack.encode(message)
    except _BAD_VALUE as exc:
        _raise_encode_error(exc, message)


def encode_frames(message: Any) -> list[Frame]:
    """Encode ``message`` as payload and auxiliary frames, numbered in the order of encoding.

    Raises:
        EncodeError: it holds something that cannot go on the wire.
    """
    frames: list[Frame] = [b""]
    try:
        frames[0] = msgspec.msgpack.encode(message, enc_hook=_write_custom(frames))
    except _BAD_VALUE as exc:
        _raise_encode_error(exc, message)
    return frames


def _write_custom(frames: list[Frame]) -> Any:
    def write_custom(value: Any) -> Any:
        if type(value) is Tensor:
            return write_tensor(value, frames)
        raise NotImplementedError(f"objects of type {type(value).__qualname__} cannot be sent")

    return write_custom


def _raise_encode_error(exc: BaseException, message: Any) -> NoReturn:
    what = type(message).__name__
    field, culprit = _find_culprit(message)
    raise EncodeError(
        f"{what}{field} cannot be encoded: {exc} (it is of type {type(culprit).__qualname__})",
        field=field.lstrip(".") or None,
        type_name=type(culprit).__qualname__,
    ) from exc


def _find_culprit(message: Any) -> tuple[str, Any]:
    """Path and value of the innermost part of ``message`` that does not encode: its parts are tried one by one."""
    path, value = "", message
    for _ in range(64):  # a cycle has no innermost part
        for step, part in _parts(value):
            if not _encodes(part):
                path, value = path + step, part
                break
        else:
            break
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield f".{name}", getattr(value, name)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"[{key!r}]", item
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield f"[{index}]", item


def _encodes(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value, enc_hook=_write_custom([b""]))
    except _BAD_VALUE:
        return False
    return True
