"""State machines that count their steps.

Owns how a machine is run for a number of steps, whatever Hypothesis makes of its examples. The models are the machines'
own.
"""

from __future__ import annotations

from typing import ClassVar

import hypothesis
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from budgets import SEED
from tally import TALLY

__all__ = ["CountedMachine", "run_steps"]

_MAX_EXAMPLES = 1_000  # in one go: Hypothesis remembers every example of a run


class CountedMachine(RuleBasedStateMachine):
    """A machine whose steps are counted; the first check of an example, before or after its first rule, is none."""

    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).steps -= 1

    @invariant()
    def a_step_is_counted(self) -> None:
        type(self).steps += 1


def run_steps(machine: type[CountedMachine], steps: int, *, shrink: bool = True) -> int:
    """Run ``machine`` for at least ``steps`` steps; how many it was. A round's seed follows from the session's."""
    machine.steps = 0
    base = settings()
    phases = base.phases if shrink else (Phase.generate,)
    length = base.stateful_step_count
    for turn in range(1_000):
        missing = steps - machine.steps
        if missing <= 0:
            break
        examples = min(_MAX_EXAMPLES, -(-missing // length))
        # A seed of our own does what derandomize does, and can be another one.
        chosen = settings(base, max_examples=examples, derandomize=False, database=None, phases=phases)
        hypothesis.seed(SEED + turn)(machine)  # type: ignore[arg-type]  # a machine keeps the seed as a test does
        run_state_machine_as_test(machine, settings=chosen)
    TALLY[f"steps of {machine.__name__}"] += machine.steps
    TALLY["steps of state machines"] += machine.steps
    return machine.steps
