"""Which blocks of the KV cache each sequence has, and which of its tokens need not be computed again.

Owns the block tables (``SequenceState.block_ids``), the names of blocks' contents and the figures of the prefix cache.
A content is named by a digest of all tokens up to its end and of what else keys and values depend on (the request's
salt, its adapter), so equal names mean equal keys and values. Mirrors ``vllm.v1.core.kv_cache_manager`` (0.32) in what
it reports. Knows neither queues nor tensors.
"""

from __future__ import annotations

import hashlib
from array import array

from anyengine._wire import PrefixCacheStats
from anyengine.engine.core.block_pool import BlockPool
from anyengine.engine.interfaces import SequenceState

__all__ = ["KVCache"]

_DIGEST_BYTES = 16


class KVCache:
    """The blocks of all sequences. Owned by the scheduler.

    Invariant: a sequence's ``block_ids`` hold at least its ``num_computed_tokens`` first tokens, and each of them is
    counted once for it in the pool, until :meth:`release`.
    """

    def __init__(self, *, num_blocks: int, block_tokens: int, reuse: bool = True) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_tokens = block_tokens
        self._reuse = reuse
        self._names: dict[str, list[bytes]] = {}  # of the full blocks of each sequence, as far as they were needed
        self._num_labelled: dict[str, int] = {}
        self._stats = PrefixCacheStats()

    @property
    def usage(self) -> float:
        """The fraction of blocks in use."""
        return 1.0 - self._pool.num_free / self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    def reuse(self, seq: SequenceState) -> None:
        """Give a sequence without blocks those that hold its beginning; ``num_computed_tokens`` says how far they
        reach. One token is always left: its logits are not in any cache."""
        if not self._reuse or seq.skips_prefix_cache:
            return
        found: list[int] = []
        for name in self._block_names(seq, (seq.num_tokens - 1) // self._block_tokens):
            block_id = self._pool.find(name)
            if block_id is None:
                break
            found.append(block_id)
        self._pool.share(found)
        seq.block_ids[:] = found
        seq.num_computed_tokens = len(found) * self._block_tokens
        self._num_labelled[seq.request_id] = len(found)

    def count_reuse(self, seq: SequenceState) -> None:
        """What :meth:`reuse` found for ``seq`` has saved work: it joins the batch."""
        stats, num_hits = self._stats, seq.num_computed_tokens
        if seq.num_preemptions:
            stats.preempted_requests += 1
            stats.preempted_queries += seq.num_tokens
            stats.preempted_hits += num_hits
        else:
            seq.num_cached_tokens = num_hits
            stats.requests += 1
            stats.queries += seq.num_tokens
            stats.hits += num_hits

    def grow(self, seq: SequenceState, num_tokens: int) -> bool:
        """Let ``seq`` have blocks for its first ``num_tokens`` tokens. False, and nothing changes, where there are too
        few."""
        missing = -(-num_tokens // self._block_tokens) - len(seq.block_ids)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            seq.block_ids += self._pool.allocate(missing)
        return True

    def has_room(self, seq: SequenceState) -> bool:
        """Whether all tokens that ``seq`` has now could be in the cache."""
        return -(-seq.num_tokens // self._block_tokens) - len(seq.block_ids) <= self._pool.num_free

    def publish(self, seq: SequenceState) -> None:
        """Blocks of ``seq`` that have become full may serve others from now on."""
        if not self._reuse:
            return
        num_full = seq.num_computed_tokens // self._block_tokens
        num_labelled = self._num_labelled.get(seq.request_id, 0)
        if num_full > num_labelled:
            names = self._block_names(seq, num_full)
            for index in range(num_labelled, num_full):
                self._pool.label(seq.block_ids[index], names[index])
            self._num_labelled[seq.request_id] = num_full

    def release(self, seq: SequenceState) -> None:
        """Take its blocks away: it has ended, or must be computed again later."""
        self._pool.release(seq.block_ids)
        seq.block_ids.clear()
        seq.num_computed_tokens = 0
        self._num_labelled.pop(seq.request_id, None)

    def forget(self, seq: SequenceState) -> None:
        """The sequence has ended."""
        self.release(seq)
        self._names.pop(seq.request_id, None)

    def clear_prefixes(self) -> bool:
        """Nothing that was computed so far serves anyone again. False, and nothing changes, while blocks are in use:
        what their sequences compute later would be found under names that claim more than they hold."""
        if self._pool.num_free != self._pool.num_blocks:
            return False
        self._pool.forget_contents()
        self._stats = PrefixCacheStats(reset=True)
        return True

    def take_stats(self) -> PrefixCacheStats:
        """The figures since the last call."""
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def _block_names(self, seq: SequenceState, num_blocks: int) -> list[bytes]:
        names = self._names.setdefault(seq.request_id, [])
        for index in range(len(names), num_blocks):
            parent = names[-1] if names else seq.cache_key
            start = index * self._block_tokens
            tokens = array("q", seq.token_slice(start, start + self._block_tokens)).tobytes()
            names.append(hashlib.blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest())
        return names[:num_blocks]
