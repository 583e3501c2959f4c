"""The slot cache as a container: what was stored for a sequence is what it reads back, wherever its slot moves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anyengine.engine.runner.kv_cache import SlotCache

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 4
MAX_SEQS, MAX_TOKENS = 5, 300


def write(cache: SlotCache, rows: dict[str, list[float]], num_new_tokens: int) -> dict[str, list[float]]:
    """Append ``num_new_tokens`` numbers to each of ``rows`` and read back what the first layer shows of each."""
    names = sorted(rows, key=cache.slot)
    lengths = [len(rows[name]) for name in names]
    starts = torch.tensor(lengths) - num_new_tokens
    positions = starts[:, None] + torch.arange(num_new_tokens)
    new = torch.tensor([rows[name][-num_new_tokens:] for name in names])[:, None, :, None]
    new = new.expand(-1, NUM_HEADS, -1, HEAD_DIM)  # [num_rows, num_heads, num_new_tokens, head_dim]
    cache.select([cache.slot(name) for name in names], lengths, positions)
    for layer in range(NUM_LAYERS):
        keys, values = cache.update(new + layer, -new, layer)
        assert keys.shape == (len(names), NUM_HEADS, max(lengths), HEAD_DIM)
    return {
        name: (keys[row, 1, :length, 3] - layer).tolist()
        for row, (name, length) in enumerate(zip(names, lengths, strict=True))
        if torch.equal(values[row, :, :length], -(keys[row, :, :length] - layer))
    }


class SlotCacheMachine(RuleBasedStateMachine):
    """Sequences join, grow in random groups and leave; each holds numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = SlotCache(max_num_seqs=MAX_SEQS, max_length_tokens=MAX_TOKENS)
        self.rows: dict[str, list[float]] = {}
        self.count = 0

    @rule(num_tokens=st.integers(1, MAX_TOKENS))
    def join(self, num_tokens: int) -> None:
        name = f"r{self.count}"
        self.count += 1
        if len(self.rows) == MAX_SEQS:
            with pytest.raises(MemoryError):
                self.cache.reserve(name, num_tokens)
            return
        self.cache.reserve(name, max(num_tokens, 100))
        self.rows[name] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), num_new_tokens=st.integers(1, 9))
    def grow(self, data: st.DataObject, num_new_tokens: int) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, unique=True))
        names = [name for name in names if len(self.rows[name]) + num_new_tokens <= 100]
        if not names:
            return
        for name in names:
            self.rows[name] += [float(self.count * 10 + step) for step in range(num_new_tokens)]
            self.count += 1
        grown = {name: self.rows[name] for name in names}
        assert write(self.cache, grown, num_new_tokens) == grown

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rows)))
        self.cache.release(name)
        self.cache.release(name)  # unknown by now: ignored
        del self.rows[name]

    @invariant()
    def slots_are_compact(self) -> None:
        assert sorted(self.cache.slot(name) for name in self.rows) == list(range(len(self.rows)))


TestSlotCache = SlotCacheMachine.TestCase
TestSlotCache.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_consecutive_slots_are_read_without_copying() -> None:
    cache = SlotCache(max_num_seqs=4, max_length_tokens=64)
    for name in "abc":
        cache.reserve(name, 64)
    new = torch.ones(2, NUM_HEADS, 1, HEAD_DIM)
    where = torch.zeros(2, 1, dtype=torch.long)
    cache.select([1, 2], [1, 1], where)
    first, _ = cache.update(new, new, 0)
    again, _ = cache.update(new * 2, new, 0)
    assert first.data_ptr() == again.data_ptr()
    cache.select([0, 2], [1, 1], where)
    scattered, _ = cache.update(new, new, 0)
    assert scattered.data_ptr() != first.data_ptr()


def test_a_slot_too_long_and_a_name_twice_are_refused() -> None:
    cache = SlotCache(max_num_seqs=4, max_length_tokens=64)
    with pytest.raises(MemoryError, match="65 tokens"):
        cache.reserve("a", 65)
    cache.reserve("a", 64)
    with pytest.raises(ValueError, match="'a'"):
        cache.reserve("a", 64)


def test_memory_that_is_not_there_is_a_memory_error_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlotCache(max_num_seqs=4, max_length_tokens=1 << 40)
    cache.reserve("a", 10)
    rows = {"a": [1.0, 2.0]}
    assert write(cache, rows, 2) == rows
    with pytest.raises(MemoryError):
        cache.reserve("b", 1 << 40)
    rows["a"].append(3.0)
    assert write(cache, rows, 1) == rows
    cache.reserve("b", 10)
    assert cache.slot("b") == 1
