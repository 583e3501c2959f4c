"""Every public operation, cancelled at each of its steps, in every way, on three loops: nothing is left, nobody else
notices."""

from __future__ import annotations

import pytest

import operations
from benches import ProcessBench
from budgets import BUDGET
from explorer import Explorer, Operation
from operations import IN_PROCESSES, OPERATIONS
from tally import TALLY

pytestmark = pytest.mark.anyio


def test_every_public_operation_is_explored() -> None:
    assert operations.missing() == [], "give it an entry in operations.py"


def check(explorer: Explorer, where: str) -> None:
    TALLY[f"points of the cancellation explorer, {where}"] += explorer.points
    TALLY["violations found by the cancellation explorer"] += len(explorer.violations)
    assert not explorer.violations, "\n".join(["", *explorer.violations])


@pytest.mark.feature("L08")
@pytest.mark.case("K21", budget_s=1)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
async def test_a_cancellation_at_any_step_leaves_nothing(operation: Operation) -> None:
    explorer = Explorer(every=BUDGET.every, phases=BUDGET.phases, patience_s=1)
    await explorer.explore(operation)
    check(explorer, "in memory")
    assert explorer.points > 0 or operation.immediate


@pytest.mark.feature("L08")
@pytest.mark.case("K21")
@pytest.mark.timeout(3600)
async def test_nor_does_it_with_processes_behind_zeromq() -> None:
    explorer = Explorer(ProcessBench, every=BUDGET.every, phases=BUDGET.process_phases)
    await explorer.explore(*[operation for operation in OPERATIONS if operation.name in IN_PROCESSES])
    check(explorer, "in processes")
