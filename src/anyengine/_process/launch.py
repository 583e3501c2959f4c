"""How an engine core is started: the command line, the environment and the line on its standard input.

Owns nothing at run time. No pickle, no fork: ``python -m anyengine.engine`` in a fresh interpreter, somebody's program,
or vLLM's engine core, run by our launcher in the interpreter of vLLM's environment.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from anyengine._environment import RPC_BASE_PATH, WORKER_SHUTDOWN_TIMEOUT_S
from anyengine._owned_directories import OwnedDirectory
from anyengine.config import CommandEngine, EngineLaunch, LaunchedEngine, VLLMEngine

from .child import ChildProcess

__all__ = ["launch_engine"]


def launch_engine(engine: LaunchedEngine, *, handshake_address: str, rank: int = 0) -> ChildProcess:
    """Start one engine core process.

    Raises:
        OSError: the program cannot be started.
    """
    if isinstance(engine, VLLMEngine):
        return _launch_vllm(engine, handshake_address, rank)
    env = _environment()
    if isinstance(engine, CommandEngine):
        argv = engine.argv
        launch = EngineLaunch(handshake_address=handshake_address, rank=rank)
    else:
        argv = (sys.executable, "-m", "anyengine.engine")
        launch = EngineLaunch(handshake_address=handshake_address, rank=rank, engine=engine)
        env = _tuned(env)
    return ChildProcess(argv, stdin_line=msgspec.json.encode(launch) + b"\n", env=env)


_VLLM_LAUNCHER = Path(__file__).resolve().parents[1] / "vllm" / "launcher.py"  # a program, not imported here
_VLLM_PATH_BYTES = 107 - len("/anyengine-xxxxxxxx/") - 36  # an ipc path, less our directory and vLLM's socket names


def _launch_vllm(engine: VLLMEngine, handshake_address: str, rank: int) -> ChildProcess:
    scratch = _make_scratch_dir()
    launch = {
        "handshake_address": handshake_address,
        "rank": rank,
        "scratch_dir": str(scratch.path),
        "args": _vllm_args(engine),
    }
    try:
        return ChildProcess(
            (engine.python, str(_VLLM_LAUNCHER)),
            stdin_line=msgspec.json.encode(launch) + b"\n",
            env=_vllm_environment(engine, scratch.path),
            orphans_grace_s=WORKER_SHUTDOWN_TIMEOUT_S.value({**os.environ, **engine.env}),  # they need 2 to 4 s
            scratch_dir=scratch,
        )
    except BaseException:
        scratch.remove()
        raise


def _vllm_args(engine: VLLMEngine) -> dict[str, Any] | list[str]:
    """What the launcher hands on to vLLM, in the form that the user chose."""
    if isinstance(engine.args, Mapping):
        return {"model": engine.model, **engine.args}
    return [f"--model={engine.model}", *engine.args]


def _vllm_environment(engine: VLLMEngine, scratch_dir: Path) -> dict[str, str]:
    """The host's environment, with a directory for what vLLM leaves behind (sockets, for one). What torch compiles is
    kept from one start to the next."""
    import tempfile

    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}",
        **os.environ,
        "TMPDIR": str(scratch_dir),
        "VLLM_RPC_BASE_PATH": str(scratch_dir),
        **engine.env,
    }


def _make_scratch_dir() -> OwnedDirectory:
    """A private directory (mode 0700) whose path is short enough for vLLM's sockets in it."""
    import tempfile  # loads hashlib, and is needed for vLLM alone

    base = RPC_BASE_PATH.value() or tempfile.gettempdir()
    if len(os.fsencode(base)) > _VLLM_PATH_BYTES:
        base = "/tmp"  # noqa: S108 - it is made private
    return OwnedDirectory(base)


_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def _environment() -> dict[str, str]:
    """The host's environment, with this very package importable even where the host put it on ``sys.path`` by hand."""
    env = dict(os.environ)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if _PACKAGE_PARENT not in (*paths, sysconfig.get_paths()["purelib"]):
        env["PYTHONPATH"] = os.pathsep.join([_PACKAGE_PARENT, *paths])
    return env


_SPIN_COUNT = "5000"
"""How often a thread of libgomp looks for work before it sleeps: some 0.1 ms, longer than what lies between two
products of a step. Its own 300000 (ms) starve the other threads, which are then waited for, as soon as anything else
runs on these processors: a step of two threads took four to ten times as long on a busy machine."""


def _tuned(env: dict[str, str]) -> dict[str, str]:
    """``env`` with what our engine's libraries only read when the process starts, where the user has not chosen."""
    tuned = dict(env)
    if "OMP_WAIT_POLICY" not in env:
        tuned.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)
    # Weights are streamed at each step: on pages of 2 MiB by a tenth to a fifth faster. Read by glibc (2.35) alone.
    tuned.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return tuned
