"""Tensors on the wire: a neutral record, and how its bytes travel inside or beside a payload.

Owns the ``[dtype, shape, data]`` triple: bytes below 256 inside the payload (msgpack extension 3), more of them as an
auxiliary frame that the payload names by its index. Must not know which message a tensor stands in. numpy is imported
only when somebody asks for an array; torch never is.
Mirrors vLLM 0.32.0 ``v1/serial_utils.py`` (MsgpackEncoder, MsgpackDecoder); its pickle extensions 1 and 2 are refused.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anyengine.exceptions import EncodeError

from .constants import Frame

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "INLINE_BELOW_BYTES",
    "Tensor",
    "is_torch_dtype",
    "read_extension",
    "read_tensor",
    "revive_loose",
    "revive_nested",
    "write_tensor",
]

INLINE_BELOW_BYTES: Final = 256
"""Tensors smaller than this travel in the payload. The writer's choice: readers take both forms at any size."""

_EXT_PICKLE: Final = 1
_EXT_CLOUDPICKLE: Final = 2
_EXT_RAW: Final = 3
_MAX_DIMENSIONS: Final = 64  # numpy's and torch's own limit

_TORCH_ITEM_BYTES: Final = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
_NUMPY_DTYPE: Final = r"[<>=|][biufc](\d{1,2})"
_TORCH_NAMES: Final = {
    "b1": "bool", "u1": "uint8", "i1": "int8", "u2": "uint16", "i2": "int16", "u4": "uint32", "i4": "int32",
    "u8": "uint64", "i8": "int64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip
_BIG_ENDIAN: Final = array("H", [1]).tobytes() == b"\0\1"  # this machine
_ARRAY_CODES: Final = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i", "uint64": "Q", "int64": "q",
    "float32": "f", "float64": "d",
}  # fmt: skip


def _item_bytes(dtype: str) -> int | None:
    if (known := _TORCH_ITEM_BYTES.get(dtype)) is not None:
        return known
    match = re.fullmatch(_NUMPY_DTYPE, dtype)
    return int(match[1]) if match else None


def is_torch_dtype(dtype: str) -> bool:
    """Whether ``dtype`` is spelled as torch does, and known."""
    return dtype in _TORCH_ITEM_BYTES


def _num_bytes(data: Frame) -> int:
    return data.nbytes if isinstance(data, memoryview) else len(data)


