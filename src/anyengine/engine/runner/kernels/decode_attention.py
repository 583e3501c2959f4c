"""Attention of single tokens that follows the block table itself: each key and value is read once, and not copied.

Owns the kernel for one shape of heads. The softmax is computed as the blocks come (FlashAttention, Dao et al. 2022,
over the blocks of PagedAttention, Kwon et al. 2023), in float32 whatever the tensors are of.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from llvmlite import ir
from torch import Tensor

from anyengine.engine.runner.kernels import DecodeRows
from anyengine.engine.runner.kernels.compiler import compile_function
from anyengine.engine.runner.kernels.emitter import LANES, Emitter
from anyengine.engine.runner.kernels.threads import run_on_threads

__all__ = ["DecodeAttention", "HeadShape"]

_NAME = "decode_attention"
_LINE_BYTES = 64
_REGISTERS = 12  # vectors of queries that are kept in registers at a time, and as many of sums


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of queries, and of what a layer stores. ``head_dim`` is a multiple of :data:`.emitter.LANES`, which is also
    the number of tokens in a block."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    softcap: float | None = None


class _Argument(IntEnum):
    COUNTER = 0  # of items taken
    NUM_ITEMS = 1
    QUERIES = 2
    QUERY_STRIDE = 3  # bytes from row to row, as all strides here
    NEW = 4
    NEW_STRIDE = 5
    CACHE = 6
    TABLE = 7
    TABLE_STRIDE = 8
    STARTS = 9
    ENDS = 10
    FOUND = 11
    SCALE = 12  # a float32


class DecodeAttention:
    """The kernel for heads of one ``shape``."""

    def __init__(self, shape: HeadShape) -> None:
        self._shape = shape
        emitter = Emitter(_NAME, shape.element_bytes)
        _Kernel(emitter, shape).emit()
        self._compiled = compile_function(emitter.module, _NAME)

    def __call__(
        self, rows: DecodeRows, queries: Tensor, keys_values: Tensor, cache: Tensor, found: Tensor, scale: float
    ) -> None:
        """Store ``keys_values`` [num_seqs, 2, num_kv_heads, head_dim] in ``cache`` [num_blocks, 2, num_kv_heads, LANES,
        head_dim]; ``found`` becomes what ``queries`` [num_seqs, num_heads, head_dim] find. Only the first dimension of
        ``queries`` and ``keys_values`` may have gaps."""
        shape = self._shape
        arguments = (ctypes.c_int64 * len(_Argument))(
            0,
            len(rows.ends) * shape.num_kv_heads,
            queries.data_ptr(),
            queries.stride(0) * shape.element_bytes,
            keys_values.data_ptr(),
            keys_values.stride(0) * shape.element_bytes,
            cache.data_ptr(),
            rows.table.ctypes.data,
            rows.table.strides[0],
            rows.starts.ctypes.data,
            rows.ends.ctypes.data,
            found.data_ptr(),
            int(np.float32(scale).view(np.uint32)),
        )
        run_on_threads(self._compiled, arguments)


class _Kernel:
    """Emits the kernel. One item of work is a head of keys of one sequence, with all heads of queries that share it."""

    def __init__(self, emitter: Emitter, shape: HeadShape) -> None:
        self._e = emitter
        self._shape = shape
        self._group = shape.num_heads // shape.num_kv_heads
        self._parts = shape.head_dim // LANES  # vectors of one head
        self._row_bytes = shape.head_dim * shape.element_bytes
        self._part_bytes = LANES * shape.element_bytes
        # On the stack, float32: scaled queries and sums of values [group, head_dim], weights [group, LANES], and the
        # largest score and the total of weights so far [group], in all lanes.
        self._queries, self._sums = (emitter.buffer(self._group * self._parts) for _ in range(2))
        self._weights, self._largest, self._totals = (emitter.buffer(self._group) for _ in range(3))

    def emit(self) -> None:
        e, shape = self._e, self._shape
        scale = e.load_splat(e.argument_address(_Argument.SCALE))
        with e.items(_Argument.COUNTER, e.argument(_Argument.NUM_ITEMS)) as item:
            kv_heads = e.const(shape.num_kv_heads)
            row, head = e.builder.udiv(item, kv_heads), e.builder.urem(item, kv_heads)
            start = e.load_int(e.argument(_Argument.STARTS), row)
            end = e.load_int(e.argument(_Argument.ENDS), row)
            last = e.add(end, e.const(-1))
            queries_at = e.times(head, self._group * self._row_bytes)
            self._begin(e.row(_Argument.QUERIES, _Argument.QUERY_STRIDE, row, queries_at), scale)
            new = e.row(_Argument.NEW, _Argument.NEW_STRIDE, row, e.times(head, self._row_bytes))
            self._store_new(new, self._keys(row, head, e.div(last, LANES)), e.rem(last, LANES))
            last_block = e.div(last, LANES)
            with e.loop(e.div(start, LANES), e.offset(last_block, 1)) as (index, _):
                first = e.times(index, LANES)
                self._attend(
                    self._keys(row, head, index),
                    self._keys(row, head, e.minimum(e.offset(index, 1), last_block)),
                    e.maximum(e.sub(start, first), e.const(0)),
                    e.minimum(e.sub(end, first), e.const(LANES)),
                )
            found = e.add(e.argument(_Argument.FOUND), e.times(row, shape.num_heads * self._row_bytes), queries_at)
            self._finish(found)

    def _keys(self, row: ir.Value, head: ir.Value, index: ir.Value) -> ir.Value:
        """The address of the keys of the ``index``-th block of a sequence; the values lie behind those of all heads."""
        e = self._e
        block = e.load_int(e.row(_Argument.TABLE, _Argument.TABLE_STRIDE, row), index)
        heads = e.add(e.times(block, 2 * self._shape.num_kv_heads), head)
        return e.add(e.argument(_Argument.CACHE), e.times(heads, LANES * self._row_bytes))

    def _values(self, keys: ir.Value) -> ir.Value:
        return self._e.add(keys, self._e.const(self._shape.num_kv_heads * LANES * self._row_bytes))

    def _begin(self, queries: ir.Value, scale: ir.Value) -> None:
        e = self._e
        for index in range(self._group * self._parts):
            vector = e.load(e.offset(queries, index * self._part_bytes))
            e.put(e.builder.fmul(vector, scale), self._queries, index)
            e.put(e.floats(0.0), self._sums, index)
        for index in range(self._group):
            e.put(e.floats(-float("inf")), self._largest, index)
            e.put(e.floats(0.0), self._totals, index)

    def _store_new(self, new: ir.Value, keys: ir.Value, token: ir.Value) -> None:
        e = self._e
        at = e.times(token, self._row_bytes)
        new_values = e.offset(new, self._shape.num_kv_heads * self._row_bytes)
        for source, target in ((new, e.add(keys, at)), (new_values, e.add(self._values(keys), at))):
            for part in range(self._parts):
                offset = part * self._part_bytes
                e.store(e.load(e.offset(source, offset)), e.offset(target, offset))

    def _attend(self, keys: ir.Value, next_keys: ir.Value, start: ir.Value, end: ir.Value) -> None:
        """Take the tokens from ``start`` to ``end`` of one block into the sums. The next block comes nearer meanwhile,
        row by row: processors do not foresee which page of memory follows."""
        e = self._e
        visible = e.inside(start, end)
        tile = max(1, min(self._group, _REGISTERS // self._parts))
        for first in range(0, self._group, tile):
            heads = range(first, min(first + tile, self._group))
            scores = self._scores(keys, next_keys if first == 0 else None, heads, range(LANES))
            for head, score in zip(heads, scores, strict=True):
                self._weigh(head, score, visible)
            next_values = self._values(next_keys) if first == 0 else None
            self._add_values(self._values(keys), next_values, heads, start, end)

    def _scores(self, keys: ir.Value, next_keys: ir.Value | None, heads: range, tokens: range) -> list[ir.Value]:
        """For each of ``heads``: in the first lanes, or repeated, one product with the key of each of ``tokens``.

        Two halves of the tokens are joined by adding up the halves of their lanes, so that sixteen products end in one
        vector, in the order of the tokens.
        """
        e = self._e
        if len(tokens) == 1:
            parts = [
                e.load(e.offset(keys, tokens[0] * self._row_bytes + part * self._part_bytes))
                for part in range(self._parts)
            ]
            self._fetch(next_keys, e.const(tokens[0]))
            return [self._product(head, parts) for head in heads]
        middle, width = len(tokens) // 2, LANES // len(tokens)
        halves = (self._scores(keys, next_keys, heads, half) for half in (tokens[:middle], tokens[middle:]))
        lanes = [lane for lane in range(2 * LANES) if lane // width % 2 == 0]
        return [
            e.builder.fadd(e.shuffle(a, b, lanes), e.shuffle(a, b, [lane + width for lane in lanes]))
            for a, b in zip(*halves, strict=True)
        ]

    def _product(self, head: int, parts: list[ir.Value]) -> ir.Value:
        """Of the query of ``head`` with a key: what all lanes add up to."""
        e = self._e
        queries = [e.get(self._queries, head * self._parts + part) for part in range(self._parts)]
        total = e.builder.fmul(queries[0], parts[0])
        for query, part in zip(queries[1:], parts[1:], strict=True):
            total = e.fma(query, part, total)
        return total

    def _weigh(self, head: int, scores: ir.Value, visible: ir.Value) -> None:
        e = self._e
        if self._shape.softcap is not None:  # softcap * tanh(scores / softcap)
            grown = e.exp(e.builder.fmul(scores, e.floats(2 / self._shape.softcap)))
            ratio = e.builder.fdiv(e.floats(2.0), e.builder.fadd(grown, e.floats(1.0)))
            scores = e.builder.fmul(e.builder.fsub(e.floats(1.0), ratio), e.floats(self._shape.softcap))
        scores = e.builder.select(visible, scores, e.floats(-float("inf")))
        before = e.get(self._largest, head)
        largest = e.larger(before, e.largest_lane(scores))
        weights = e.exp(e.builder.fsub(scores, largest))
        weights = e.builder.select(visible, weights, e.floats(0.0))
        shrink = e.exp(e.builder.fsub(before, largest))
        e.put(largest, self._largest, head)
        e.put(weights, self._weights, head)
        e.put(e.fma(e.get(self._totals, head), shrink, e.sum_lanes(weights)), self._totals, head)
        for index in range(head * self._parts, (head + 1) * self._parts):
            e.put(e.builder.fmul(e.get(self._sums, index), shrink), self._sums, index)

    def _fetch(self, rows: ir.Value | None, token: ir.Value) -> None:
        e = self._e
        if rows is not None:
            row = e.add(rows, e.times(token, self._row_bytes))
            for line in range(0, self._row_bytes, _LINE_BYTES):
                e.prefetch(e.offset(row, line))

    def _add_values(
        self, values: ir.Value, next_values: ir.Value | None, heads: range, start: ir.Value, end: ir.Value
    ) -> None:
        """The visible tokens only: what lies behind the end of a sequence may be anything."""
        e = self._e
        indices = [head * self._parts + part for head in heads for part in range(self._parts)]
        with e.loop(start, end, [e.get(self._sums, index) for index in indices]) as (token, sums):
            self._fetch(next_values, token)
            row = e.add(values, e.times(token, self._row_bytes))
            parts = [e.load(e.offset(row, part * self._part_bytes)) for part in range(self._parts)]
            weights = [
                e.load_splat(e.add(e.offset(self._weights, head * 4 * LANES), e.times(token, 4))) for head in heads
            ]
            sums[:] = [e.fma(weights[n // self._parts], parts[n % self._parts], total) for n, total in enumerate(sums)]
        for index, total in zip(indices, sums, strict=True):
            e.put(total, self._sums, index)

    def _finish(self, found: ir.Value) -> None:
        e = self._e
        for head in range(self._group):
            factor = e.builder.fdiv(e.floats(1.0), e.get(self._totals, head))
            for index in range(head * self._parts, (head + 1) * self._parts):
                vector = e.builder.fmul(e.get(self._sums, index), factor)
                e.store(vector, e.offset(found, index * self._part_bytes))
