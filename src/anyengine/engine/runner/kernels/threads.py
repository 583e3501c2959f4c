"""Run a kernel on the threads that torch computes with.

Owns how they are found: torch's wheels for Linux compute on the threads of GNU's OpenMP library, whose
``GOMP_parallel`` is what compiled OpenMP programs call. A second pool would take the processors from the first.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from anyengine.engine.runner.kernels.compiler import Compiled

__all__ = ["can_run_on_threads", "run_on_threads"]


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel(function, argument, num_threads, flags)``, or ``None``: torch computes in another way."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    function: Any = None
    torch_cpu = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    for library in (None, torch_cpu):  # where the linker has looked for it: among what is global, then beside torch
        with suppress(OSError, AttributeError):
            function = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
            break
    if function is None:
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    found: Callable[..., None] = function
    return found


def can_run_on_threads() -> bool:
    """Whether :func:`run_on_threads` uses all that torch may use."""
    return torch.get_num_threads() == 1 or _parallel() is not None


def run_on_threads(compiled: Compiled, arguments: Any) -> None:
    """Call ``compiled`` with ``arguments`` on each of torch's threads at the same time, and wait for them."""
    num_threads = torch.get_num_threads()
    parallel = _parallel() if num_threads > 1 else None
    if parallel is None:
        compiled.call(arguments)
    else:
        parallel(compiled.address, arguments, num_threads, 0)
