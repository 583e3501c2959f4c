"""LLVM IR by the line: what the kernels have in common.

Owns loops, numbers that live in memory as float32 or bfloat16 and in registers as vectors of :data:`LANES` float32,
and the exponential function. Addresses are integers of bytes. Must not know what a kernel computes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

__all__ = ["LANES", "Emitter"]

LANES = 16

_I64, _I32, _I16 = (ir.IntType(bits) for bits in (64, 32, 16))
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS, _SHORTS = ir.VectorType(_I32, LANES), ir.VectorType(_I16, LANES)
_POINTER = ir.PointerType()


class _BFloat16(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes' expf: exp(r) = 1 + r + r**2 * p(r) for |r| <= ln(2) / 2, good to the last bit but one of a float32.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_EXP_LEAST, _EXP_MOST = -87.3, 89.0


class Emitter:
    """Writes one function ``void name(int64_t *arguments)``. ``element_bytes``: 4 for float32, 2 for bfloat16."""

    def __init__(self, name: str, element_bytes: int) -> None:
        self.module: Any = ir.Module(name)
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_POINTER]), name)
        self.builder: Any = ir.IRBuilder(function.append_basic_block("entry"))
        self.element_bytes = element_bytes
        self._function = function
        self._arguments = self.builder.ptrtoint(function.args[0], _I64)

    # --- integers, all of 64 bits ---------------------------------------------------------------------------------
    def const(self, value: int) -> ir.Value:
        return ir.Constant(_I64, value)

    def argument(self, index: int) -> ir.Value:
        """The ``index``-th of the arguments."""
        return self.load_int(self._arguments, self.const(index))

    def argument_address(self, index: int) -> ir.Value:
        return self.offset(self._arguments, 8 * index)

    def row(self, base: int, stride: int, row: ir.Value, offset: ir.Value | None = None) -> ir.Value:
        """The address of a row: arguments ``base`` + ``row`` * ``stride``, + ``offset`` bytes."""
        address = self.add(self.argument(base), self.builder.mul(row, self.argument(stride)))
        return address if offset is None else self.add(address, offset)

    def add(self, *values: ir.Value) -> ir.Value:
        return functools.reduce(self.builder.add, values)

    def sub(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.sub(a, b)

    def offset(self, address: ir.Value, num_bytes: int) -> ir.Value:
        return self.builder.add(address, self.const(num_bytes))

    def times(self, value: ir.Value, factor: int) -> ir.Value:
        return self.builder.mul(value, self.const(factor))

    def div(self, value: ir.Value, divisor: int) -> ir.Value:
        return self.builder.udiv(value, self.const(divisor))

    def rem(self, value: ir.Value, divisor: int) -> ir.Value:
        return self.builder.urem(value, self.const(divisor))

    def minimum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def load_int(self, address: ir.Value, index: ir.Value) -> ir.Value:
        """The ``index``-th int64 from ``address`` on."""
        return self._load(self.add(address, self.times(index, 8)), _I64, 8)

    def _load(self, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
        return self.builder.load(self._pointer(address), align=align, typ=kind)

    def _pointer(self, address: ir.Value) -> ir.Value:
        return self.builder.inttoptr(address, _POINTER)

    # --- control ------------------------------------------------------------------------------------------------------
    @contextmanager
    def loop(
        self, first: ir.Value, end: ir.Value, carried: Sequence[ir.Value] = ()
    ) -> Iterator[tuple[ir.Value, list[ir.Value]]]:
        """For an index from ``first`` up to ``end`` (exclusive), at least one round. The list has the values that are
        ``carried`` from round to round: the body changes them there, and there the last ones are behind the loop."""
        before = self.builder.block
        body, behind = (self._function.append_basic_block(name) for name in ("body", "behind"))
        self.builder.branch(body)
        self.builder.position_at_end(body)
        phis = [self.builder.phi(value.type) for value in (first, *carried)]
        for phi, value in zip(phis, (first, *carried), strict=True):
            phi.add_incoming(value, before)
        index, *values = phis
        yield index, values
        following = self.offset(index, 1)
        for phi, value in zip(phis, (following, *values), strict=True):
            phi.add_incoming(value, self.builder.block)
        self.builder.cbranch(self.builder.icmp_signed("<", following, end), body, behind)
        self.builder.position_at_end(behind)

    @contextmanager
    def items(self, counter: int, count: ir.Value) -> Iterator[ir.Value]:
        """For every index below ``count`` that no other thread has taken: the argument ``counter``, 0 at first, counts
        those that are. Ends the function."""
        head, body, end = (self._function.append_basic_block(name) for name in ("next", "item", "end"))
        shared = self._pointer(self.argument_address(counter))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        item = self.builder.atomic_rmw("add", shared, self.const(1), "monotonic")
        self.builder.cbranch(self.builder.icmp_signed("<", item, count), body, end)
        self.builder.position_at_end(body)
        yield item
        self.builder.branch(head)
        self.builder.position_at_end(end)
        self.builder.ret_void()

    @contextmanager
    def steps(self, end: ir.Value, size: ir.Value) -> Iterator[tuple[ir.Value, ir.Value]]:
        """For an index from 0 up to ``end`` (exclusive), ``size`` at a time: the index, and how many these are."""
        before = self.builder.block
        body, behind = (self._function.append_basic_block(name) for name in ("step", "behind"))
        self.builder.branch(body)
        self.builder.position_at_end(body)
        index = self.builder.phi(_I64)
        index.add_incoming(self.const(0), before)
        yield index, self.minimum(self.sub(end, index), size)
        following = self.builder.add(index, size)
        index.add_incoming(following, self.builder.block)
        self.builder.cbranch(self.builder.icmp_signed("<", following, end), body, behind)
        self.builder.position_at_end(behind)

    def cases(self, value: ir.Value, values: Iterable[int]) -> Iterator[int]:
        """For each of ``values``: what is emitted meanwhile is done if ``value`` is that one. It is one of them."""
        never, behind = (self._function.append_basic_block(name) for name in ("never", "behind"))
        switch = self.builder.switch(value, never)
        for case in values:
            block = self._function.append_basic_block(f"case_{case}")
            switch.add_case(self.const(case), block)
            self.builder.position_at_end(block)
            yield case
            self.builder.branch(behind)
        self.builder.position_at_end(never)
        self.builder.unreachable()
        self.builder.position_at_end(behind)

    # --- vectors ------------------------------------------------------------------------------------------------------
    def floats(self, value: float) -> ir.Value:
        return ir.Constant(_VECTOR, [value] * LANES)

    def splat(self, scalar: ir.Value) -> ir.Value:
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    def load(self, address: ir.Value) -> ir.Value:
        """:data:`LANES` numbers of a tensor."""
        if self.element_bytes == 4:
            return self.load_wide(address)
        shorts = self._load(address, _SHORTS, 2)
        wide = self.builder.shl(self.builder.zext(shorts, _INTS), _ints(16))
        return self.builder.bitcast(wide, _VECTOR)

    def store(self, vector: ir.Value, address: ir.Value) -> None:
        """:data:`LANES` numbers of a tensor, rounded to the nearest, ties to even."""
        if self.element_bytes == 4:
            self.store_wide(vector, address)
            return
        shorts = self.builder.trunc(self.builder.lshr(self._rounded_bits(vector), _ints(16)), _SHORTS)
        self.builder.store(shorts, self._pointer(address), align=2)

    def rounded(self, vector: ir.Value) -> ir.Value:
        """As if it were stored and loaded."""
        if self.element_bytes == 4:
            return vector
        kept = self.builder.and_(self._rounded_bits(vector), _ints(-0x10000))
        return self.builder.bitcast(kept, _VECTOR)

    def _rounded_bits(self, vector: ir.Value) -> ir.Value:
        """The bits of ``vector``, of which the upper half is the nearest bfloat16."""
        bits = self.builder.bitcast(vector, _INTS)
        odd = self.builder.and_(self.builder.lshr(bits, _ints(16)), _ints(1))
        rounded = self.builder.add(bits, self.builder.add(odd, _ints(0x7FFF)))
        return self.builder.select(self.builder.fcmp_unordered("uno", vector, vector), _ints(0x7FC00000), rounded)

    def prefetch(self, address: ir.Value) -> None:
        """Have the line of memory at ``address`` come into the cache, if it is not a bother."""
        types = [_POINTER, _I32, _I32, _I32]
        function = self.module.declare_intrinsic("llvm.prefetch.p0", (), ir.FunctionType(ir.VoidType(), types))
        flags = [ir.Constant(_I32, flag) for flag in (0, 2, 1)]  # to read, into the second level, data
        self.builder.call(function, [self._pointer(address), *flags])

    def load_wide(self, address: ir.Value) -> ir.Value:
        """:data:`LANES` float32, whatever the tensors are of."""
        return self._load(address, _VECTOR, 4)

    def store_wide(self, vector: ir.Value, address: ir.Value) -> None:
        self.builder.store(vector, self._pointer(address), align=4)

    def load_splat(self, address: ir.Value) -> ir.Value:
        """One float32 in all lanes."""
        return self.splat(self._load(address, _FLOAT, 4))

    # --- words: a float32, or two bfloat16 ----------------------------------------------------------------------------
    def load_words(self, address: ir.Value) -> ir.Value:
        return self._load(address, _INTS, 4)

    def splat_word(self, address: ir.Value) -> ir.Value:
        return self._splat_int(self._load(address, _I32, 4))

    def multiply_words(self, a: ir.Value, b: ir.Value, total: ir.Value) -> ir.Value:
        """``total`` and, in each lane, the products of what the words have. Of bfloat16: on
        processors with ``avx512bf16``."""
        if self.element_bytes == 4:
            return self.fma(self.builder.bitcast(a, _VECTOR), self.builder.bitcast(b, _VECTOR), total)
        function_type = ir.FunctionType(_VECTOR, [_VECTOR, _PAIRS, _PAIRS])
        function = self.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", (), function_type)
        return self.builder.call(function, [total, self.builder.bitcast(a, _PAIRS), self.builder.bitcast(b, _PAIRS)])

    def buffer(self, num_vectors: int) -> ir.Value:
        """The address of room for so many vectors of float32 on the stack."""
        return self.builder.ptrtoint(self.builder.alloca(_VECTOR, num_vectors), _I64)

    def get(self, buffer: ir.Value, index: int) -> ir.Value:
        return self.load_wide(self.offset(buffer, index * 4 * LANES))

    def put(self, vector: ir.Value, buffer: ir.Value, index: int) -> None:
        self.store_wide(vector, self.offset(buffer, index * 4 * LANES))

    # --- arithmetic ---------------------------------------------------------------------------------------------------
    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """``a * b + c``."""
        return self._intrinsic("llvm.fmuladd", a, b, c)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._intrinsic("llvm.maxnum", a, b)

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self._intrinsic("llvm.minnum", a, b)

    def sqrt(self, a: ir.Value) -> ir.Value:
        return self._intrinsic("llvm.sqrt", a)

    def sum_lanes(self, vector: ir.Value) -> ir.Value:
        """In all lanes."""
        return self._across(vector, self.builder.fadd)

    def largest_lane(self, vector: ir.Value) -> ir.Value:
        """In all lanes."""
        return self._across(vector, self.larger)

    def _across(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        step = LANES // 2
        while step:
            other = self.shuffle(vector, vector, [lane ^ step for lane in range(LANES)])
            vector = combine(vector, other)
            step //= 2
        return vector

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: Sequence[int]) -> ir.Value:
        """Those ``lanes`` of ``a`` and, from :data:`LANES` on, of ``b``."""
        return self.builder.shuffle_vector(a, b, ir.Constant(_INTS, list(lanes)))

    def inside(self, first: ir.Value, end: ir.Value) -> ir.Value:
        """Which lanes are from ``first`` up to ``end`` (exclusive)."""
        numbers = ir.Constant(_INTS, list(range(LANES)))
        lower, upper = (self._splat_int(self.builder.trunc(limit, _I32)) for limit in (first, end))
        return self.builder.and_(
            self.builder.icmp_signed(">=", numbers, lower), self.builder.icmp_signed("<", numbers, upper)
        )

    def _splat_int(self, scalar: ir.Value) -> ir.Value:
        undefined = ir.Constant(_INTS, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * LANES))

    def exp(self, x: ir.Value) -> ir.Value:
        """Within some two units of the last place. Below -87.3 it is as there, from 88.4 on infinite; what is no number
        stays none."""
        given, x = x, self.larger(self.smaller(x, self.floats(_EXP_MOST)), self.floats(_EXP_LEAST))
        power = self._intrinsic("llvm.rint", self.builder.fmul(x, self.floats(1 / math.log(2))))
        r = self.fma(power, self.floats(-_LN2_LOW), self.fma(power, self.floats(-_LN2_HIGH), x))
        series = self.floats(_EXP[0])
        for coefficient in _EXP[1:]:
            series = self.fma(series, r, self.floats(coefficient))
        value = self.fma(self.builder.fmul(series, r), r, self.builder.fadd(r, self.floats(1.0)))
        biased = self.builder.add(self.builder.fptosi(power, _INTS), _ints(127))
        value = self.builder.fmul(value, self.builder.bitcast(self.builder.shl(biased, _ints(23)), _VECTOR))
        return self.builder.select(self.builder.fcmp_unordered("uno", given, given), given, value)

    def _intrinsic(self, name: str, *values: ir.Value) -> ir.Value:
        function_type = ir.FunctionType(_VECTOR, [_VECTOR] * len(values))
        function = self.module.declare_intrinsic(f"{name}.v{LANES}f32", (), function_type)
        return self.builder.call(function, values)


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_INTS, [value] * LANES)
