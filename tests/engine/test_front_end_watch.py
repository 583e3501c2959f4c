"""When a front end counts as gone: deadlines without a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anyengine.engine.serving.front_ends import FrontEndsGone, FrontEndWatch


def watch(num_clients: int = 1) -> FrontEndWatch:
    return FrontEndWatch(num_clients, grace_s=5, first_contact_s=100, now_s=0)


def test_one_that_never_came_has_long_to_come() -> None:
    it = watch()
    assert it.timeout_s(1) == 99
    assert it.expire(99.9) is None
    assert it.expire(100) == FrontEndsGone((0,), all_gone=True)
    assert it.timeout_s(100) is None
    assert it.expire(1000) is None  # told once


def test_one_that_was_there_has_its_grace() -> None:
    it = watch()
    it.connected(0)
    assert it.timeout_s(50) is None
    it.disconnected(0, 50)
    it.disconnected(0, 54)  # an attempt to reconnect that failed
    assert it.timeout_s(54) == 1
    assert it.expire(55) == FrontEndsGone((0,), all_gone=True)
    it.disconnected(0, 56)
    assert it.timeout_s(56) is None


def test_one_that_comes_back_is_there() -> None:
    it = watch()
    it.connected(0)
    it.disconnected(0, 50)
    it.connected(0)
    assert it.expire(1000) is None
    it.disconnected(0, 2000)
    assert it.expire(2004) is None


def test_the_last_of_several() -> None:
    it = watch(2)
    it.connected(0)
    it.connected(1)
    it.disconnected(0, 10)
    assert it.expire(15) == FrontEndsGone((0,), all_gone=False)
    it.disconnected(1, 20)
    it.connected(0)  # late, but there
    assert it.expire(25) == FrontEndsGone((1,), all_gone=False)
    it.disconnected(0, 30)
    assert it.expire(35) == FrontEndsGone((0,), all_gone=True)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 7)), max_size=40))
def test_gone_means_away_for_the_whole_grace(events: list[tuple[bool, int, int]]) -> None:
    """Against a naive record of who was last seen when."""
    it, now = watch(3), 0
    away_since: dict[int, int] = {}
    limits, told = dict.fromkeys(range(3), 100), set[int]()
    for connects, client, passed in events:
        now += passed
        gone = it.expire(now)
        due = {c for c in range(3) if c not in told and c in limits and now >= away_since.get(c, 0) + limits[c]}
        assert set(gone.client_indices if gone else ()) == due
        told |= due
        if connects:
            it.connected(client)
            limits.pop(client, None)
            told.discard(client)
        elif client not in told and client not in limits:
            it.disconnected(client, now)
            away_since[client], limits[client] = now, 5
        elif client in limits:
            it.disconnected(client, now)
