"""Attention over the blocks of the cache, for the tokens of many sequences in one pass.

Owns what a step's tokens see and how it is computed: sequences with one new token together, by a kernel or else in
groups of similar length; prompts and chunks one by one, as their own length makes them large. Everything that does not
depend on the layer is made once for a step. Must not know the model, sampling or the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from anyengine.engine.runner.kernels import DecodeRows
from anyengine.engine.runner.paged_cache import BLOCK_TOKENS, PagedCache

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["AttentionStep", "Span", "attend_single"]

_SPLIT_TOKENS = 512
"""So many tokens of padding cost as much as another group."""


@dataclass(frozen=True, slots=True)
class Span:
    """The new tokens ``start`` to ``end`` of one sequence, and the blocks that hold all up to ``end``."""

    block_ids: Sequence[int]
    start: int
    end: int


@dataclass(slots=True)
class _Group:
    """Spans of one token each, in rows ``first`` and following of the step."""

    first: int
    count: int
    block_ids: Tensor  # [count, num_blocks]
    mask: Tensor  # [count, 1, 1, num_tokens], added to the scores


@dataclass(slots=True)
class _Chunk:
    """A span of several tokens, in rows ``first`` and following of the step."""

    first: int
    count: int
    block_ids: Tensor | None  # [1, num_blocks]; None: all that it sees is new
    mask: Tensor | None  # [count, num_tokens]; None: causal


class AttentionStep:
    """What one forward pass needs to know. ``spans`` in the order of its rows: those of one token first, the longest
    of them first of all. With ``kernels`` those of one token are left to one of them, if it can do the layer."""

    def __init__(
        self,
        cache: PagedCache,
        spans: Sequence[Span],
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self._cache = cache
        self._kernels = kernels
        self._spans = spans
        self._dtype = dtype
        self._device = device
        self._num_single = next((i for i, span in enumerate(spans) if span.end - span.start > 1), len(spans))
        single, chunks = spans[: self._num_single], spans[self._num_single :]
        positions = [torch.tensor([span.start for span in single], dtype=torch.int64, device=device)]
        positions += [torch.arange(span.start, span.end, device=device) for span in chunks]
        self.positions: Tensor = torch.cat(positions)  # [num_tokens]
        blocks = [torch.tensor([span.block_ids[span.start // BLOCK_TOKENS] for span in single], dtype=torch.int64)]
        blocks += [
            torch.tensor(span.block_ids)[at.cpu() // BLOCK_TOKENS]
            for span, at in zip(chunks, positions[1:], strict=True)
        ]
        self._new_blocks = torch.cat(blocks).to(device)
        self._new_offsets = self.positions % BLOCK_TOKENS
        self._write_rows: dict[tuple[int, int], Tensor] = {}  # by first row and number of heads
        self._read_rows: dict[tuple[int, int], Tensor] = {}  # by identity of the block ids, which live as long as we
        self._groups: dict[int | None, list[_Group]] = {}
        self._chunks: dict[int | None, list[_Chunk]] = {}
        self._rows: dict[int | None, DecodeRows] = {}

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys_values: Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the new keys and values [num_tokens, 2, num_kv_heads, head_dim]; what ``queries`` [num_tokens,
        num_heads, head_dim] find: [num_tokens, num_heads, head_dim]. Nobody sees what another sequence stores now."""
        num_heads, head_dim = queries.shape[1:]
        num_kv_heads = keys_values.shape[2]
        kernel = None
        if self._kernels is not None and self._num_single:
            kernel = self._kernels.decode_attention(num_heads, num_kv_heads, head_dim, softcap)
        self._store(layer, keys_values, 0 if kernel is None else self._num_single)
        found: list[Tensor] = []
        if kernel is not None:
            single = self._num_single
            found.append(torch.empty((single, num_heads, head_dim), dtype=queries.dtype))
            q, kv = _dense_rows(queries[:single]), _dense_rows(keys_values[:single])
            kernel(self._decode_rows(window_tokens), q, kv, self._cache.memory(layer), found[0], scale)
        else:
            for group in self._groups_for(window_tokens):
                q = queries[group.first : group.first + group.count] * scale
                keys, values = self._read(layer, group.block_ids, num_kv_heads)
                found.append(attend_single(q, keys, values, group.mask, softcap))
        for chunk in self._chunks_for(window_tokens):
            rows_ = slice(chunk.first, chunk.first + chunk.count)
            if chunk.block_ids is None:
                keys, values = keys_values[rows_].permute(1, 2, 0, 3)[:, None]
            else:
                keys, values = self._read(layer, chunk.block_ids, num_kv_heads)
            found.append(_attend_chunk(queries[rows_], keys, values, chunk.mask, scale, softcap))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _store(self, layer: int, keys_values: Tensor, first: int) -> None:
        """Those of rows ``first`` and following."""
        num_kv_heads = keys_values.shape[2]
        if first == len(keys_values):
            return
        if (first, num_kv_heads) not in self._write_rows:
            rows = self._cache.write_rows(self._new_blocks[first:], self._new_offsets[first:], num_kv_heads)
            self._write_rows[first, num_kv_heads] = rows
        self._cache.write(layer, self._write_rows[first, num_kv_heads], keys_values[first:])

    def _read(self, layer: int, block_ids: Tensor, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        key = (id(block_ids), num_kv_heads)
        if key not in self._read_rows:
            self._read_rows[key] = self._cache.read_rows(block_ids, num_kv_heads)
        return self._cache.read(layer, self._read_rows[key], len(block_ids))

    def _groups_for(self, window_tokens: int | None) -> list[_Group]:
        if window_tokens not in self._groups:
            self._groups[window_tokens] = self._make_groups(window_tokens)
        return self._groups[window_tokens]

    def _chunks_for(self, window_tokens: int | None) -> list[_Chunk]:
        if window_tokens not in self._chunks:
            self._chunks[window_tokens] = self._make_chunks(window_tokens)
        return self._chunks[window_tokens]

    def _decode_rows(self, window_tokens: int | None) -> DecodeRows:
        if window_tokens not in self._rows:
            spans = self._spans[: self._num_single]
            table = np.zeros((len(spans), max(len(span.block_ids) for span in spans)), dtype=np.int64)
            for row, span in zip(table, spans, strict=True):
                row[: len(span.block_ids)] = span.block_ids
            ends = np.array([span.end for span in spans], dtype=np.int64)
            starts = np.zeros_like(ends) if window_tokens is None else np.maximum(ends - window_tokens, 0)
            self._rows[window_tokens] = DecodeRows(table, starts, ends)
        return self._rows[window_tokens]

    def _make_groups(self, window_tokens: int | None) -> list[_Group]:
        seen = [_seen_blocks(span, window_tokens) for span in self._spans[: self._num_single]]
        groups: list[_Group] = []
        first = 0
        while first < len(seen):
            widest = len(seen[first])
            last = first + 1
            while last < len(seen) and (widest - len(seen[last])) * BLOCK_TOKENS * (len(seen) - last) < _SPLIT_TOKENS:
                last += 1
            groups.append(self._make_group(first, seen[first:last], window_tokens))
            first = last
        return groups

    def _make_group(self, first: int, seen: Sequence[range], window_tokens: int | None) -> _Group:
        spans = self._spans[first : first + len(seen)]
        widest = max(map(len, seen))
        # What is too short repeats its last block: no content of anybody else gets near it.
        block_ids = [
            [span.block_ids[min(blocks.start + i, blocks.stop - 1)] for i in range(widest)]
            for span, blocks in zip(spans, seen, strict=True)
        ]
        starts = torch.tensor([blocks.start * BLOCK_TOKENS for blocks in seen], device=self._device)[:, None]
        ends = torch.tensor([span.end for span in spans], device=self._device)[:, None]
        positions = starts + torch.arange(widest * BLOCK_TOKENS, device=self._device)  # [count, num_tokens]
        visible = positions < ends
        if window_tokens is not None:
            visible &= positions >= ends - window_tokens
        return _Group(
            first, len(seen), torch.tensor(block_ids, device=self._device), self._mask(visible)[:, None, None]
        )

    def _make_chunks(self, window_tokens: int | None) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        first = self._num_single
        for span in self._spans[self._num_single :]:
            count = span.end - span.start
            sees_all = window_tokens is None or span.end <= window_tokens
            if span.start == 0 and sees_all:
                chunks.append(_Chunk(first, count, None, None))
            else:
                chunks.append(self._make_chunk(first, span, window_tokens))
            first += count
        return chunks

    def _make_chunk(self, first: int, span: Span, window_tokens: int | None) -> _Chunk:
        blocks = _seen_blocks(span, window_tokens)
        block_ids = torch.tensor([span.block_ids[blocks.start : blocks.stop]], device=self._device)
        keys = blocks.start * BLOCK_TOKENS + torch.arange(len(blocks) * BLOCK_TOKENS, device=self._device)
        queries = torch.arange(span.start, span.end, device=self._device)[:, None]  # [count, 1]
        visible = keys <= queries  # [count, num_tokens]
        if window_tokens is not None:
            visible &= keys > queries - window_tokens
        return _Chunk(first, span.end - span.start, block_ids, self._mask(visible))

    def _mask(self, visible: Tensor) -> Tensor:
        zeros = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
        return zeros.masked_fill(~visible, -math.inf)


def _dense_rows(rows: Tensor) -> Tensor:
    """With gaps between the rows at most."""
    return rows if rows[:1].is_contiguous() else rows.contiguous()


def _seen_blocks(span: Span, window_tokens: int | None) -> range:
    """Which of the blocks of ``span`` its first new token can see, or later ones."""
    first = 0 if window_tokens is None else max(0, span.start + 1 - window_tokens) // BLOCK_TOKENS
    return range(first, -(-span.end // BLOCK_TOKENS))


def attend_single(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float | None) -> Tensor:
    """One query for each of ``count`` sequences: [count, num_heads, head_dim], already scaled.

    The heads that share keys are the rows of one product, which reads the keys once. On a CPU two products are faster
    than scaled_dot_product_attention, by far in bfloat16.
    """
    count, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    # Products of three dimensions: torch.matmul of four takes as long again for small batches.
    grouped = queries.reshape(count * num_kv_heads, -1, head_dim)  # [count * num_kv_heads, heads of each, head_dim]
    scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2)).view(count, num_kv_heads, -1, keys.shape[2])
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.add_(mask), dim=-1)  # inside, in float32; [count, kv_heads, heads of each, tokens]
    return torch.bmm(weights.flatten(0, 1), values.flatten(0, 1)).view(count, num_heads, head_dim)


def _attend_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Many queries of one sequence: [count, num_heads, head_dim]; keys and values [1, num_kv_heads, num_tokens,
    head_dim]."""
    if softcap is None:
        found = functional.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return found[0].transpose(0, 1)
    count, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = (queries * scale).view(count, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, keys[0, :, None].transpose(-1, -2))  # [kv_heads, heads of each, count, num_tokens]
    scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.full((count, count), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
    weights = torch.softmax(scores + mask, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values[0, :, None]).permute(2, 0, 1, 3).reshape(count, num_heads, head_dim)