class Tensor:
    """Dtype, shape and row-major little-endian bytes of a tensor; the bytes are shared with whoever provided them.

    ``dtype`` keeps the spelling it came with: numpy's (``"<f4"``) or torch's (``"float32"``). A dtype unknown to this
    module is carried as it is. Not a msgspec struct, so that msgspec hands it to our hooks.

    Raises:
        ValueError: on construction, when shape, dtype and number of bytes contradict each other.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: Sequence[int], data: Frame) -> None:
        if len(shape) > _MAX_DIMENSIONS or any(type(dim) is not int or dim < 0 for dim in shape):
            raise ValueError(f"tensor shape {list(shape)[:8]!r} must be at most {_MAX_DIMENSIONS} ints, none negative")
        item_bytes = _item_bytes(dtype)
        if item_bytes is not None and math.prod(shape) * item_bytes != _num_bytes(data):
            raise ValueError(f"a tensor of {dtype!r} and shape {list(shape)!r} cannot have {_num_bytes(data)} bytes")
        self.dtype: str = dtype
        self.shape: tuple[int, ...] = tuple(shape)
        self.data: Frame = data

    @property
    def nbytes(self) -> int:
        return _num_bytes(self.data)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tensor):
            return NotImplemented
        return (self.dtype, self.shape) == (other.dtype, other.shape) and bytes(self.data) == bytes(other.data)

    def __repr__(self) -> str:
        return f"Tensor(dtype={self.dtype!r}, shape={self.shape}, nbytes={self.nbytes})"

    def numpy(self) -> npt.NDArray[Any]:
        """The values as an array over the same memory; bfloat16, which numpy lacks, becomes a float32 copy.

        Raises:
            TypeError: numpy has no such dtype (8-bit floats, and dtypes unknown to this module).
        """
        import numpy as np

        if self.dtype == "bfloat16":
            wide = np.frombuffer(self.data, dtype="<u2").astype("<u4") << 16
            return wide.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, dtype=self._numpy_dtype(np)).reshape(self.shape)

    def torch_spelled(self) -> Tensor:
        """The same tensor with torch's name for its dtype: the only one that vLLM reads where it wants a torch tensor.

        Raises:
            EncodeError: torch has no such dtype, or the bytes are big-endian.
        """
        if self.dtype in _TORCH_ITEM_BYTES:
            return self
        name = _TORCH_NAMES.get(self.dtype[1:])
        if name is None or self.dtype[0] == ">" or (self.dtype[0] == "=" and _BIG_ENDIAN):
            raise EncodeError(f"torch has no dtype {self.dtype!r}", type_name=self.dtype)
        return Tensor(name, self.shape, self.data)

    def values(self) -> Sequence[Any]:
        """The values as Python numbers in one row, without numpy.

        Raises:
            TypeError: a dtype without such values here (8-bit floats, complex numbers, unknown ones).
        """
        name = self.torch_spelled().dtype if re.fullmatch(_NUMPY_DTYPE, self.dtype) else self.dtype
        if name == "bool":
            return [byte != 0 for byte in bytes(self.data)]
        if name == "float16":
            return struct.unpack(f"<{math.prod(self.shape)}e", self.data)
        if name == "bfloat16":  # the upper half of a float32
            floats = array("f")
            floats.frombytes(array("I", [half << 16 for half in _from_little_endian("H", self.data)]).tobytes())
            return floats
        if (code := _ARRAY_CODES.get(name)) is None:
            raise TypeError(f"no Python numbers for a tensor of dtype {self.dtype!r}; read the bytes in .data")
        return _from_little_endian(code, self.data)

    def tolist(self) -> Any:
        """The values as nested lists, without numpy; a single number for a tensor without dimensions.

        Raises:
            TypeError: see :meth:`values`.
        """
        values = list(self.values())
        return _nested(values, self.shape) if self.shape else values[0]

    def _numpy_dtype(self, numpy: Any) -> np.dtype[Any]:
        if _item_bytes(self.dtype) is None or self.dtype.startswith("float8") or self.dtype == "complex32":
            raise TypeError(f"numpy has no dtype {self.dtype!r}; read the bytes in .data")
        dtype: np.dtype[Any] = numpy.dtype(self.dtype)
        return dtype

    @classmethod
    def from_array(cls, array: Any) -> Tensor:
        """The record of a numpy array or a torch CPU tensor. Contiguous memory is shared, not copied.

        Raises:
            EncodeError: an array of objects, a tensor that is not in CPU memory, or something else altogether.
        """
        dtype = getattr(array, "dtype", None)
        if str(dtype).startswith("torch."):
            return cls(str(dtype).removeprefix("torch."), tuple(array.shape), _torch_bytes(array))
        if isinstance(getattr(dtype, "str", None), str) and _item_bytes(dtype.str) is not None:  # type: ignore[union-attr]
            return cls(dtype.str, tuple(array.shape), array.reshape(-1).view("u1").data)  # type: ignore[union-attr]
        raise EncodeError(
            f"cannot send {type(array).__qualname__} of dtype {dtype!r} as a tensor:"
            " need a numpy array of numbers or a torch tensor",
            type_name=type(array).__qualname__,
        )


def _nested(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    if len(shape) == 1:
        return values
    step = math.prod(shape[1:])
    return [_nested(values[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])]


def _from_little_endian(code: str, data: Any) -> array[Any]:
    values: array[Any] = array(code)
    values.frombytes(data)
    if _BIG_ENDIAN:
        values.byteswap()
    return values


def _torch_bytes(tensor: Any) -> memoryview:
    if tensor.device.type != "cpu":
        raise EncodeError(
            f"cannot send a tensor on {tensor.device}: move it to the CPU first", type_name="torch.Tensor"
        )
    flat = tensor.detach().contiguous().flatten()
    uint8 = flat.new_empty(0).byte().dtype  # torch.uint8, without importing torch
    data: memoryview = flat.view(uint8).numpy().data
    return data


def write_tensor(tensor: Tensor, frames: list[Frame]) -> list[Any]:
    """The triple for ``tensor``; its bytes are appended to ``frames`` (payload first) unless they are few."""
    if tensor.nbytes < INLINE_BELOW_BYTES:
        return [tensor.dtype, tensor.shape, msgspec.msgpack.Ext(_EXT_RAW, tensor.data)]
    frames.append(tensor.data)
    return [tensor.dtype, tensor.shape, len(frames) - 1]


def read_extension(code: int, data: memoryview) -> memoryview:
    """The ``ext_hook`` of every decoder: raw bytes pass, pickles never do.

    Raises:
        ValueError: any extension but 3.
    """
    if code == _EXT_RAW:
        return data
    if code in (_EXT_PICKLE, _EXT_CLOUDPICKLE):
        raise ValueError(f"msgpack extension {code} is a pickle, which this client never reads")
    raise ValueError(f"unknown msgpack extension {code}")


def read_tensor(triple: Any, frames: Sequence[Frame]) -> Tensor:
    """The tensor that a decoded ``triple`` stands for; ``frames[0]`` is the payload.

    Raises:
        ValueError: not a triple, no such frame, or a contradiction between dtype, shape and bytes.
    """
    if type(triple) is not list or len(triple) != 3:
        raise ValueError("expected a tensor [dtype, shape, data]")
    dtype, shape, data = triple
    if type(dtype) is not str or type(shape) is not list:
        raise ValueError("expected a tensor [dtype, shape, data] with a str and an array of ints first")
    if type(data) is int:
        if not 1 <= data < len(frames):
            raise ValueError(f"tensor data in auxiliary frame {data}, but the message has {len(frames) - 1}")
        data = frames[data]
    elif type(data) is dict:
        raise ValueError("tensor data in a torch_shm queue, which only processes of one vLLM share")
    elif type(data) is not memoryview:
        raise ValueError(f"tensor data of type {type(data).__name__}")
    return Tensor(dtype, shape, data)


def revive_nested(value: Any, frames: Sequence[Frame]) -> Any:
    """``value`` with every list that begins with a string read as a tensor (the rule for multimodal inputs).

    Raises:
        ValueError: see :func:`read_tensor`.
    """
    if type(value) is not list:
        return value
    if value and type(value[0]) is str:
        return read_tensor(value, frames)
    return [revive_nested(item, frames) for item in value]


def revive_loose(value: Any, frames: Sequence[Frame]) -> Any:
    """``value`` (untyped) with what can only be tensors read as such; everything else stays.

    A triple is a tensor if it ends in extension-3 bytes, or in the index of a frame that has exactly the bytes that its
    dtype and shape call for.
    """
    if type(value) is dict:
        return {key: revive_loose(item, frames) for key, item in value.items()}
    if type(value) is not list:
        return value
    if len(value) == 3 and type(value[0]) is str and _item_bytes(value[0]) is not None:
        try:
            return read_tensor(value, frames)
        except ValueError:
            pass  # a list that merely looks like one
    return [revive_loose(item, frames) for item in value]
