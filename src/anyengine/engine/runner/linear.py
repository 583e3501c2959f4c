"""Products with weights, in the layout that the processor likes best.

Owns the packing. On a CPU oneDNN's blocked layout makes batches of 2 to 64 rows up to twice as fast as plain weights,
and single rows of bfloat16 too; a packed weight takes the place of the plain one. A kernel of our own multiplies few
rows with the same memory, which it reads faster than oneDNN. Elsewhere, and where this build of torch has no oneDNN, it
is ``torch.nn.functional.linear``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.few_rows import FewRows
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["Linear", "LinearPart", "pack_linears"]

_ROWS_HINT = 32
_BLOCK = 64  # columns of the product that lie together in a packed weight


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype in {torch.float32, torch.bfloat16}
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (weight.dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _blocks_of(packed: Any, weight: Tensor) -> Tensor | None:
    """The memory of ``packed``, good as long as it is, if it lies as :class:`~.kernels.few_rows.FewRows` has it: blocks
    of 64 columns, in which the numbers of a line lie together, or those of two lines by pairs."""
    num_columns, num_lines = weight.shape
    pair = 4 // weight.element_size()
    if num_columns % _BLOCK or num_lines % pair or not hasattr(torch.ops.mkldnn, "data_ptr"):
        return None
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    if num_bytes != weight.nbytes:
        return None
    memory = (ctypes.c_byte * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks = torch.frombuffer(memory, dtype=weight.dtype).view(-1, num_lines // pair, _BLOCK, pair)
    # oneDNN does not promise a layout: see where it has put the first and the last.
    same = all(
        torch.equal(blocks[block], weight[block * _BLOCK :][:_BLOCK].view(_BLOCK, -1, pair).transpose(0, 1))
        for block in (0, len(blocks) - 1)
    )
    return blocks if same else None


class Linear(nn.Module):
    """``x @ weight.T + bias`` for ``x`` [..., in], without gradients. ``weight``: [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features: int = weight.shape[0]
        self.in_features: int = weight.shape[1]
        self._packed: Any = None
        self._blocks: Tensor | None = None
        self._few_rows: FewRows | None = None
        self._most_rows = 0
        if _can_pack(weight):
            # What torch.compile uses for constant weights (its name is private, its schema has not changed since 2.0).
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
            self._blocks = _blocks_of(self._packed, weight.detach())
            self._linear = torch.ops.mkldnn._linear_pointwise.default
        else:
            self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self.addition: Callable[[Tensor, Tensor], Tensor] | None = None
        """What becomes of (x, product): LoRA adapters change it, in place."""

    def use(self, kernels: Kernels | None) -> None:
        """Multiply few rows with a kernel, if there is one for this weight; ``None``: never."""
        self._few_rows, self._most_rows = None, 0
        if kernels is not None and self._blocks is not None and self._blocks.dtype is kernels.dtype:
            self._few_rows = kernels.few_rows(self.in_features, self.out_features)
            self._most_rows = kernels.most_rows(self.out_features)
            self._some_bias = self._blocks.new_zeros(self.out_features) if self._bias is None else self._bias

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor
        if self._packed is None:
            product = functional.linear(x, self._weight, self._bias)
        elif (
            self._few_rows is not None
            and self._blocks is not None
            and 0 < x.numel() <= self._most_rows * self.in_features
        ):
            product = x.new_empty(*x.shape[:-1], self.out_features)
            rows = x.reshape(-1, self.in_features)
            self._few_rows(rows.contiguous(), self._blocks, self._some_bias, product.view(-1, self.out_features))
        else:
            product = self._linear(x, self._packed, self._bias, "none", [], "")
        return product if self.addition is None else self.addition(x, product)


class LinearPart(NamedTuple):
    """Some rows of a product: what one linear layer of the model computes."""

    linear: Linear
    first_row: int
    num_rows: int


def pack_linears(model: nn.Module) -> dict[str, LinearPart]:
    """Pack every linear layer of ``model``; those that see each token of a step once, by name. An embedding that shares
    weights keeps them."""
    parts: dict[str, LinearPart] = {}
    for path, module in list(model.named_modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                linear = Linear(child.weight, child.bias)
                setattr(module, name, linear)
                # The head sees some tokens only, and so does each of several experts.
                if path and "experts" not in path:
                    parts[f"{path}.{name}"] = LinearPart(linear, 0, linear.out_features)
    return parts
