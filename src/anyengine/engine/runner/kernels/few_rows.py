"""Products of a few rows with a packed weight: each weight is read once, as fast as memory gives it, and each number
is the same, whatever rows it has beside it.

Owns the kernel for weights in the layout that oneDNN packs them in: blocks of 64 columns, in which the numbers of one
line lie together; of bfloat16 those of two lines, pair by pair. Source of the method: the register tiles of GotoBLAS
(Goto and van de Geijn, 2008).
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

from llvmlite import ir
from torch import Tensor

from anyengine.engine.runner.kernels.compiler import compile_function, has_feature
from anyengine.engine.runner.kernels.emitter import LANES, Emitter
from anyengine.engine.runner.kernels.threads import run_on_threads

__all__ = ["BLOCK_COLUMNS", "FewRows"]

BLOCK_COLUMNS = 64
_NAME = "few_rows"
_VECTORS = BLOCK_COLUMNS // LANES
_TILE_ROWS = 6  # have as many vectors of sums as registers hold
_STEP_BYTES = BLOCK_COLUMNS * 4
_AHEAD_BYTES = 1024  # of the weight, that are fetched before they are used


class _Argument(IntEnum):
    COUNTER = 0  # of items taken
    NUM_ITEMS = 1
    X = 2
    X_STRIDE = 3  # bytes from row to row
    NUM_ROWS = 4
    TILE_ROWS = 5
    WEIGHT = 6
    NUM_WORDS = 7  # of a row of x: numbers of float32, or pairs of bfloat16
    BIAS = 8
    RESULT = 9
    RESULT_STRIDE = 10


class FewRows:
    """The kernel for numbers of ``element_bytes``."""

    def __init__(self, element_bytes: int) -> None:
        self._element_bytes = element_bytes
        emitter = Emitter(_NAME, element_bytes)
        _Kernel(emitter).emit()
        self._compiled = compile_function(emitter.module, _NAME)

    @staticmethod
    def fits(in_features: int, out_features: int, element_bytes: int) -> bool:
        """Whether there is a kernel for such weights on this processor."""
        whole = in_features * element_bytes % 4 == 0 and out_features % BLOCK_COLUMNS == 0
        return whole and (element_bytes == 4 or has_feature("avx512bf16"))

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor, result: Tensor) -> None:
        """``result`` [num_rows, columns] becomes ``x`` [num_rows, num_lines] @ ``weight`` + ``bias``. The weight is
        [columns / 64, num_lines, 64], or, of bfloat16, [columns / 64, num_lines / 2, 64, 2]."""
        num_rows, num_lines = x.shape
        num_tiles = -(-num_rows // _TILE_ROWS)
        arguments = (ctypes.c_int64 * len(_Argument))(
            0,
            result.shape[1] // BLOCK_COLUMNS,
            x.data_ptr(),
            x.stride(0) * self._element_bytes,
            num_rows,
            -(-num_rows // num_tiles),
            weight.data_ptr(),
            num_lines * self._element_bytes // 4,
            bias.data_ptr(),
            result.data_ptr(),
            result.stride(0) * self._element_bytes,
        )
        run_on_threads(self._compiled, arguments)


class _Kernel:
    """Emits the kernel. One item of work is some vectors of columns, for all rows, tile by tile."""

    def __init__(self, emitter: Emitter) -> None:
        self._e = emitter

    def emit(self) -> None:
        e = self._e
        with e.items(_Argument.COUNTER, e.argument(_Argument.NUM_ITEMS)) as item:
            block_bytes = e.times(e.argument(_Argument.NUM_WORDS), _STEP_BYTES)
            weight = e.add(e.argument(_Argument.WEIGHT), e.builder.mul(item, block_bytes))
            columns = e.times(item, BLOCK_COLUMNS * e.element_bytes)
            bias = e.add(e.argument(_Argument.BIAS), columns)
            biases = [e.load(e.offset(bias, vector * LANES * e.element_bytes)) for vector in range(_VECTORS)]
            result = e.add(e.argument(_Argument.RESULT), columns)
            with e.steps(e.argument(_Argument.NUM_ROWS), e.argument(_Argument.TILE_ROWS)) as (row, count):
                x = e.row(_Argument.X, _Argument.X_STRIDE, row)
                to = e.add(result, e.builder.mul(row, e.argument(_Argument.RESULT_STRIDE)))
                for num_rows in e.cases(count, range(1, _TILE_ROWS + 1)):
                    self._tile(biases * num_rows, x, weight, to)

    def _tile(self, start: list[ir.Value], x: ir.Value, weight: ir.Value, result: ir.Value) -> None:
        """For as many rows as ``start`` has sums to start with."""
        e = self._e
        num_rows = len(start) // _VECTORS
        rows = [e.add(x, e.builder.mul(e.const(row), e.argument(_Argument.X_STRIDE))) for row in range(num_rows)]
        with e.loop(e.const(0), e.argument(_Argument.NUM_WORDS), start) as (
            index,
            sums,
        ):
            at = e.add(weight, e.times(index, _STEP_BYTES))
            words = [self._words(e.offset(at, vector * 4 * LANES)) for vector in range(_VECTORS)]
            for number, row in enumerate(rows):
                factor = e.splat_word(e.add(row, e.times(index, 4)))
                for vector, word in enumerate(words, number * _VECTORS):
                    sums[vector] = e.multiply_words(factor, word, sums[vector])
        for number in range(num_rows):
            to = e.add(result, e.builder.mul(e.const(number), e.argument(_Argument.RESULT_STRIDE)))
            for vector in range(_VECTORS):
                e.store(sums[number * _VECTORS + vector], e.offset(to, vector * LANES * e.element_bytes))

    def _words(self, address: ir.Value) -> ir.Value:
        self._e.prefetch(self._e.offset(address, _AHEAD_BYTES))
        return self._e.load_words(address)
