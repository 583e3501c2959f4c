"""The life of a client, as a table: what happens, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from anyengine._protocol import ClientEvent, ClientState, Life, RankChanged, RankState, StateChanged
from anyengine._protocol.modes import mode_after
from anyengine.exceptions import EngineDeadError, LocalProtocolError

READY, PAUSED, ASLEEP = RankState.READY, RankState.PAUSED, RankState.ASLEEP
DEATH = EngineDeadError("it exploded")


def lives(*ranks: int) -> tuple[Life, list[str]]:
    """A life of some ranks that has begun, and what it tells from now on, in words."""
    told: list[str] = []

    def tell(event: ClientEvent) -> None:
        if isinstance(event, RankChanged):
            told.append(f"{event.rank} {event.rank_state.value}")
        else:
            assert isinstance(event, StateChanged)
            told.append(event.state.value)

    life = Life(tell)
    life.begin(ranks)
    return life, told


def test_a_life_without_trouble() -> None:
    life, told = lives(0)
    life.started()
    for mode in (PAUSED, PAUSED, ASLEEP, READY):
        life.confirmed(0, mode)
    life.closing()
    life.closed()
    assert ", ".join(told) == (
        "starting, 0 ready, ready, 0 paused, paused, 0 asleep, asleep, 0 ready, ready, closing, closed"
    )


def test_ranks_that_are_lost_one_by_one() -> None:
    life, told = lives(0, 1, 2)
    life.started()
    del told[:]
    life.lost(1, DEATH)
    assert life.state is ClientState.READY and life.current().degraded == (1,)
    life.confirmed(0, PAUSED)
    assert life.state is ClientState.READY
    life.confirmed(2, ASLEEP)
    assert life.state is ClientState.PAUSED
    life.confirmed(1, READY)  # an answer that was on its way
    life.lost(0, DEATH)
    assert life.state is ClientState.ASLEEP
    life.lost(2, DEATH)
    life.died(DEATH)
    life.lost(2, DEATH)
    assert life.cause is DEATH
    assert told == ["1 dead", "0 paused", "2 asleep", "paused", "0 dead", "asleep", "2 dead", "dead"]


def test_a_rank_that_is_started_again() -> None:
    life, told = lives(0)
    life.started()
    del told[:]
    life.restarting(0, DEATH, 1, 0.5)
    life.restarting(0, DEATH, 2, 1.0)
    assert life.is_running
    life.back(0)
    life.restarting(0, DEATH, 1, 0.5)
    life.lost(0, DEATH)
    life.died(DEATH)
    assert ", ".join(told) == (
        "0 restarting, restarting, 0 restarting, 0 ready, ready, 0 restarting, restarting, 0 dead, dead"
    )


def test_what_an_engine_says_before_all_are_ready_is_remembered() -> None:
    life, told = lives(0, 1)
    life.confirmed(0, PAUSED)
    assert told == ["starting"] and life.state is ClientState.STARTING
    life.started()
    assert told[1:] == ["0 paused", "1 ready", "ready"]


def test_a_start_that_fails() -> None:
    life, told = lives(0)
    life.closing()
    life.closed(DEATH)
    assert told == ["starting", "closing", "closed"] and life.cause is DEATH
    life.begin([0])
    assert life.cause is None
    with pytest.raises(LocalProtocolError, match="starting"):
        life.begin([0])


@pytest.mark.parametrize(
    ("method", "args", "answer", "before", "after"),
    [
        ("pause_scheduler", ["abort", True], None, READY, PAUSED),
        ("pause_generation", ["keep", True], None, ASLEEP, ASLEEP),
        ("resume_scheduler", [], None, PAUSED, READY),
        ("resume_scheduler", [], None, ASLEEP, ASLEEP),
        ("sleep", [], None, READY, ASLEEP),
        ("sleep", [1], None, READY, ASLEEP),
        ("sleep", [0, "abort"], None, READY, PAUSED),
        ("release_kv_cache_memory", [], None, PAUSED, ASLEEP),
        ("wake_up", [None], None, ASLEEP, READY),
        ("wake_up", [["weights"]], None, ASLEEP, ASLEEP),
        ("wake_up", [["weights"]], False, ASLEEP, ASLEEP),
        ("wake_up", [["kv_cache"]], True, ASLEEP, READY),
        ("wake_up", [["scheduling"]], None, PAUSED, READY),
        ("is_scheduler_paused", [], True, READY, PAUSED),
        ("is_scheduler_paused", [], False, PAUSED, READY),
        ("is_scheduler_paused", [], False, ASLEEP, ASLEEP),
        ("is_sleeping", [], True, READY, PAUSED),
        ("is_sleeping", [], True, ASLEEP, ASLEEP),
        ("is_sleeping", [], False, ASLEEP, READY),
        ("is_sleeping", [], "nonsense", PAUSED, PAUSED),
    ],
)
def test_what_an_answer_says(
    method: str, args: Sequence[Any], answer: Any, before: RankState, after: RankState
) -> None:
    assert mode_after(method, args, answer, before) is after


@pytest.mark.parametrize(
    ("answer", "before", "after"),
    [(True, READY, ASLEEP), (False, ASLEEP, READY), (False, PAUSED, PAUSED), (False, READY, READY)],
)
def test_old_releases_do_not_count_paused_as_sleeping(answer: bool, before: RankState, after: RankState) -> None:
    """Up to 0.16 ``is_sleeping`` speaks of the model's memory alone (vLLM 0.14 ``EngineCore.is_sleeping``)."""
    assert mode_after("is_sleeping", [], answer, before, sleep_is_pause=False) is after


def test_a_start_all_of_whose_ranks_are_started_again_meanwhile() -> None:
    life, told = lives(0)
    life.restarting(0, DEATH, 1, 0.5)
    life.started()
    assert (life.state, life.is_running) == (ClientState.RESTARTING, True)
    life.back(0)
    assert told == ["starting", "0 restarting", "restarting", "0 ready", "ready"]


def test_a_client_that_takes_no_requests_yet_is_starting() -> None:
    """Its ranks are ready, and may die, before it is."""
    life, told = lives(0, 1)
    for _ in range(2):
        life.hold()
        if life.state is ClientState.CLOSED:
            life.begin([0, 1])
        life.started()
        assert life.state is ClientState.STARTING and life.is_running
        life.lost(1, DEATH)
        assert life.state is ClientState.STARTING
        assert told == ["starting", "0 ready", "1 ready", "1 dead"]
        life.opened()
        life.opened()
        assert told.pop() == "ready" and life.state is ClientState.READY
        life.closed()
        del told[:]
    life.hold()
    life.begin([0])
    life.started()
    life.died(DEATH)
    life.opened()
    assert told == ["starting", "0 ready", "dead"]
