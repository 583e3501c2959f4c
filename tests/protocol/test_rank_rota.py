"""Ranks take requests until they die."""

from __future__ import annotations

from anyengine._protocol.ranks import RankRota


def test_a_dying_rank_gets_nothing_while_another_serves() -> None:
    rota = RankRota(range(3))
    assert rota.retire(1) and not rota.retire(1)
    assert rota.serving == rota.alive == (0, 2)
    assert 1 in rota
    rota.bury(1)
    assert 1 not in rota
    rota.revive(1)
    assert rota.serving == (0, 1, 2)


def test_the_last_ones_are_named_while_they_die() -> None:
    rota = RankRota(range(2))
    rota.retire(0)
    rota.retire(1)
    assert (rota.serving, rota.alive) == ((), (0, 1))
    rota.bury(0)
    assert rota.alive == (1,) and 0 not in rota
    rota.bury(1)
    assert rota.alive == ()
