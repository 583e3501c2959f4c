"""Decides which sequences compute how many tokens in the next step.

Owns the waiting queue and the running batch, and with the KV cache who has room in it; knows nothing of models,
sockets, clocks or outputs. Sequences join and leave the batch between steps (continuous batching). Invariants, checked
by the state machine in the property tests:

* at most ``max_num_seqs`` sequences run; at most ``max_num_batched_tokens`` tokens, of prompts and answers together,
  are computed in one step;
* who decodes is served before any prompt, so that a prompt, which is cut to what is left, delays nobody by more than
  the step that it shares;
* both queues are in the order of (priority, arrival), and nobody overtakes the head of the waiting one;
* when the cache is full the last of that order is preempted: it gives up its blocks, waits at its old place and is
  computed again, as far as the cache has not kept it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anyengine.engine.interfaces import ScheduledSequence

if TYPE_CHECKING:
    from anyengine.engine.core.kv_cache import KVCache
    from anyengine.engine.interfaces import SequenceState

__all__ = ["Scheduler"]


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    budget_tokens: int
    num_tokens_of: dict[SequenceState, int] = field(default_factory=dict)
    preempts: bool = False

    def put(self, seq: SequenceState, num_new_tokens: int) -> None:
        self.num_tokens_of[seq] = num_new_tokens
        self.budget_tokens -= num_new_tokens

    def drop(self, seq: SequenceState) -> None:
        self.budget_tokens += self.num_tokens_of.pop(seq, 0)
        self.preempts = True


class Scheduler:
    """A waiting queue and a running batch, both in order.

    A sequence is in exactly one of them from :meth:`add` until :meth:`remove`. Not thread-safe: the busy loop owns it.
    Nobody starves: the first of the order is never preempted, since the cache has room for one whole sequence, and
    those that decode come to an end.
    """

    def __init__(self, cache: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[SequenceState] = []  # both sorted by _queue_key, which is unique
        self._running: list[SequenceState] = []
        self._interrupted: set[SequenceState] = set()  # those waiting that were running before
        self._preempted: list[SequenceState] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self, *, admit: bool = True) -> bool:
        """Whether :meth:`schedule` would return anything. Without ``admit``: whether anybody has begun and not
        ended."""
        return bool(self._running) or bool(self._waiting if admit else self._interrupted)

    def add(self, seq: SequenceState) -> None:
        """Queue ``seq`` behind its equals."""
        insort(self._waiting, seq, key=_queue_key)

    def remove(self, seq: SequenceState) -> None:
        """Forget a sequence, finished or aborted, wherever it is, and free its blocks."""
        for queue in (self._running, self._waiting):
            index = bisect_left(queue, _queue_key(seq), key=_queue_key)
            if index < len(queue) and queue[index] is seq:
                del queue[index]
        self._interrupted.discard(seq)
        self._cache.forget(seq)

    def schedule(self, *, admit: bool = True) -> list[ScheduledSequence]:
        """The next step: what decodes, then what prompts have left to compute, then what joins (without ``admit`` only
        who had begun and was preempted). All of them have blocks for it. The caller advances
        ``num_computed_tokens``."""
        plan = _Plan(self._max_num_batched_tokens)
        decoding = [seq for seq in self._running if _num_left(seq) == 1]
        computing_prompts = [seq for seq in self._running if _num_left(seq) != 1]
        for seq in decoding + computing_prompts:
            num_new_tokens = min(_num_left(seq), plan.budget_tokens)
            if num_new_tokens and self._make_room(seq, num_new_tokens, plan):
                plan.put(seq, num_new_tokens)
        if not plan.preempts:  # who lost its place just now would be the first to get it back
            self._admit(plan, everybody=admit)
        return [ScheduledSequence(seq, num_new_tokens) for seq, num_new_tokens in plan.num_tokens_of.items()]

    def take_preempted(self) -> list[SequenceState]:
        """Those that have lost their place in the batch since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def preempt_all(self) -> None:
        """Nobody runs, and no block is in use."""
        while self._running:
            self._preempt(self._running[-1])

    def _make_room(self, seq: SequenceState, num_new_tokens: int, plan: _Plan) -> bool:
        """Blocks for the next tokens of ``seq``, at the cost of those behind it in the order. False: it is no longer
        running."""
        if seq.num_computed_tokens == 0 and not seq.block_ids:  # preempted for somebody before it in this step
            return False
        while not self._cache.grow(seq, seq.num_computed_tokens + num_new_tokens):
            victim = self._running[-1]
            plan.drop(victim)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: SequenceState) -> None:
        self._running.pop()
        self._cache.release(seq)
        seq.num_preemptions += 1
        self.add(seq)
        self._interrupted.add(seq)
        self._preempted.append(seq)

    def _admit(self, plan: _Plan, *, everybody: bool) -> None:
        """In order, as long as the next one fits."""
        candidates = self._waiting if everybody else sorted(self._interrupted, key=_queue_key)
        admitted: list[SequenceState] = []
        for seq in candidates:
            if not plan.budget_tokens or len(self._running) == self._max_num_seqs:
                break
            self._cache.reuse(seq)
            if not self._cache.has_room(seq):
                self._cache.release(seq)
                break
            num_new_tokens = min(_num_left(seq), plan.budget_tokens)
            self._cache.grow(seq, seq.num_computed_tokens + num_new_tokens)
            self._cache.count_reuse(seq)
            insort(self._running, seq, key=_queue_key)
            plan.put(seq, num_new_tokens)
            admitted.append(seq)
        for seq in admitted:
            del self._waiting[bisect_left(self._waiting, _queue_key(seq), key=_queue_key)]
            self._interrupted.discard(seq)


def _num_left(seq: SequenceState) -> int:
    return seq.num_tokens - seq.num_computed_tokens


def _queue_key(seq: SequenceState) -> tuple[int, int]:
    return seq.priority, seq.arrival_order
