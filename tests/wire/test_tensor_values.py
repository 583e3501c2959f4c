"""Values of tensors without numpy, against numpy and torch; and the spelling that vLLM reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anyengine import EncodeError, Tensor

NUMPY_DTYPES = ["|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8", "|b1"]
TORCH_DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 3), (3, 0), (2, 1, 2)])
def test_values_are_numpys(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.array(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype=dtype)
    tensor = Tensor.from_array(array) if shape else Tensor(dtype, (), array.tobytes())
    assert list(tensor.values()) == array.ravel().tolist()
    assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_values_are_torchs(dtype: torch.dtype) -> None:
    given = torch.randn(4, 5).to(dtype)
    assert Tensor.from_array(given).tolist() == given.tolist()


def test_values_that_are_no_python_numbers() -> None:
    for dtype in ("float8_e5m2", "complex64", "something new"):
        with pytest.raises(TypeError, match=r"\.data"):
            Tensor(dtype, (1,), bytes(1 if dtype != "complex64" else 8)).values()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_spelled_for_torch(dtype: str) -> None:
    tensor = Tensor.from_array(np.zeros((2, 2), dtype)).torch_spelled()
    assert torch.from_numpy(np.zeros(1, dtype)).dtype == getattr(torch, tensor.dtype)
    assert tensor.shape == (2, 2) and tensor.torch_spelled() is tensor


@pytest.mark.parametrize("dtype", [">f4", "<c32"])
def test_what_torch_does_not_have(dtype: str) -> None:
    with pytest.raises(EncodeError, match="torch has no dtype"):
        Tensor(dtype, (1,), bytes(int(dtype[2:]))).torch_spelled()
