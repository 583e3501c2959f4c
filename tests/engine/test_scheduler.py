"""The scheduler alone, in exact cases; property_tests/test_scheduler_machine.py has all others."""

from __future__ import annotations

from anyengine._wire import WireSamplingParams
from anyengine.engine.core.kv_cache import KVCache
from anyengine.engine.core.scheduler import Scheduler
from anyengine.engine.interfaces import ScheduledSequence, SequenceState


def scheduler_of(*, max_num_seqs: int, max_num_batched_tokens: int, num_blocks: int = 100) -> Scheduler:
    cache = KVCache(num_blocks=num_blocks, block_tokens=4)
    return Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


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
    scheduler = scheduler_of(max_num_seqs=8, max_num_batched_tokens=100)
    first = sequence("a", 10, order=1)
    scheduler.add(first)
    assert run(scheduler.schedule()) == {"a": 10}
    assert run(scheduler.schedule()) == {"a": 1}
    scheduler.add(sequence("b", 20, order=2))
    assert run(scheduler.schedule()) == {"a": 1, "b": 20}
    assert run(scheduler.schedule()) == {"a": 1, "b": 1}
    scheduler.remove(first)
    scheduler.remove(first)  # unknown by now: ignored
    assert run(scheduler.schedule()) == {"b": 1}


def test_a_prompt_longer_than_the_budget_is_chunked_and_decoding_goes_on() -> None:
    scheduler = scheduler_of(max_num_seqs=8, max_num_batched_tokens=10)
    scheduler.add(sequence("a", 4, order=1))
    scheduler.add(sequence("long", 25, order=2))
    scheduler.add(sequence("b", 4, order=3))
    assert run(scheduler.schedule()) == {"a": 4, "long": 6}
    assert run(scheduler.schedule()) == {"a": 1, "long": 9}
    assert run(scheduler.schedule()) == {"a": 1, "long": 9}
    assert run(scheduler.schedule()) == {"a": 1, "long": 1, "b": 4}


def test_prompts_and_answers_share_one_budget() -> None:
    scheduler = scheduler_of(max_num_seqs=8, max_num_batched_tokens=3)
    seqs = [sequence(name, 1, order=order) for order, name in enumerate("abcd")]
    for seq in seqs:
        scheduler.add(seq)
    assert run(scheduler.schedule()) == {"a": 1, "b": 1, "c": 1}
    assert run(scheduler.schedule()) == {"a": 1, "b": 1, "c": 1}  # nothing is left for d
    scheduler.remove(seqs[0])
    assert run(scheduler.schedule()) == {"b": 1, "c": 1, "d": 1}


def test_the_last_of_the_order_makes_room() -> None:
    scheduler = scheduler_of(max_num_seqs=8, max_num_batched_tokens=20, num_blocks=3)
    first, second, third = (sequence(name, 4, order=order) for order, name in enumerate("abc"))
    for seq in (first, second, third):
        seq.prompt_token_ids[0] = seq.arrival_order  # no beginning in common
        scheduler.add(seq)
    assert run(scheduler.schedule()) == {"a": 4, "b": 4, "c": 4}
    assert run(scheduler.schedule()) == {"a": 1}  # needs a second block, which c gives; b needs one, which is its own
    assert scheduler.take_preempted() == [third, second]
    scheduler.remove(first)
    assert run(scheduler.schedule()) == {"b": 5}  # c would need two blocks, and does not go before b
    scheduler.remove(second)
    assert run(scheduler.schedule()) == {"c": 5}
    assert (second.num_preemptions, third.num_preemptions) == (1, 1)


def test_a_pause_admits_nobody_and_runs_on() -> None:
    scheduler = scheduler_of(max_num_seqs=2, max_num_batched_tokens=10)
    first = sequence("a", 2, order=1)
    scheduler.add(first)
    run(scheduler.schedule())
    scheduler.add(sequence("b", 2, order=2))
    assert run(scheduler.schedule(admit=False)) == {"a": 1}
    scheduler.remove(first)
    assert not scheduler.has_work(admit=False)
    assert scheduler.schedule(admit=False) == []
    assert run(scheduler.schedule()) == {"b": 2}
