"""The status lines that an engine process of ours writes to its standard output: one JSON object a line.

Owns the shape only. Both ends use it: the engine writes, the supervisor reads. A child's logs go to standard error; its
standard output carries nothing else than these lines (the child points file descriptor 1 at standard error for
everybody else). The wire handshake has no message for progress or for the cause of a failed start; this is ours.
"""

from __future__ import annotations

import msgspec

__all__ = ["ChildError", "Status", "decode_status", "encode_status"]


class ChildError(msgspec.Struct, frozen=True, omit_defaults=True):
    """The exception that ended the child: ``type`` is its qualified name, ``message`` its text."""

    type: str
    message: str
    traceback: str = ""


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """One report of a child.

    ``stage`` is one of ``importing``, ``configuring``, ``resolving``, ``downloading``, ``loading``, ``handshake``,
    ``ready``, ``failed``; or, from the client itself, ``spawned`` and, where somebody else starts the engines,
    ``listening``, with the address for them as ``detail``. ``fraction`` is the progress within the stage, 0 to 1, or
    ``None``. ``model_dir`` names a local directory with ``config.json``, ``tokenizer.json`` and friends, as soon as the
    child knows it.
    """

    stage: str
    detail: str = ""
    fraction: float | None = None
    model_dir: str | None = None
    error: ChildError | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Status)


def encode_status(status: Status) -> bytes:
    """One line, newline included."""
    return _encoder.encode(status) + b"\n"


def decode_status(line: bytes) -> Status | None:
    """The status in ``line``, or ``None`` when the line is something else (a library that printed)."""
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
