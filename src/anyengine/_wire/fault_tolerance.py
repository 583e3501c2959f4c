"""Fault tolerance: what an engine that waits after a fault is told, and what it answers.

Owns the two maps of one utility call, which the engine's input thread answers; must not know what follows from it.
Mirrors vLLM 0.32.0 ``v1/fault_tolerance/utils.py``.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

__all__ = ["HANDLE_FAULT", "INSTRUCTIONS", "FaultToleranceRequest", "FaultToleranceResult"]

HANDLE_FAULT: Final = "handle_fault_tolerance"
"""The method of the call."""

INSTRUCTIONS: Final = ("retry",)
"""What vLLM's engines can be told. They look the name up among all attributes of an object of theirs."""


class FaultToleranceRequest(msgspec.Struct, frozen=True):
    """What to do about a fault: ``instruction`` is ``"retry"``, ``params`` are plain data for it; ``request_id`` comes
    back in the result."""

    instruction: str
    params: dict[str, Any] = {}
    request_id: str = ""


class FaultToleranceResult(msgspec.Struct, frozen=True):
    """What has become of it; ``reason`` says why it failed."""

    request_id: str
    success: bool
    reason: str | None = None
