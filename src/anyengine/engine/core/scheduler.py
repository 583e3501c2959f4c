"""Decides which sequences compute how many tokens in the next step.

Owns the waiting queue and the running batch; knows nothing of models, sockets, clocks or outputs. Sequences join and
leave the batch between steps (continuous batching). Invariants, checked by the state machine in the tests:

* at most ``max_num_seqs`` sequences run; at most ``max_num_batched_tokens`` prompt tokens are scheduled in one step;
* every running sequence whose prompt is computed gets one token in every step, whoever joins or leaves;
* the waiting queue is served by (priority, arrival order), and nobody overtakes the head of it;
* a prompt is computed whole, unless it is longer than the whole budget: then in chunks, one such prompt at a time.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from anyengine.engine.interfaces import ScheduledSequence

if TYPE_CHECKING:
    from anyengine.engine.interfaces import SequenceState

__all__ = ["Scheduler"]


class Scheduler:
    """First come, first served, in two places: a waiting queue and a running batch.

    A sequence is in exactly one of them from :meth:`add` until :meth:`remove`. Not thread-safe: the busy loop owns it.
    """

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[SequenceState] = []  # sorted by _queue_key
        self._running: dict[str, SequenceState] = {}  # in the order of admission

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self, *, admit: bool = True) -> bool:
        """Whether :meth:`schedule` would return anything."""
        return bool(self._running) or (admit and bool(self._waiting))

    def add(self, seq: SequenceState) -> None:
        """Queue ``seq`` behind its equals."""
        insort(self._waiting, seq, key=_queue_key)

    def remove(self, request_id: str) -> None:
        """Forget a sequence, finished or aborted, wherever it is. Unknown ids are ignored."""
        if self._running.pop(request_id, None) is None:
            self._waiting = [seq for seq in self._waiting if seq.request_id != request_id]

    def requeue(self, seq: SequenceState) -> None:
        """Put a sequence that was just admitted back to its place in the queue: there was no room for it after all."""
        del self._running[seq.request_id]
        self.add(seq)

    def schedule(self, *, admit: bool = True) -> list[ScheduledSequence]:
        """The next step: what runs, then (with ``admit``) what joins. The caller advances ``num_computed_tokens``."""
        budget_tokens = self._max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        for seq in self._running.values():
            num_new_tokens = seq.num_tokens - seq.num_computed_tokens
            if seq.num_computed_tokens < len(seq.prompt_token_ids):  # the one prompt that did not fit into a step
                num_new_tokens = min(num_new_tokens, budget_tokens)
                budget_tokens -= num_new_tokens
            scheduled.append(ScheduledSequence(seq, num_new_tokens))
        if admit:
            scheduled += self._admit(budget_tokens)
        return scheduled

    def _admit(self, budget_tokens: int) -> list[ScheduledSequence]:
        admitted: list[ScheduledSequence] = []
        for seq in self._waiting:
            num_prompt_tokens = len(seq.prompt_token_ids) - seq.num_computed_tokens
            fits = num_prompt_tokens <= budget_tokens or num_prompt_tokens > self._max_num_batched_tokens
            if len(self._running) >= self._max_num_seqs or budget_tokens <= 0 or not fits:
                break
            num_new_tokens = min(num_prompt_tokens, budget_tokens)
            budget_tokens -= num_new_tokens
            self._running[seq.request_id] = seq
            admitted.append(ScheduledSequence(seq, num_new_tokens))
        del self._waiting[: len(admitted)]
        return admitted


def _queue_key(seq: SequenceState) -> tuple[int, int]:
    return seq.priority, seq.arrival_order
