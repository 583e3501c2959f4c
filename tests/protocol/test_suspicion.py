"""Who is gone? Told from evidence that names nobody, whatever the order in which it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._protocol.suspicion import Evidence, Suspicion

LINKS: tuple[Evidence, ...] = ("input", "output")


def connected(ranks: int) -> Suspicion:
    """Every rank with both connections; rank r has the numbers r and 100 + r."""
    suspicion = Suspicion(range(ranks))
    for rank in range(ranks):
        suspicion.connected("input", rank)
        suspicion.connected("output", 100 + rank)
    return suspicion


@pytest.mark.parametrize("link", LINKS)
def test_a_single_engine_is_known_at_once(link: Evidence) -> None:
    suspicion = connected(1)
    suspicion.disconnected(link, 0 if link == "input" else 100)
    assert suspicion.guilty() == (0, f"its {link} connection is gone")


def test_a_single_engines_sentinel_is_its_own() -> None:
    suspicion = connected(1)
    suspicion.sentinel()
    assert suspicion.guilty() == (0, "it sent ENGINE_CORE_DEAD")


def test_of_several_it_is_the_one_that_does_not_answer() -> None:
    suspicion = connected(3)
    suspicion.disconnected("output", 101)
    assert suspicion.guilty() is None and suspicion.suspects == (0, 1, 2)
    suspicion.cleared(2, suspicion.count)
    assert suspicion.guilty() is None  # rank 0 may only be busy
    suspicion.cleared(0, suspicion.count)
    assert suspicion.guilty() == (1, "its output connection is gone")
    suspicion.retired(1)
    assert suspicion.guilty() is None and suspicion.suspects == ()


def test_an_answer_to_an_older_call_clears_nobody() -> None:
    suspicion = connected(2)
    before = suspicion.count
    suspicion.sentinel()
    suspicion.cleared(0, before)
    assert suspicion.suspects == (0, 1)


def test_a_stray_connection_that_comes_and_goes_is_no_evidence() -> None:
    suspicion = connected(2)
    suspicion.connected("input", 7)
    suspicion.disconnected("input", 7)
    assert suspicion.suspects == () and suspicion.guilty() is None


def test_a_connection_that_comes_back_was_no_death() -> None:
    suspicion = connected(2)
    suspicion.disconnected("input", 0)
    suspicion.connected("input", 8)
    assert suspicion.suspects == () and suspicion.guilty() is None


def test_what_a_dead_engine_had_is_no_evidence_against_the_others() -> None:
    """Its exit was seen first; then come its sentinel's and its connections' ends."""
    suspicion = connected(2)
    suspicion.retired(0)
    suspicion.disconnected("output", 100)
    suspicion.disconnected("input", 0)
    assert suspicion.suspects == () and suspicion.guilty() is None
    assert suspicion.surplus_outputs() == 0


def test_a_sentinel_that_is_read_after_its_engines_exit_was_seen() -> None:
    suspicion = connected(3)
    suspicion.retired(2)
    for _ in range(3):  # a broken one may repeat itself
        suspicion.sentinel()
        assert suspicion.suspects == ()
    suspicion.ended(2)
    suspicion.sentinel()  # this is another's
    assert suspicion.suspects == (0, 1)


@pytest.mark.parametrize("times", [1, 2, 3, 100])
def test_one_that_repeats_its_sentinel_speaks_for_itself_alone(times: int) -> None:
    suspicion = connected(3)
    for _ in range(times):
        suspicion.sentinel()
    assert suspicion.guilty() is None
    for rank in (0, 2):
        suspicion.cleared(rank, suspicion.count)
    assert suspicion.guilty() == (1, "it sent ENGINE_CORE_DEAD")
    suspicion.retired(1)
    for _ in range(times):
        suspicion.sentinel()
    assert suspicion.guilty() is None and suspicion.suspects == ()


def test_an_engine_that_has_ended_says_nothing_any_more() -> None:
    suspicion = connected(2)
    suspicion.retired(1)
    suspicion.ended(1)
    suspicion.sentinel()
    assert suspicion.guilty() == (0, "it sent ENGINE_CORE_DEAD")


def test_a_sentinel_is_owned_by_whoever_ends_next() -> None:
    suspicion = connected(2)
    suspicion.sentinel()
    suspicion.retired(1)
    assert suspicion.guilty() is None and suspicion.suspects == ()


@given(data=st.data(), ranks=st.integers(1, 6))
def test_exactly_the_broken_ones_are_found(data: st.DataObject, ranks: int) -> None:
    """Some ranks break, in any order, mixed with answers. One that is deaf cannot be sent a call, which names it; one
    that is mute or dead does not answer; a dead one's process ends later, and its connections with it. Nobody else is
    ever named, and in the end everyone who is broken has been."""
    suspicion = connected(ranks)
    broken = data.draw(st.dictionaries(st.integers(0, ranks - 1), st.sampled_from([*LINKS, "sentinel"])))
    pending: list[tuple[int, int]] = []  # calls that have been made and not been answered: rank, count
    happened: set[int] = set()
    named: set[int] = set()

    def name(rank: int) -> None:
        assert rank in happened
        named.add(rank)
        suspicion.retired(rank)

    def investigate() -> None:
        while (found := suspicion.guilty()) is not None:
            name(found[0])
        for rank in suspicion.suspects:
            if rank in happened and broken[rank] == "input":
                name(rank)
            else:
                pending.append((rank, suspicion.count))

    def answer_some(count: int) -> None:
        for _ in range(min(count, len(pending))):
            rank, count_then = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
            if rank not in happened:
                suspicion.cleared(rank, count_then)
                while (found := suspicion.guilty()) is not None:
                    name(found[0])

    for rank in data.draw(st.permutations(sorted(broken))):
        happened.add(rank)
        if broken[rank] == "sentinel":
            suspicion.sentinel()
        elif broken[rank] == "input":
            suspicion.disconnected("input", rank)
        else:
            suspicion.disconnected("output", 100 + rank)
        investigate()
        answer_some(data.draw(st.integers(0, 3)))
    answer_some(len(pending))
    ended: set[int] = set()
    while ending := {rank for rank in happened if broken[rank] == "sentinel" or rank in named} - ended:
        ended.add(rank := min(ending))
        for link, number in zip(LINKS, (rank, 100 + rank), strict=True):
            if broken[rank] != link:
                suspicion.disconnected(link, number)
                investigate()
                answer_some(len(pending))
    assert named == happened
