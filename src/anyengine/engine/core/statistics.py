"""Counters of the engine core, for operators and for tests that count exactly.

Owns the numbers only. They are read through the ``get_engine_statistics`` utility, so a reading is ordered behind
everything the same client sent before it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["EngineStatistics"]


@dataclass(slots=True)
class EngineStatistics:
    """Counts since the engine started. Owned by the busy loop's thread."""

    num_steps: int = 0
    """Steps of the model; a turn of the busy loop that only reports errors is none."""
    num_prefill_tokens_computed: int = 0
    num_decode_tokens_computed: int = 0
    num_preemptions: int = 0
    adds_received: int = 0
    requests_failed: int = 0
    """Requests that ended with ERROR: refused, or failed at their start."""
    aborts_received: int = 0
    """Request ids in ABORT messages, not messages."""
    unknown_aborts: int = 0
    """Those of them that were not, or no longer, in the engine."""
    malformed_messages: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)
