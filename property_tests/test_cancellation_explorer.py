"""Every public operation, cancelled at each of its steps, in every way, on three loops: nothing is left, nobody else
notices."""

from __future__ import annotations

import operations
import pytest
from budgets import BUDGET
from explorer import Explorer, Operation
from tally import TALLY

pytestmark = pytest.mark.anyio


def test_every_public_operation_is_explored() -> None:
    assert operations.missing() == [], "give it an entry in operations.py"


@pytest.mark.feature("L08")
@pytest.mark.case("K21")
@pytest.mark.parametrize("operation", operations.OPERATIONS, ids=lambda operation: operation.name)
async def test_a_cancellation_at_any_step_leaves_nothing(operation: Operation) -> None:
    explorer = Explorer(every=BUDGET.every, phases=BUDGET.phases)
    await explorer.explore(operation)
    TALLY["points of the cancellation explorer, in memory"] += explorer.points
    TALLY["violations found by the cancellation explorer"] += len(explorer.violations)
    assert not explorer.violations, "\n".join(["", *explorer.violations])
    assert explorer.points > 0 or operation.immediate
