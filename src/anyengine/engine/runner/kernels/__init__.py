"""Machine code for what torch has no fast operation for on a CPU, made for the processor that a model is loaded on.

Each kernel has a twin in plain torch, which is used on other devices, for other kinds of numbers and where there is no
compiler (the package llvmlite), and with which it has to agree.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["DecodeRows", "load_kernels"]

_logger = logging.getLogger(__name__)


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
    try:
        from anyengine.engine.runner.kernels.compiler import check_compiler
        from anyengine.engine.runner.kernels.threads import can_run_on_threads

        check_compiler()
        usable = can_run_on_threads()
    except Exception as exc:  # noqa: BLE001 - whatever is wrong with the compiler, torch can do without
        _logger.warning("no kernels are compiled: %r", exc)
        return None
    if not usable:
        _logger.warning("no kernels are compiled: torch computes on other threads than those of OpenMP")
    return _kernels(like.dtype) if usable else None


@functools.cache
def _kernels(dtype: torch.dtype) -> Kernels:
    from anyengine.engine.runner.kernels.library import Kernels

    return Kernels(dtype)
