"""The sans-I/O protocol against simple models, for as many steps as the profile says."""

from __future__ import annotations

import pytest

from budgets import BUDGET
from connection_machine import ConnectionMachine
from counted_machine import CountedMachine, run_steps
from handshake_machine import HandshakeMachine
from ranks_machine import RotaMachine, SuspicionMachine
from requests_machine import RequestsMachine
from utilities_machine import UtilitiesMachine

SHARES: dict[type[CountedMachine], float] = {  # of all steps
    ConnectionMachine: 0.15,
    HandshakeMachine: 0.15,
    RequestsMachine: 0.25,
    RotaMachine: 0.10,
    SuspicionMachine: 0.15,
    UtilitiesMachine: 0.20,
}


def test_the_shares_make_a_whole() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", SHARES, ids=lambda machine: machine.__name__)
def test_no_sequence_of_steps_leaves_the_model(machine: type[CountedMachine]) -> None:
    steps = round(BUDGET.machine_steps * SHARES[machine])
    assert run_steps(machine, steps) >= steps
