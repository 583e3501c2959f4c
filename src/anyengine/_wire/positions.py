"""How long the arrays of an output message are, and which engine sent it: read without a layout.

Owns the few bytes that this takes; must not know what any position means beyond the first two of a message.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from .codec import BAD_BYTES
from .constants import Frame

__all__ = ["Positions", "peek_rank", "positions"]

_LOOSE = msgspec.msgpack.Decoder(list[Any])


class Positions(NamedTuple):
    """The lengths of the message and of its first request output; ``None``: there is none."""

    outputs: int | None
    output: int | None


def positions(payload: Frame) -> Positions:
    """Count; a payload that cannot be read counts as nothing, since its decoder will say what is wrong with it."""
    try:
        message = _LOOSE.decode(payload)
    except BAD_BYTES:
        return Positions(None, None)
    outputs = message[1] if len(message) > 1 else None
    first = outputs[0] if type(outputs) is list and outputs else None
    return Positions(len(message), len(first) if type(first) is list else None)


def peek_rank(payload: Frame) -> int | None:
    """The engine index that a message begins with; ``None`` if it begins otherwise (its decoder will tell)."""
    head = bytes(payload[:8])
    if not head:
        return None
    at = 1 if 0x91 <= head[0] <= 0x9F else 3 if head[0] == 0xDC else 0  # short array, array of 16-bit length
    if not at or len(head) <= at:
        return None
    if head[at] < 0x80:
        return head[at]
    width_bytes = {0xCC: 1, 0xCD: 2}.get(head[at])  # larger ranks do not exist: an identity has two bytes
    value = head[at + 1 : at + 1 + width_bytes] if width_bytes else b""
    return int.from_bytes(value, "big") if value and len(value) == width_bytes else None
