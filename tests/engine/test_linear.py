"""Products with packed weights: the same as plain ones, for one row and for many, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from anyengine.engine.runner.kernels import load_kernels
from anyengine.engine.runner.linear import Linear, _blocks_of


@pytest.mark.parametrize("num_rows", [1, 2, 33])
@pytest.mark.parametrize("shape", [(192, 48), (128, 64), (64, 7), (100, 64), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "torch"])
def test_it_computes_what_a_plain_product_does(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype, has_bias: bool, with_kernels: bool
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if has_bias else None
    x = torch.randn(num_rows, shape[1])
    linear = Linear(weight.to(dtype), None if bias is None else bias.to(dtype))
    linear.use(load_kernels(x.to(dtype)) if with_kernels else None)
    with torch.inference_mode():
        found = linear(x.to(dtype))
    assert (found.shape, found.dtype) == ((num_rows, shape[0]), dtype)
    rounded = [tensor if tensor is None else tensor.to(dtype).double() for tensor in (x, weight, bias)]
    expected = functional.linear(*rounded)  # type: ignore[arg-type]  # a bias may be absent
    torch.testing.assert_close(found.double(), expected, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1), (0,), (1, 0), (3, 2), (128,), (129,), (1, 1, 2)], ids=str)
@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "torch"])
def test_rows_in_any_number_and_dimensions_keep_them(shape: tuple[int, ...], with_kernels: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(128, 64), torch.randn(*shape, 64)
    linear = Linear(weight, torch.ones(128))
    linear.use(load_kernels(weight) if with_kernels else None)
    with torch.inference_mode():
        found = linear(x)
    torch.testing.assert_close(found, functional.linear(x, weight) + 1, rtol=1e-5, atol=1e-4)


def test_rows_with_gaps_are_multiplied() -> None:
    weight, wide = torch.randn(128, 64), torch.randn(5, 128)
    linear = Linear(weight)
    linear.use(load_kernels(weight))
    with torch.inference_mode():
        for x in (wide[:, ::2], wide[:, 64:], wide.T[:64].T):
            torch.testing.assert_close(linear(x), functional.linear(x, weight), rtol=1e-5, atol=1e-4)


def test_a_layout_that_is_not_the_expected_one_is_not_read() -> None:
    """The blocks of a weight are those of this weight, or there are none."""
    linear = Linear(torch.randn(128, 64))
    if linear._packed is None:
        pytest.skip("this build of torch has no oneDNN")
    assert _blocks_of(linear._packed, torch.randn(128, 64)) is None
    assert _blocks_of(linear._packed, torch.randn(192, 64)) is None
