"""What a layer computes between its products, in one pass over memory each: norms, rotations, gates.

Owns these kernels. Tensors are [num_rows, ...], of which only the first dimension may have gaps. Numbers are rounded
where transformers' code does, but for sums of products, which it rounds once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from llvmlite import ir
from torch import Tensor

from anyengine.engine.runner.kernels.compiler import Compiled, compile_function
from anyengine.engine.runner.kernels.emitter import LANES, Emitter
from anyengine.engine.runner.kernels.threads import run_on_threads

__all__ = ["Gate", "Norm", "Rotation"]

_COUNTER, _NUM_ROWS = 0, 1
_ROWS_FOR_THREADS = 8  # fewer are done before another thread is awake


class _RowKernel:
    """Does the same for each row. The arguments from number 2 on are those of the call."""

    def __init__(self, name: str, element_bytes: int, emit: Callable[[Emitter, ir.Value], None]) -> None:
        emitter = Emitter(name, element_bytes)
        with emitter.items(_COUNTER, emitter.argument(_NUM_ROWS)) as row:
            emit(emitter, row)
        self._compiled: Compiled = compile_function(emitter.module, name)

    def __call__(self, num_rows: int, *values: int) -> None:
        arguments = (ctypes.c_int64 * (2 + len(values)))(0, num_rows, *values)
        if num_rows < _ROWS_FOR_THREADS:
            self._compiled.call(arguments)
        else:
            run_on_threads(self._compiled, arguments)


def _stride_bytes(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.element_size()


class Norm:
    """RMS normalisation of rows of ``size`` numbers, in float32 inside, behind a sum."""

    _X, _X_STRIDE, _MORE, _MORE_STRIDE, _WEIGHT, _RESULT = range(2, 8)

    def __init__(self, size: int, epsilon: float, element_bytes: int) -> None:
        self._size = size
        self._epsilon = epsilon
        self._alone = _RowKernel("norm", element_bytes, self._emit_alone)
        self._behind_sum = _RowKernel("norm_of_sum", element_bytes, self._emit_behind_sum)

    def __call__(self, x: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        """``x`` [num_rows, size] becomes ``x + more``; the result is its norm, times ``weight``."""
        result = x.new_empty(x.shape)
        other = x if more is None else more
        (self._alone if more is None else self._behind_sum)(
            len(x),
            x.data_ptr(),
            _stride_bytes(x),
            other.data_ptr(),
            _stride_bytes(other),
            weight.data_ptr(),
            result.data_ptr(),
        )
        return result

    def _emit_alone(self, e: Emitter, row: ir.Value) -> None:
        self._emit(e, row, None)

    def _emit_behind_sum(self, e: Emitter, row: ir.Value) -> None:
        self._emit(e, row, e.row(self._MORE, self._MORE_STRIDE, row))

    def _emit(self, e: Emitter, row: ir.Value, more: ir.Value | None) -> None:
        x = e.row(self._X, self._X_STRIDE, row)
        first, end, part_bytes = e.const(0), e.const(self._size // LANES), LANES * e.element_bytes
        with e.loop(first, end, [e.floats(0.0)]) as (index, squares):
            at = e.times(index, part_bytes)
            vector = e.load(e.add(x, at))
            if more is not None:
                vector = e.rounded(e.builder.fadd(vector, e.load(e.add(more, at))))
                e.store(vector, e.add(x, at))
            squares[0] = e.fma(vector, vector, squares[0])
        mean = e.builder.fmul(e.sum_lanes(squares[0]), e.floats(1 / self._size))
        factor = e.builder.fdiv(e.floats(1.0), e.sqrt(e.builder.fadd(mean, e.floats(self._epsilon))))
        result = e.add(e.argument(self._RESULT), e.times(row, self._size * e.element_bytes))
        with e.loop(first, end) as (index, _):
            at = e.times(index, part_bytes)
            normal = e.rounded(e.builder.fmul(e.load(e.add(x, at)), factor))
            e.store(e.builder.fmul(normal, e.load(e.add(e.argument(self._WEIGHT), at))), e.add(result, at))


class Rotation:
    """Rotary position embedding of ``num_heads`` heads, whose halves are turned by each other."""

    _HEADS, _HEADS_STRIDE, _COS, _SIN = range(2, 6)

    def __init__(self, num_heads: int, head_dim: int, element_bytes: int) -> None:
        self._num_heads = num_heads
        self._head_bytes = head_dim * element_bytes
        self._kernel = _RowKernel("rotation", element_bytes, self._emit)

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn ``heads`` [num_rows, num_heads, head_dim] in place; ``cos`` and ``sin`` [num_rows, ..., head_dim] have
        no gaps, and ``sin`` the sign of what it is a factor of."""
        self._kernel(len(heads), heads.data_ptr(), _stride_bytes(heads), cos.data_ptr(), sin.data_ptr())

    def _emit(self, e: Emitter, row: ir.Value) -> None:
        angles = e.times(row, self._head_bytes)
        half = self._head_bytes // 2
        heads = e.row(self._HEADS, self._HEADS_STRIDE, row)
        for part in range(0, half, LANES * e.element_bytes):
            cos_1, cos_2, sin_1, sin_2 = (
                e.load(e.add(e.argument(table), angles, e.const(at)))
                for table in (self._COS, self._SIN)
                for at in (part, part + half)
            )
            with e.loop(e.const(0), e.const(self._num_heads)) as (index, _):
                at_1 = e.add(heads, e.times(index, self._head_bytes), e.const(part))
                at_2 = e.offset(at_1, half)
                x_1, x_2 = e.load(at_1), e.load(at_2)
                e.store(e.fma(x_1, cos_1, e.builder.fmul(x_2, sin_1)), at_1)
                e.store(e.fma(x_2, cos_2, e.builder.fmul(x_1, sin_2)), at_2)


class Gate:
    """``silu(gate) * up`` of rows in which ``size`` numbers of each lie one behind the other."""

    _BOTH, _BOTH_STRIDE, _RESULT = range(2, 5)

    def __init__(self, size: int, element_bytes: int) -> None:
        self._size = size
        self._kernel = _RowKernel("gate", element_bytes, self._emit)

    def __call__(self, both: Tensor) -> Tensor:
        """``both``: [num_rows, 2 * size]."""
        result = torch.empty((len(both), self._size), dtype=both.dtype)
        self._kernel(len(both), both.data_ptr(), _stride_bytes(both), result.data_ptr())
        return result

    def _emit(self, e: Emitter, row: ir.Value) -> None:
        row_bytes = self._size * e.element_bytes
        gates = e.row(self._BOTH, self._BOTH_STRIDE, row)
        result = e.add(e.argument(self._RESULT), e.times(row, row_bytes))
        with e.loop(e.const(0), e.const(self._size // LANES)) as (index, _):
            at = e.times(index, LANES * e.element_bytes)
            gate, up = e.load(e.add(gates, at)), e.load(e.add(gates, at, e.const(row_bytes)))
            inverse = e.builder.fadd(e.floats(1.0), e.exp(e.builder.fneg(gate)))
            silu = e.rounded(e.builder.fdiv(gate, inverse))
            e.store(e.builder.fmul(silu, up), e.add(result, at))
