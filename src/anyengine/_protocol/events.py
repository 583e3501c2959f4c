"""What an engine's output message can mean to a client.

Owns the event records of :class:`~anyengine._protocol.connection.Connection`; they know of no socket and no task. A
batch of request outputs is the wire's own :class:`~anyengine._wire.EngineCoreOutputs`: the hot path wraps nothing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from anyengine._wire import EngineCoreOutputs, UtilityOutput
from anyengine.exceptions import DecodeError

__all__ = ["DeadSentinel", "EEPNotification", "Event", "FaultStatus", "MalformedMessage", "UtilityReply"]


class UtilityReply(msgspec.Struct, frozen=True):
    """The answer to a utility call, or a late answer to one that nobody waits for any more."""

    rank: int
    output: UtilityOutput


class EEPNotification(msgspec.Struct, frozen=True):
    """An unsolicited message about elastic expert parallelism (wire call id -1).

    ``name`` is ``RECONFIGURE_FINISHED`` or ``SHUTDOWN_COMPLETE``; ``rank`` is the data-parallel rank that it speaks of.
    """

    name: str
    rank: int


class FaultStatus(msgspec.Struct, frozen=True):
    """An unsolicited fault-tolerance status (wire call id -2): ``status`` is ``healthy``, ``unhealthy`` or ``dead``."""

    rank: int
    status: str
    fault_info: Any = None


class DeadSentinel(msgspec.Struct, frozen=True):
    """The ``ENGINE_CORE_DEAD`` frame. It does not say which engine sent it."""


class MalformedMessage(msgspec.Struct, frozen=True):
    """A message that could not be decoded, and names no live request and no pending call. Nothing is affected by it."""

    error: DecodeError


Event: TypeAlias = EngineCoreOutputs | UtilityReply | EEPNotification | FaultStatus | DeadSentinel | MalformedMessage
