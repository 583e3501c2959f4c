"""The memory of keys and values: blocks of tokens, one tensor for each layer.

Owns the layout, how large it may become, and the copying in and out. Which block belongs to whom is the scheduler's
business, who sees what is :mod:`.attention`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK_TOKENS", "LayerShape", "PagedCache", "free_memory_bytes"]

BLOCK_TOKENS = 16

_CPU_SHARE, _ACCELERATOR_SHARE = 0.25, 0.85  # of what is free when the model has been loaded


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores of a token, twice: keys and values."""

    num_kv_heads: int
    head_dim: int


class PagedCache:
    """[num_blocks, 2, num_kv_heads, BLOCK_TOKENS, head_dim] for each layer: of a block, the keys of one head lie
    together, so that reading is copying of whole rows into what attention wants, [batch, head, token, head_dim].

    Used by one thread. On a CPU, memory is taken as blocks are written for the first time.
    """

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, like: Tensor) -> None:
        self.num_blocks = num_blocks
        self._layers = [_zeros(num_blocks, shape, like) for shape in shapes]
        self._scratch = like.new_empty(0)

    @staticmethod
    def block_bytes(shapes: Sequence[LayerShape], dtype: torch.dtype) -> int:
        """Of one block in all layers."""
        return sum(2 * shape.num_kv_heads * shape.head_dim for shape in shapes) * BLOCK_TOKENS * dtype.itemsize

    def memory(self, layer: int) -> Tensor:
        """All of a layer, [num_blocks, 2, num_kv_heads, BLOCK_TOKENS, head_dim]."""
        return self._layers[layer]

    def write(self, layer: int, rows: Tensor, keys_values: Tensor) -> None:
        """Store ``keys_values`` [num_tokens, 2, num_kv_heads, head_dim] at ``rows`` of :meth:`write_rows`."""
        memory = self._layers[layer]
        memory.view(-1, memory.shape[-1]).index_copy_(0, rows, keys_values.reshape(-1, memory.shape[-1]))

    def read(self, layer: int, rows: Tensor, num_seqs: int, *, reuse: bool = True) -> tuple[Tensor, Tensor]:
        """Keys and values at ``rows`` of :meth:`read_rows`, [num_seqs, num_kv_heads, num_tokens, head_dim] each. They
        are good until the next call, unless they have memory of their own (``reuse=False``)."""
        memory = self._layers[layer]
        _, _, num_kv_heads, _, head_dim = memory.shape
        row_size = BLOCK_TOKENS * head_dim
        size = len(rows) * row_size
        if not reuse:
            scratch = memory.new_empty(size)
        elif self._scratch.numel() < size:  # one for all layers and steps: fresh memory costs more than copying
            scratch = self._scratch = memory.new_empty(2 * size)
        else:
            scratch = self._scratch
        buffer = scratch[:size].view(-1, row_size)
        torch.index_select(memory.view(-1, row_size), 0, rows, out=buffer)
        both = buffer.view(2, num_seqs, num_kv_heads, -1, head_dim)
        return both[0], both[1]

    @staticmethod
    def write_rows(block_ids: Tensor, offsets: Tensor, num_kv_heads: int) -> Tensor:
        """Where the tokens at ``offsets`` [num_tokens] of ``block_ids`` [num_tokens] go.

        [num_tokens * 2 * num_kv_heads].
        """
        parts = torch.arange(2 * num_kv_heads, device=block_ids.device)
        heads = block_ids[:, None] * (2 * num_kv_heads) + parts  # [num_tokens, 2 * num_kv_heads]
        return (heads * BLOCK_TOKENS + offsets[:, None]).flatten()

    @staticmethod
    def read_rows(block_ids: Tensor, num_kv_heads: int) -> Tensor:
        """What to read of ``block_ids`` [num_seqs, num_blocks], in the order of [2, num_seqs, num_kv_heads,
        num_blocks]."""
        halves = torch.arange(2, device=block_ids.device)[:, None, None, None]
        heads = torch.arange(num_kv_heads, device=block_ids.device)[:, None]
        return ((block_ids[:, None] * 2 + halves) * num_kv_heads + heads).flatten()

    def close(self) -> None:
        """Free the memory."""
        self._layers.clear()
        self._scratch = self._scratch[:0].clone()


def _zeros(num_blocks: int, shape: LayerShape, like: Tensor) -> Tensor:
    """Zeroed, since what lies behind a sequence's end is masked, not skipped: a weight of 0 times garbage may be NaN.

    On a CPU through numpy, whose zeros take no physical memory until they are written to; torch.zeros touches every
    page.
    """
    size = (num_blocks, 2, shape.num_kv_heads, BLOCK_TOKENS, shape.head_dim)
    if like.device.type != "cpu":
        return torch.zeros(size, dtype=like.dtype, device=like.device)
    num_bytes = int(np.prod(size)) * like.element_size()
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(like.dtype).view(size)


def free_memory_bytes(device: torch.device) -> int:
    """What a cache may take of the memory that is free now."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return int(free_bytes * _ACCELERATOR_SHARE)
    return int(min(_available_bytes(), _cgroup_bytes()) * _CPU_SHARE)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo does not say MemAvailable: set kv_cache_memory_bytes")


def _cgroup_bytes() -> int:
    """What the container may take more; a very large number without a limit."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            return int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:  # no cgroup v2
        pass
    return 1 << 62
