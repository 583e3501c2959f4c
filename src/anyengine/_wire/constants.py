"""Fixed numbers and bytes of the wire: frame types, finish reasons, reserved call ids, engine identities.

Owns constants and their trivial conversions; must not know how any message is laid out.
Mirrors vLLM 0.32.0 ``v1/engine/__init__.py`` (EngineCoreRequestType, FinishReason, the reserved call ids).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, TypeAlias

from anyengine.exceptions import DecodeError

__all__ = [
    "EEP_NOTIFICATION_CALL_ID",
    "ENGINE_CORE_DEAD",
    "FAULT_STATUS_CALL_ID",
    "FinishReason",
    "Frame",
    "RequestType",
    "engine_identity",
    "finish_reason_name",
    "rank_of",
]

Frame: TypeAlias = bytes | bytearray | memoryview
"""One frame of a message, as it came from the transport or goes to it."""

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
"""The dead sentinel: the single raw frame an engine sends as its last word. Not msgpack."""

EEP_NOTIFICATION_CALL_ID: Final = -1
FAULT_STATUS_CALL_ID: Final = -2

_MAX_RANK: Final = 0xFFFF


class RequestType(bytes, Enum):
    """The type frame of a message from client (or coordinator) to engine."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class FinishReason(IntEnum):
    """Why a request ended. Later releases may send further numbers: wire structs carry a plain ``int``."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4


def finish_reason_name(value: int | None) -> str | None:
    """The name users see: ``"stop"``, ``"length"``, ...; ``"unknown:9"`` for a number this release does not know."""
    if value is None:
        return None
    try:
        return FinishReason(value).name.lower()
    except ValueError:
        return f"unknown:{value}"


def engine_identity(rank: int) -> bytes:
    """The routing identity of the engine with data-parallel index ``rank``: two bytes, little endian.

    Raises:
        ValueError: ``rank`` does not fit in two bytes.
    """
    if not 0 <= rank <= _MAX_RANK:
        raise ValueError(f"rank={rank!r} must be between 0 and {_MAX_RANK}")
    return rank.to_bytes(2, "little")


def rank_of(identity: Frame) -> int:
    """The rank that an identity frame stands for.

    Raises:
        DecodeError: the frame is not two bytes long.
    """
    if len(identity) != 2:
        raise DecodeError(f"an engine identity has 2 bytes, not {len(identity)}: {bytes(identity[:16])!r}")
    return int.from_bytes(identity, "little")
