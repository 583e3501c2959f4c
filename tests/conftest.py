"""What every test gets: three loops, leak checks, a guard against blocking calls, Hypothesis profiles."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import blockbuster.blockbuster
import pytest
import trio
from blockbuster import BlockBuster

import anyengine
from anyengine.testing._profiles import deep_profile, load_profile
from anyengine.testing.pytest_plugin import *  # noqa: F403 - fixtures and hooks must stand in a conftest's namespace

load_profile()

# What needs an environment with vLLM is collected where there is one (`nox -s interop`).
collect_ignore = [] if os.environ.get("ANYENGINE_VLLM_PYTHON") else ["interop"]

# The Python processes that tests start find the package that the tests found, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(anyengine.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)

_SIGNALS_BLOCKED = signal.pthread_sigmask(signal.SIG_BLOCK, ())

# A shell has its background jobs ignore Ctrl-C, and those theirs; tests send it, as a terminal does.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# BlockBuster asks asyncio alone whether the calling thread runs a loop. The code is the same on trio: so is the guard.
blockbuster.blockbuster.asyncio = SimpleNamespace(
    get_running_loop=lambda: None if trio.lowlevel.in_trio_task() else asyncio.get_running_loop()
)


@pytest.fixture(scope="session")
def blocking_guard() -> Iterator[BlockBuster]:
    """Raises ``BlockingError`` for a blocking call of ours in a loop's thread, and for anybody's ``time.sleep``."""
    guard = BlockBuster(scanned_modules="anyengine")
    guard.functions["time.sleep"] = BlockBuster().functions["time.sleep"]
    for function in guard.functions.values():
        # Popen reads the error pipe of the fork, which ends at exec: bounded, and no process starts without it.
        function.can_block_in("subprocess.py", {"_execute_child"})
        # A client has a few local files and pipes at its start and its end; it cleans up synchronously on purpose.
        function.can_block_in("_transport/endpoints.py", {"_make_private_directory", "__exit__", "__enter__"})
        function.can_block_in("anyengine/_owned_directories.py", {"__init__", "remove", "remove_leftovers"})
        function.can_block_in("_process/child.py", {"__init__", "reap", "_pump_lines"})
        function.can_block_in("_process/launch.py", {"_launch_vllm"})
        function.can_block_in("engine/in_process.py", {"close"})  # joins a thread that has said its last word
        function.can_block_in("_process/orphans.py", {"_members", "_runs", "_kill_member"})  # /proc is memory
        # A scripted engine in memory takes what a process takes; the log of one is for a test to read.
        function.can_block_in("scripted/in_memory.py", {"serve_in_memory", "_perform"})
        function.can_block_in("scripted/records.py", {"read_records"})
    guard.activate()
    yield guard
    guard.deactivate()


@pytest.fixture(autouse=True)
def no_blocking_calls(request: pytest.FixtureRequest, blocking_guard: BlockBuster) -> Iterator[None]:
    """Keeps the guard up, except in tests marked ``blocking_ok``."""
    exempt = request.node.get_closest_marker("blocking_ok") is not None
    if exempt:
        blocking_guard.deactivate()
    yield
    if exempt:
        blocking_guard.activate()


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """A test that leaves a signal blocked makes one hang that comes long after it."""
    yield
    assert signal.pthread_sigmask(signal.SIG_SETMASK, _SIGNALS_BLOCKED) == _SIGNALS_BLOCKED


@pytest.fixture(scope="session")
def deep() -> bool:
    """Whether this is the deep profile: counts that take minutes instead of seconds."""
    return deep_profile()


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The checkout."""
    return Path(__file__).parents[1]


@pytest.fixture(scope="session")
def package_root() -> Path:
    """The directory of the package under test."""
    return Path(anyengine.__file__).parent
