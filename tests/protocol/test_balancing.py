"""Strategies choose among the ranks that they are offered: the idlest, in turns; or the one that knows the session."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._protocol.balancing import LeastLoaded, OnlyRank, RankLoad, SessionAffinity, balancer_for
from anyengine._wire import EngineCoreRequest

REQUEST = EngineCoreRequest("r", [1])
LOADS = st.builds(
    RankLoad, st.integers(0, 20), st.integers(0, 5), st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0]) | st.floats(0, 1)
)


def of_session(session_id: str) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1], session_id=session_id)


@given(st.dictionaries(st.integers(0, 7), LOADS, min_size=1), st.integers(0, 9))
def test_the_least_loaded_rank_is_chosen(loads: dict[int, RankLoad], turns: int) -> None:
    """What waits behind a KV cache beyond its half counts up to three times on top."""
    balancer = LeastLoaded()
    for _ in range(turns):
        balancer.choose(REQUEST, loads)
    scores = {
        rank: load.num_in_flight + 6 * load.num_waiting * (max(load.kv_cache_usage, 0.5) - 0.5)
        for rank, load in loads.items()
    }
    assert scores[balancer.choose(REQUEST, loads)] == pytest.approx(min(scores.values()))


@given(st.integers(1, 8), st.integers(1, 400), st.lists(st.integers(0, 60), min_size=8, max_size=8))
def test_a_burst_levels_what_there_was(num_ranks: int, burst: int, busy: list[int]) -> None:
    balancer, in_flight = LeastLoaded(), dict(enumerate(busy[:num_ranks]))
    before = dict(in_flight)
    for _ in range(burst):
        in_flight[balancer.choose(REQUEST, {rank: RankLoad(count) for rank, count in in_flight.items()})] += 1
    raised = [count for rank, count in in_flight.items() if count > before[rank]]
    assert max(raised) - min(raised) <= 1
    assert all(count >= max(raised) - 1 for count in in_flight.values())


@given(st.integers(1, 6), st.integers(0, 9))
def test_equals_take_turns(num_ranks: int, skipped: int) -> None:
    balancer, loads = LeastLoaded(), dict.fromkeys(range(num_ranks), RankLoad(3))
    for _ in range(skipped):
        balancer.choose(REQUEST, loads)
    assert sorted(balancer.choose(REQUEST, loads) for _ in loads) == list(loads)


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.sets(st.integers(0, 3), min_size=1)), max_size=40))
def test_a_session_keeps_its_rank_while_that_takes_work(calls: list[tuple[str, set[int]]]) -> None:
    balancer, home = SessionAffinity(), dict[str, int]()
    for session_id, ranks in calls:
        chosen = balancer.choose(of_session(session_id), {rank: RankLoad(0) for rank in sorted(ranks)})
        assert chosen in ranks
        assert home.get(session_id, chosen) == chosen or home[session_id] not in ranks
        home[session_id] = chosen


def test_sessions_are_spread_and_the_oldest_forgotten() -> None:
    balancer, loads = SessionAffinity(max_sessions=3), {0: RankLoad(0), 1: RankLoad(0), 2: RankLoad(0)}
    first = {name: balancer.choose(of_session(name), loads) for name in "abc"}
    assert sorted(first.values()) == [0, 1, 2]
    busy = {**loads, first["a"]: RankLoad(9)}
    assert balancer.choose(of_session("a"), busy) == first["a"]  # used last, from now on
    for name in "de":
        balancer.choose(of_session(name), loads)
    assert balancer.choose(of_session("a"), busy) == first["a"]
    assert (
        balancer.choose(of_session("b"), {first["b"]: RankLoad(9), first["c"]: RankLoad(0)}) == first["c"]
    )  # forgotten
    assert Counter(balancer.choose(REQUEST, loads) for _ in range(9)) == {0: 3, 1: 3, 2: 3}  # no session: in turns
    for bad in (0, -1, 1.0, True):
        with pytest.raises(ValueError, match="max_sessions"):
            SessionAffinity(max_sessions=bad)  # type: ignore[arg-type]
    for kind in (LeastLoaded, 3):
        with pytest.raises(ValueError, match="otherwise"):
            SessionAffinity(kind)  # type: ignore[arg-type]


def test_a_strategy_for_each_topology() -> None:
    assert [type(balancer_for(count)) for count in (1, 2, 5)] == [OnlyRank, LeastLoaded, LeastLoaded]
    assert OnlyRank().choose(REQUEST, {4: RankLoad(7)}) == 4
