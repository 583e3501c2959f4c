"""The log of a scripted engine: one record for each message that it received (and sent, if asked), one JSON line each.

Owns the shape. A body is what the message says, with what JSON cannot carry as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = ["Record", "encode_record", "read_records"]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One line of the log.

    ``direction`` is "in" or "out", with ``number`` counting the messages of that direction from 1 as a
    :class:`~anyengine.testing.scripted.Fault` does; or "event": ``scheduled``, with the id of a request that has left
    the queue, or ``fault``, with the name of one whose message has come. ``kind`` is "init", "add", "abort", "utility"
    or "unknown"; "hello", "registration", "ready", "outputs" or "reply". ``body`` is the decoded payload.
    """

    direction: Literal["in", "out", "event"]
    number: int
    kind: str
    body: Any
    at_s: float
    rank: int = 0


def encode_record(record: Record) -> bytes:
    """One line, newline included."""
    return msgspec.json.encode(record, enc_hook=repr) + b"\n"


def read_records(path: Path) -> list[Record]:
    """Every whole line of a log; an engine that was killed may have left half of one at its end."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    return [msgspec.json.decode(line, type=Record) for line in lines[:-1]]
