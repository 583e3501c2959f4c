"""Keys and values of the running sequences: one slot for each, all slots in one tensor per layer.

Owns which sequence sits in which slot, and the memory. Running sequences occupy slots 0 … n-1 without gaps, so a step
over all of them reads the history through a view; nothing is copied except when the last slot moves into the hole of
one that left. Transformers models write through :meth:`SlotCache.update`. Must not know requests, sampling or how a
step is made up: a paged cache can replace this module alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

__all__ = ["SlotCache"]

_MIN_LENGTH_TOKENS = 256


class _Layer:
    """One layer's buffers.

    [num_slots, num_kv_heads, length, head_dim] each, grown by doubling. The shapes come with the first keys.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys[:0, :, :0]
        self.values = values[:0, :, :0]

    def resize(self, num_slots: int, length_tokens: int, *, keep_slots: int, keep_tokens: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = _zeros((num_slots, old.shape[1], length_tokens, old.shape[3]), like=old)
            new[:keep_slots, :, :keep_tokens] = old[:keep_slots, :, :keep_tokens]
            setattr(self, name, new)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        for buffer in (self.keys, self.values):
            buffer[target, :, :num_tokens] = buffer[source, :, :num_tokens]


def _zeros(shape: tuple[int, ...], *, like: Tensor) -> Tensor:
    """Zeroed, since what lies behind a sequence's end is masked, not skipped: a weight of 0 times garbage may be NaN.

    On a CPU through numpy, whose zeros take no physical memory until they are written to; torch.zeros touches every
    page.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    num_bytes = int(np.prod(shape)) * like.element_size()
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(like.dtype).view(shape)


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Bounded by ``max_num_seqs`` slots of ``max_length_tokens``. Used by the busy loop's thread only.

    Between :meth:`select` and the end of a forward pass, :meth:`update` stores keys and values for the selected slots
    at their own positions and answers with views (or, for scattered slots, copies) of the history, trimmed to the
    longest of them.
    """

    def __init__(self, *, max_num_seqs: int, max_length_tokens: int) -> None:
        super().__init__(layers=[])
        self._max_num_seqs = max_num_seqs
        self._max_length_tokens = max_length_tokens
        self._num_slots = 0
        self._length_tokens = 0
        self._slots: dict[str, int] = {}
        self._owners: list[str] = []  # by slot
        self._lengths: list[int] = []  # by slot, in tokens: what lies beyond has no meaning
        self._buffers: list[_Layer] = []
        self._rows: slice | Tensor = slice(0, 0)
        self._row_index = torch.empty(0)
        self._positions = torch.empty(0)
        self._view_tokens = 0

    # --- slots ----------------------------------------------------------------------------------------------------

    def reserve(self, request_id: str, num_tokens: int) -> None:
        """A slot for a sequence that may grow to ``num_tokens``.

        Raises MemoryError when there is none; then nothing has changed.
        """
        if request_id in self._slots:
            raise ValueError(f"{request_id!r} has a slot already")
        if len(self._owners) == self._max_num_seqs:
            raise MemoryError(f"all {self._max_num_seqs} slots of the KV cache are taken")
        if num_tokens > self._max_length_tokens:
            raise MemoryError(f"{num_tokens} tokens do not fit in a slot of {self._max_length_tokens}")
        self._ensure_capacity(len(self._owners) + 1, num_tokens)
        self._slots[request_id] = len(self._owners)
        self._owners.append(request_id)
        self._lengths.append(0)

    def release(self, request_id: str) -> None:
        """Give the slot back; the last slot moves into the hole. Unknown ids are ignored."""
        hole = self._slots.pop(request_id, None)
        if hole is None:
            return
        mover, length_tokens = self._owners.pop(), self._lengths.pop()
        if mover == request_id:
            return
        last = len(self._owners)
        for layer in self._buffers:
            layer.move(last, hole, length_tokens)
        self._slots[mover] = hole
        self._owners[hole], self._lengths[hole] = mover, length_tokens

    def slot(self, request_id: str) -> int:
        """Where the sequence is now."""
        return self._slots[request_id]

    def clear(self) -> None:
        """Forget every sequence and free the memory."""
        self._slots.clear()
        self._owners.clear()
        self._lengths.clear()
        self._num_slots = self._length_tokens = 0
        self._buffers.clear()

    def _ensure_capacity(self, num_slots: int, length_tokens: int) -> None:
        num_slots = _doubled(self._num_slots, num_slots, self._max_num_seqs)
        length_tokens = max(length_tokens, min(_MIN_LENGTH_TOKENS, self._max_length_tokens))
        length_tokens = _doubled(self._length_tokens, length_tokens, self._max_length_tokens)
        if (num_slots, length_tokens) == (self._num_slots, self._length_tokens):
            return
        keep_tokens = max(self._lengths, default=0)
        try:
            for layer in self._buffers:  # a layer grown before a failure is merely larger than it needs to be
                layer.resize(num_slots, length_tokens, keep_slots=len(self._owners), keep_tokens=keep_tokens)
        except RuntimeError as exc:  # torch says so for both CPU and CUDA (OutOfMemoryError)
            raise MemoryError(
                f"no memory for a KV cache of {num_slots} slots of {length_tokens} tokens: {exc}"
            ) from exc
        self._num_slots, self._length_tokens = num_slots, length_tokens

    # --- one forward pass -----------------------------------------------------------------------------------------

    def select(self, slots: Sequence[int], lengths: Sequence[int], positions: Tensor) -> None:
        """The next pass computes ``positions`` [num_rows, num_new_tokens] of ``slots``.

        Afterwards they have ``lengths`` tokens; the longest of these is what the pass sees of each.
        """
        for slot, length_tokens in zip(slots, lengths, strict=True):
            self._lengths[slot] = length_tokens
        index = torch.tensor(slots, device=positions.device)
        first = slots[0]
        consecutive = list(slots) == list(range(first, first + len(slots)))
        self._rows = slice(first, first + len(slots)) if consecutive else index
        self._row_index = index[:, None]  # [num_rows, 1]
        self._positions = positions
        self._view_tokens = max(lengths)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [num_rows, num_kv_heads, num_new_tokens, head_dim].

        Answer with [num_rows, num_kv_heads, view_tokens, head_dim].
        """
        layer = self._layer(key_states, value_states, layer_idx)
        # Two index tensors around a slice put the indexed dimensions first: [num_rows, num_new_tokens, num_kv_heads,
        # head_dim].
        layer.keys[self._row_index, :, self._positions] = key_states.transpose(1, 2)
        layer.values[self._row_index, :, self._positions] = value_states.transpose(1, 2)
        view = slice(0, self._view_tokens)
        return layer.keys[self._rows, :, view], layer.values[self._rows, :, view]

    def _layer(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> _Layer:
        if layer_idx == len(self._buffers):
            layer = _Layer(key_states, value_states)
            layer.resize(self._num_slots, self._length_tokens, keep_slots=0, keep_tokens=0)
            self._buffers.append(layer)
        return self._buffers[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Transformers asks when it has no positions; ours always come with the call."""
        raise NotImplementedError("sequences in a slot cache have lengths of their own; pass position_ids")


def _doubled(current: int, needed: int, limit: int) -> int:
    """The smallest doubling of ``current`` that holds ``needed``, at most ``limit``."""
    size = max(current, 1)
    while size < needed:
        size *= 2
    return min(size, limit) if needed > current else current
