"""Machine code for this processor, from LLVM IR.

Owns the compiler (llvmlite) and the memory of what it makes. Must not know what a kernel computes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

__all__ = ["Compiled", "check_compiler", "compile_function", "has_feature"]


class Compiled:
    """A C function of one pointer. Its code is in memory as long as this object."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine
        self.address: int = engine.get_function_address(name)
        self.call: Callable[..., None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        """On the calling thread, without the GIL."""


_one_at_a_time = threading.Lock()  # LLVM's state is the process's


def compile_function(module: ir.Module, name: str) -> Compiled:
    """Optimise ``module`` for the processor we run on and load it."""
    with _one_at_a_time:
        return _compile(module, name)


def check_compiler() -> None:
    """Raises OSError: memory may not become executable here."""
    llvm.check_jit_execution()


def has_feature(name: str) -> bool:
    """Of the processor, as LLVM names them."""
    features: dict[str, bool] = llvm.get_host_cpu_features()
    return features.get(name, False)


def _compile(module: ir.Module, name: str) -> Compiled:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target_machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.triple, parsed.data_layout = target_machine.triple, str(target_machine.target_data)
    parsed.verify()
    builder = llvm.create_pass_builder(target_machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, target_machine)
    engine.finalize_object()
    return Compiled(engine, name)
