"""The scheduler alone: a few exact cases, and a state machine that checks its invariants after every step."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from anyengine._wire import WireSamplingParams
from anyengine.engine.core.scheduler import Scheduler
from anyengine.engine.interfaces import ScheduledSequence, SequenceState


def sequence(name: str, num_prompt_tokens: int, *, order: int = 0, priority: int = 0) -> SequenceState:
    return SequenceState(name, [1] * num_prompt_tokens, WireSamplingParams(), priority, order)


def run(scheduled: list[ScheduledSequence]) -> dict[str, int]:
    """Do what a runner and the core do; the number of tokens for each sequence."""
    for item in scheduled:
        item.seq.num_computed_tokens += item.num_new_tokens
        if item.seq.num_computed_tokens == item.seq.num_tokens:
            item.seq.output_token_ids.append(7)
    return {item.seq.request_id: item.num_new_tokens for item in scheduled}


def test_joining_neither_recomputes_nor_delays_the_others() -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=100)
    scheduler.add(sequence("a", 10, order=1))
    assert run(scheduler.schedule()) == {"a": 10}
    assert run(scheduler.schedule()) == {"a": 1}
    scheduler.add(sequence("b", 20, order=2))
    assert run(scheduler.schedule()) == {"a": 1, "b": 20}
    assert run(scheduler.schedule()) == {"a": 1, "b": 1}
    scheduler.remove("a")
    assert run(scheduler.schedule()) == {"b": 1}


def test_a_prompt_longer_than_the_budget_is_chunked_and_decoding_goes_on() -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=10)
    scheduler.add(sequence("a", 4, order=1))
    scheduler.add(sequence("long", 25, order=2))
    scheduler.add(sequence("b", 4, order=3))
    assert run(scheduler.schedule()) == {"a": 4, "long": 6}
    assert run(scheduler.schedule()) == {"a": 1, "long": 10}
    assert run(scheduler.schedule()) == {"a": 1, "long": 9}
    assert run(scheduler.schedule()) == {"a": 1, "long": 1, "b": 4}


def test_a_prompt_that_fits_into_one_step_is_not_cut() -> None:
    scheduler = Scheduler(max_num_seqs=8, max_num_batched_tokens=10)
    scheduler.add(sequence("a", 6, order=1))
    scheduler.add(sequence("b", 6, order=2))
    scheduler.add(sequence("c", 1, order=3))
    assert run(scheduler.schedule()) == {"a": 6}
    assert run(scheduler.schedule()) == {"a": 1, "b": 6, "c": 1}


def test_a_requeued_sequence_keeps_its_place() -> None:
    scheduler = Scheduler(max_num_seqs=2, max_num_batched_tokens=10)
    first, second = sequence("a", 2, order=1), sequence("b", 2, order=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.requeue(second)
    scheduler.requeue(first)
    assert [item.seq.request_id for item in scheduler.schedule()] == ["a", "b"]


def test_a_pause_admits_nobody_and_runs_on() -> None:
    scheduler = Scheduler(max_num_seqs=2, max_num_batched_tokens=10)
    scheduler.add(sequence("a", 2, order=1))
    run(scheduler.schedule())
    scheduler.add(sequence("b", 2, order=2))
    assert run(scheduler.schedule(admit=False)) == {"a": 1}
    scheduler.remove("a")
    assert not scheduler.has_work(admit=False)
    assert scheduler.schedule(admit=False) == []
    assert run(scheduler.schedule()) == {"b": 2}


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps in any order. The model of the truth is small: who is in, since when, and how far."""

    @initialize(max_num_seqs=st.integers(1, 4), budget=st.integers(1, 12))
    def start(self, max_num_seqs: int, budget: int) -> None:
        self.max_num_seqs, self.budget = max_num_seqs, budget
        self.scheduler = Scheduler(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.live: dict[str, SequenceState] = {}
        self.goal: dict[str, int] = {}
        self.ended: Counter[str] = Counter()
        self.admission: list[SequenceState] = []
        self.added = 0

    @rule(num_prompt_tokens=st.integers(1, 40), goal=st.integers(1, 6), priority=st.sampled_from([0, 0, 0, -1, 1]))
    def add(self, num_prompt_tokens: int, goal: int, priority: int) -> None:
        self.added += 1
        seq = sequence(f"r{self.added}", num_prompt_tokens, order=self.added, priority=priority)
        self.live[seq.request_id] = seq
        self.goal[seq.request_id] = goal
        self.scheduler.add(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.live))))

    @rule()
    def abort_unknown(self) -> None:
        self.scheduler.remove("nobody")

    @rule()
    def step(self) -> None:
        waiting_before = [seq for seq in self.live.values() if seq not in self.admission]
        scheduled = self.scheduler.schedule()
        prompt_tokens = 0
        by_id = {item.seq.request_id: item for item in scheduled}
        assert len(by_id) == len(scheduled) <= self.max_num_seqs
        for seq in self.admission:  # everybody who ran goes on, and decodes one token if its prompt is done
            item = by_id[seq.request_id]
            assert item.num_new_tokens == 1 or seq.num_computed_tokens < len(seq.prompt_token_ids)
        for item in scheduled:
            seq = item.seq
            assert 1 <= item.num_new_tokens <= seq.num_tokens - seq.num_computed_tokens
            if seq.num_computed_tokens < len(seq.prompt_token_ids):
                prompt_tokens += item.num_new_tokens
                if len(seq.prompt_token_ids) <= self.budget:
                    assert item.num_new_tokens == len(seq.prompt_token_ids)
        assert prompt_tokens <= self.budget
        admitted = [item.seq for item in scheduled if item.seq in waiting_before]
        in_order = sorted(waiting_before, key=lambda seq: (seq.priority, seq.arrival_order))
        assert admitted == in_order[: len(admitted)]
        self.admission += admitted
        assert scheduled or not self.live
        run(scheduled)
        for item in scheduled:
            if len(item.seq.output_token_ids) == self.goal[item.seq.request_id]:
                self._end(item.seq.request_id)

    def _end(self, request_id: str) -> None:
        seq = self.live.pop(request_id)
        if seq in self.admission:
            self.admission.remove(seq)
        self.ended[request_id] += 1
        self.scheduler.remove(request_id)

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.num_running == len(self.admission)
        assert self.scheduler.has_work() == bool(self.live)

    def teardown(self) -> None:
        """No starvation: without new arrivals everybody ends, in a number of steps that the work itself bounds."""
        if not hasattr(self, "scheduler"):
            return
        bound = sum(2 + len(seq.prompt_token_ids) + self.goal[name] for name, seq in self.live.items())
        for _ in range(bound):
            self.step()
        assert not self.live
        assert set(self.ended) == {f"r{number}" for number in range(1, self.added + 1)}
        assert set(self.ended.values()) <= {1}


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
