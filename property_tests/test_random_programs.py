"""Concurrent programs that Hypothesis writes: whatever they do, nothing is lost, doubled, left behind or left waiting.

A program that fails is shrunk to the shortest one that does; here, it becomes a named test (``test_regressions.py``).
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, seed, settings

from budgets import BUDGET, SEED
from programs import PROGRAMS, Program, run_program
from tally import TALLY

pytestmark = pytest.mark.anyio


@pytest.mark.feature("L08")
@pytest.mark.case("K38")
@pytest.mark.timeout(3600)
@seed(SEED)
@settings(
    max_examples=BUDGET.programs,
    derandomize=False,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(program=PROGRAMS)
async def test_no_program_leaves_anything_behind(program: Program) -> None:
    TALLY["random programs"] += 1
    assert await run_program(program) == []
