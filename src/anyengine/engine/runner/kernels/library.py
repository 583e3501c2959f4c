"""The kernels for numbers of one kind.

Owns which shapes a kernel can do, and that each is made once: when it is first asked for, while a model is loaded. Must
not know the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from anyengine.engine.runner.kernels.decode_attention import DecodeAttention, HeadShape
from anyengine.engine.runner.kernels.elementwise import Gate, Norm, Rotation
from anyengine.engine.runner.kernels.emitter import LANES
from anyengine.engine.runner.kernels.few_rows import FewRows

__all__ = ["Kernels"]

_KernelT = TypeVar("_KernelT")


class Kernels:
    """``None`` in place of a kernel: it cannot do that shape. Used by any thread: a kernel keeps nothing of a call, and
    one that two threads make at the same time is made twice."""

    def __init__(self, element_bytes: int) -> None:
        self._element_bytes = element_bytes
        self._made: dict[object, object] = {}

    def decode_attention(
        self, num_heads: int, num_kv_heads: int, head_dim: int, softcap: float | None
    ) -> DecodeAttention | None:
        shape = HeadShape(num_heads, num_kv_heads, head_dim, self._element_bytes, softcap)
        return None if head_dim % LANES else self._once(shape, lambda: DecodeAttention(shape))

    def few_rows(self, in_features: int, out_features: int) -> FewRows | None:
        fits = FewRows.fits(in_features, out_features, self._element_bytes)
        return self._once("few_rows", lambda: FewRows(self._element_bytes)) if fits else None

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
