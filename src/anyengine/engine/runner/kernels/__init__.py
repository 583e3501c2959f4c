"""Machine code for what torch has no fast operation for on a CPU, made for the processor that a model is loaded on.

Each kernel has a twin in plain torch, which is used on other devices, for other kinds of numbers and where there is no
compiler (the package llvmlite), and with which it has to agree.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["DecodeRows", "load_kernels"]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """One new token of each of some sequences, and who sees what. The longest first, for threads to end together."""

    table: np.ndarray  # [num_seqs, num_blocks], int64
    starts: np.ndarray  # [num_seqs], int64: the first token that is seen
    ends: np.ndarray  # [num_seqs], int64: behind the new token


def load_kernels(like: torch.Tensor) -> Kernels | None:
    """For models whose tensors are like this one; ``None``: torch's own operations have to do."""
    if like.device.type != "cpu" or like.dtype not in {torch.float32, torch.bfloat16}:
        return None
    if importlib.util.find_spec("llvmlite") is None:
        return None
    from anyengine.engine.runner.kernels.threads import can_run_on_threads

    return _kernels(like.element_size()) if can_run_on_threads() else None


@functools.cache
def _kernels(element_bytes: int) -> Kernels:
    from anyengine.engine.runner.kernels.library import Kernels

    return Kernels(element_bytes)
