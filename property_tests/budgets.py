"""How hard the property tests try, by profile: the one place where it is said.

``HYPOTHESIS_PROFILE`` names the profile: ``dev`` (seconds), ``ci`` (minutes), ``deep`` (an hour). What Hypothesis
itself is told stands in :mod:`anyengine.testing._profiles`.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Final

__all__ = ["BUDGET", "PROFILE", "SEED", "Budget"]


@dataclass(frozen=True)
class Budget:
    """``machine_steps`` are shared among the state machines of the protocol, ``scheduler_steps`` are those of the
    embedded engine's scheduler with its block pool; ``every`` explores one cancellation point of so many, in ``phases``
    relations to the engine's steps, and in ``process_phases`` with a process behind ZeroMQ."""

    machine_steps: int
    scheduler_steps: int
    every: int
    phases: int
    process_phases: int
    programs: int
    soak_requests: int


_BUDGETS: Final = {
    "dev": Budget(20_000, 2_500, every=7, phases=1, process_phases=1, programs=40, soak_requests=1_000),
    "ci": Budget(100_000, 10_000, every=1, phases=2, process_phases=1, programs=150, soak_requests=3_000),
    "deep": Budget(2_000_000, 500_000, every=1, phases=12, process_phases=8, programs=5_000, soak_requests=100_000),
}

PROFILE: Final = os.environ.get("HYPOTHESIS_PROFILE", "dev")
BUDGET: Final = _BUDGETS[PROFILE]

SEED: Final = int(
    os.environ.get("ANYENGINE_PROPERTY_SEED", random.SystemRandom().randrange(1 << 32) if PROFILE == "deep" else 0)
)
"""Where all that is random begins. Printed at the end; ``ANYENGINE_PROPERTY_SEED`` repeats a run."""
