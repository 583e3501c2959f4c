"""Scheduler and KV cache together: adds, aborts, resets and steps in any order, checked after every step.

The truth is small and independent: what each slot of the cache holds (the whole beginning that it was computed from,
as a tuple), who is in, and how far everybody is. In the deep profile: 500,000 steps.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from anyengine._wire import WireSamplingParams
from anyengine.engine.core.kv_cache import KVCache
from anyengine.engine.core.scheduler import Scheduler
from anyengine.engine.interfaces import ScheduledSequence, SequenceState
from budgets import BUDGET
from counted_machine import CountedMachine, run_steps

MAX_TOKENS = 24  # of one sequence, prompt and answer


class SchedulerMachine(CountedMachine):
    """Tokens are drawn from two, so that prompts often begin alike."""

    @initialize(
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 30),
        block_tokens=st.integers(1, 5),
        spare_blocks=st.integers(0, 12),
        reuse=st.sampled_from([True, True, False]),
    )
    def start(self, max_num_seqs: int, budget: int, block_tokens: int, spare_blocks: int, reuse: bool) -> None:
        self.max_num_seqs, self.budget, self.block_tokens = max_num_seqs, budget, block_tokens
        self.num_blocks = -(-MAX_TOKENS // block_tokens) + spare_blocks
        self.cache = KVCache(num_blocks=self.num_blocks, block_tokens=block_tokens, reuse=reuse)
        self.scheduler = Scheduler(self.cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.slots: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = {}
        self.live: dict[str, SequenceState] = {}
        self.goal: dict[str, int] = {}
        self.running: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.added = 0
        self.hits = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_TOKENS - 6),
        goal=st.integers(1, 6),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        key=st.sampled_from([b"", b"", b"salt"]),
        skips=st.sampled_from([None, None, None, True]),
    )
    def add(self, prompt: list[int], goal: int, priority: int, key: bytes, skips: bool | None) -> None:
        self.added += 1
        name = f"r{self.added}"
        sampling = WireSamplingParams(skip_reading_prefix_cache=skips)
        seq = SequenceState(name, prompt, sampling, priority, self.added, cache_key=key)
        self.live[name], self.goal[name] = seq, goal
        self.scheduler.add(seq)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.live))))

    @rule(with_running=st.booleans())
    def reset(self, with_running: bool) -> None:
        if with_running:
            self.scheduler.preempt_all()
            self._note_preempted()
            assert not self.running
        in_use = any(seq.block_ids for seq in self.live.values())
        assert self.cache.clear_prefixes() is not in_use
        if not in_use:
            self.slots.clear()  # a hit from now on would find nothing there

    @rule(admit=st.sampled_from([True, True, True, False]))
    def step(self, admit: bool) -> None:
        was_running, begun = set(self.running), {name for name, seq in self.live.items() if _has_begun(seq)}
        waiting = sorted((seq for name, seq in self.live.items() if name not in was_running), key=_key)
        decoding = [name for name in was_running if _left(self.live[name]) == 1]
        had_work = self.scheduler.has_work(admit=admit)
        scheduled = self.scheduler.schedule(admit=admit)
        preempted = self._note_preempted()
        by_name = {item.seq.request_id: item for item in scheduled}
        assert len(by_name) == len(scheduled) <= self.max_num_seqs
        assert sum(item.num_new_tokens for item in scheduled) <= self.budget
        assert bool(scheduled) is had_work
        joined = [item.seq for item in scheduled if item.seq.request_id not in was_running]
        assert joined == [seq for seq in waiting if admit or seq.request_id in begun][: len(joined)]
        assert not (preempted and joined)
        self.running |= set(by_name)
        for name in decoding:  # nobody who decodes is held up by a prompt
            assert name in preempted or name in by_name or self.budget < len(decoding)
        if preempted:  # always the last ones
            assert max(_key(self.live[name]) for name in self.running) < min(_key(self.live[n]) for n in preempted)
        for item in scheduled:
            self._compute(item)

    def _note_preempted(self) -> set[str]:
        names = {seq.request_id for seq in self.scheduler.take_preempted()}
        assert names <= self.running
        self.running -= names
        return names

    def _compute(self, item: ScheduledSequence) -> None:
        """What a model runner does; it reads every slot that it relies on."""
        seq, start, end = item.seq, item.seq.num_computed_tokens, item.seq.num_computed_tokens + item.num_new_tokens
        assert 1 <= item.num_new_tokens <= _left(seq)
        tokens = (*seq.prompt_token_ids, *seq.output_token_ids)
        others = {block for other in self.live.values() if other is not seq for block in other.block_ids}
        for position in range(end):
            index, offset = divmod(position, self.block_tokens)
            slot, content = (seq.block_ids[index], offset), (seq.cache_key, tokens[: position + 1])
            if position < start:
                assert self.slots[slot] == content
            else:
                assert seq.block_ids[index] not in others, "a block that somebody else reads is written to"
                self.slots[slot] = content
        seq.num_computed_tokens = end
        self.cache.publish(seq)
        if end == seq.num_tokens:
            seq.output_token_ids.append((len(tokens) + seq.arrival_order) % 2)
            if len(seq.output_token_ids) == self.goal[seq.request_id]:
                self._end(seq.request_id)

    def _end(self, name: str) -> None:
        seq = self.live.pop(name)
        self.running.discard(name)
        self.ended[name] += 1
        self.scheduler.remove(seq)
        assert not seq.block_ids

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.num_running == len(self.running)
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert self.scheduler.has_work() is bool(self.live)
        in_use: set[int] = set()
        for name, seq in self.live.items():
            assert name in self.running or not seq.block_ids
            assert len(set(seq.block_ids)) == len(seq.block_ids)
            assert len(seq.block_ids) * self.block_tokens >= seq.num_computed_tokens
            in_use |= set(seq.block_ids)
        assert self.cache.num_free_blocks == self.num_blocks - len(in_use), "a block is lost, or freed under a user"

    def teardown(self) -> None:
        """No starvation: without new arrivals everybody ends, one at a time if need be."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(sum(2 + MAX_TOKENS for _ in self.live) * (1 + len(self.live))):
            if not self.live:
                break
            self.step(admit=True)
        assert not self.live
        assert set(self.ended) == {f"r{number}" for number in range(1, self.added + 1)}
        assert set(self.ended.values()) <= {1}
        assert self.cache.usage == 0.0


def _left(seq: SequenceState) -> int:
    return seq.num_tokens - seq.num_computed_tokens


def _has_begun(seq: SequenceState) -> bool:
    return seq.num_preemptions > 0


def _key(seq: SequenceState) -> tuple[int, int]:
    return seq.priority, seq.arrival_order


@pytest.mark.timeout(3600)
def test_no_sequence_of_steps_leaves_the_model() -> None:
    assert run_steps(SchedulerMachine, BUDGET.scheduler_steps) >= BUDGET.scheduler_steps
