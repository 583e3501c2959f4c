"""Late outputs: which of them call for a fence, which for one more abort, and which for nothing."""

from __future__ import annotations

import pytest

from anyengine._protocol import AbortLedger


def aborted(*request_ids: str, rank: int = 0) -> AbortLedger:
    ledger = AbortLedger()
    for request_id in request_ids:
        ledger.note(request_id, rank)
    return ledger


@pytest.mark.case("K24")
def test_only_what_comes_behind_a_fence_was_ignored_and_only_once() -> None:
    ledger = aborted("a")
    ledger.late_output("a")
    assert (ledger.doubtful, ledger.ignored) == ({0}, {})
    number = ledger.fence_sent(0)
    for _ in range(3):  # under way, before the fence is answered
        ledger.late_output("a")
    assert (ledger.doubtful, ledger.ignored) == (set(), {})
    ledger.fence_passed(0, number)
    for _ in range(10_000):
        ledger.late_output("a")
    assert (ledger.doubtful, ledger.ignored) == (set(), {0: ["a"]})


def test_a_fence_tells_nothing_of_what_was_sent_behind_it() -> None:
    ledger = AbortLedger()
    early = ledger.fence_sent(0)
    ledger.note("a", 0)
    ledger.fence_passed(0, early)
    ledger.late_output("a")
    assert (ledger.doubtful, ledger.ignored) == ({0}, {})
    ledger.fence_passed(0, ledger.fence_sent(0))
    ledger.late_output("a")
    assert ledger.ignored == {0: ["a"]}


def test_answers_may_be_lost_or_come_in_any_order() -> None:
    ledger = aborted("a")
    first, second = ledger.fence_sent(0), ledger.fence_sent(0)
    ledger.fence_passed(0, second)
    ledger.fence_passed(0, first)
    ledger.late_output("a")
    assert ledger.ignored == {0: ["a"]}


def test_ranks_have_fences_of_their_own() -> None:
    ledger = aborted("a", rank=1)
    ledger.fence_passed(0, ledger.fence_sent(0))
    ledger.late_output("a")
    assert (ledger.doubtful, ledger.ignored) == ({1}, {})


def test_unknown_and_finished_ids_call_for_nothing() -> None:
    ledger = aborted("a")
    ledger.fence_passed(0, ledger.fence_sent(0))
    ledger.late_output("nobody")
    assert (ledger.doubtful, ledger.ignored) == (set(), {})
