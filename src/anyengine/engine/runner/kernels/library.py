"""The kernels for numbers of one kind.

Owns which shapes a kernel can do, and that each is made once: when it is first asked for, while a model is loaded. Must
not know the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from anyengine.engine.runner.kernels.compiler import has_feature
from anyengine.engine.runner.kernels.decode_attention import DecodeAttention, HeadShape
from anyengine.engine.runner.kernels.elementwise import Gate, Norm, Rotation
from anyengine.engine.runner.kernels.emitter import LANES
from anyengine.engine.runner.kernels.few_rows import BLOCK_COLUMNS, FewRows

__all__ = ["Kernels"]

_MOST_ROWS = 128  # measured with two threads of a Zen 4
_MOST_ROWS_OF_SOME_THREADS = 8  # where there is no block for each thread: memory is the limit, not arithmetic
_MOST_ROWS_BESIDE_TILES = 16  # oneDNN multiplies tiles, some twenty times as fast
_MOST_SHARING = 16  # heads of queries with the same keys: all their sums are in line

_KernelT = TypeVar("_KernelT")


class Kernels:
    """``None`` in place of a kernel: it cannot do that shape. Used by any thread: a kernel keeps nothing of a call, and
    one that two threads make at the same time is made twice."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._element_bytes = dtype.itemsize
        self._made: dict[object, object] = {}

    def decode_attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, softcap: float | None
    ) -> DecodeAttention | None:
        shape = HeadShape(num_heads, num_kv_heads, head_dim, self._element_bytes, softcap)
        if head_dim % LANES or num_heads > _MOST_SHARING * num_kv_heads:
            return None
        return self._once(shape, lambda: DecodeAttention(shape))

    def few_rows(self, in_features: int, out_features: int) -> FewRows | None:
        fits = FewRows.fits(in_features, out_features, self._element_bytes)
        return self._once("few_rows", lambda: FewRows(self._element_bytes)) if fits else None

    def most_rows(self, out_features: int) -> int:
        """Of how many rows :meth:`few_rows` is no slower than oneDNN, by what is known of the processor."""
        if self.dtype is torch.bfloat16 and has_feature("amx-bf16"):
            return _MOST_ROWS_BESIDE_TILES
        return _MOST_ROWS if out_features // BLOCK_COLUMNS >= torch.get_num_threads() else _MOST_ROWS_OF_SOME_THREADS

    def norm(self, size: int, epsilon: float) -> Norm | None:
        key = ("norm", size, epsilon)
        return None if size % LANES else self._once(key, lambda: Norm(size, epsilon, self._element_bytes))

    def rotation(self, num_heads: int, head_dim: int) -> Rotation | None:
        key = ("rotation", num_heads, head_dim)
        return (
            None
            if head_dim % (2 * LANES)
            else self._once(key, lambda: Rotation(num_heads, head_dim, self._element_bytes))
        )

    def gate(self, size: int) -> Gate | None:
        return None if size % LANES else self._once(("gate", size), lambda: Gate(size, self._element_bytes))

    def _once(self, key: object, make: Callable[[], _KernelT]) -> _KernelT:
        if key not in self._made:
            self._made[key] = make()
        return cast("_KernelT", self._made[key])
