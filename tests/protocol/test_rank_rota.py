"""Ranks take turns, and leave when they die."""

from __future__ import annotations

import pytest

from anyengine._protocol.ranks import RankRota


def test_ranks_take_turns() -> None:
    rota = RankRota([2, 0, 1])
    assert [rota.next() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_dying_rank_gets_nothing_while_another_serves() -> None:
    rota = RankRota(range(3))
    assert rota.retire(1) and not rota.retire(1)
    assert rota.serving == rota.alive == (0, 2)
    assert {rota.next() for _ in range(6)} == {0, 2}
    assert 1 in rota


def test_the_last_ones_are_named_while_they_die() -> None:
    rota = RankRota(range(2))
    rota.retire(0)
    rota.retire(1)
    assert (rota.serving, rota.alive) == ((), (0, 1))
    rota.bury(0)
    assert rota.next() == 1 and 0 not in rota
    rota.bury(1)
    assert rota.alive == ()
    with pytest.raises(IndexError):
        rota.next()
