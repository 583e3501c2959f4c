"""How an engine core is started: the command line, the environment and the line on its standard input.

Owns nothing at run time. No pickle, no fork: ``python -m anyengine.engine`` in a fresh interpreter, or somebody's
program.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import msgspec

from anyengine.config import CommandEngine, EmbeddedEngine, EngineLaunch

from .child import ChildProcess

__all__ = ["launch_engine"]


def launch_engine(engine: EmbeddedEngine | CommandEngine, *, handshake_address: str, rank: int = 0) -> ChildProcess:
    """Start one engine core process.

    Raises:
        OSError: the program cannot be started.
    """
    if isinstance(engine, CommandEngine):
        argv = engine.argv
        launch = EngineLaunch(handshake_address=handshake_address, rank=rank)
    else:
        argv = (sys.executable, "-m", "anyengine.engine")
        launch = EngineLaunch(handshake_address=handshake_address, rank=rank, engine=engine)
    return ChildProcess(argv, stdin_line=msgspec.json.encode(launch) + b"\n", env=_environment())


_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def _environment() -> dict[str, str]:
    """The host's environment, with this very package importable even where the host put it on ``sys.path`` by hand."""
    env = dict(os.environ)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    if _PACKAGE_PARENT not in (*paths, sysconfig.get_paths()["purelib"]):
        env["PYTHONPATH"] = os.pathsep.join([_PACKAGE_PARENT, *paths])
    return env
