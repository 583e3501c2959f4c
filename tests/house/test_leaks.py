"""Each kind of leak is found, named, and forgiven when it ends in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGKILL

import anyio
import pytest
import zmq

from anyengine.testing.leaks import LeakCheck, LeakError, no_leaked_tasks

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
ORPHAN = [sys.executable, "-c", f"import subprocess; print(subprocess.Popen({SLEEPER!r}, stdout=2).pid)"]


@contextmanager
def leaked_thread(_: Path) -> Iterator[None]:
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="planted")
    thread.start()
    try:
        yield
    finally:
        release.set()
        thread.join()


@contextmanager
def leaked_descriptor(_: Path) -> Iterator[None]:
    reader, writer = os.pipe()
    try:
        yield
    finally:
        os.close(reader)
        os.close(writer)


@contextmanager
def leaked_child(_: Path) -> Iterator[None]:
    with subprocess.Popen(SLEEPER) as process:
        try:
            yield
        finally:
            process.kill()


@contextmanager
def leaked_zombie(_: Path) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        process.stdout.read()
        yield


@contextmanager
def leaked_grandchild(_: Path) -> Iterator[None]:
    pid = int(subprocess.check_output(ORPHAN))
    try:
        yield
    finally:
        os.kill(pid, SIGKILL)


@contextmanager
def leaked_context(_: Path) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.PULL):
        yield


@contextmanager
def leaked_file(directory: Path) -> Iterator[None]:
    path = directory / "input.ipc"
    path.touch()
    try:
        yield
    finally:
        path.unlink()


PLANTS = [
    pytest.param(leaked_thread, "thread", "planted", id="thread"),
    pytest.param(leaked_descriptor, "file descriptor", "pipe:", id="descriptor"),
    pytest.param(leaked_child, "process", "time.sleep(60)", id="child"),
    pytest.param(leaked_zombie, "process", "zombie", id="zombie"),
    pytest.param(leaked_grandchild, "process", "time.sleep(60)", id="orphaned-grandchild"),
    pytest.param(leaked_context, "ZMQ context", "ZMQbg", id="zmq"),
    pytest.param(leaked_file, "file", "input.ipc", id="file"),
]


@pytest.mark.parametrize(("plant", "kind", "word"), PLANTS)
def test_leak_is_found_and_named(plant: Callable[[Path], Iterator[None]], kind: str, word: str, tmp_path: Path) -> None:
    check = LeakCheck(settle_s=0.05, directories=[tmp_path])  # libzmq's threads need a moment to take their names
    with check:
        with plant(tmp_path), pytest.raises(LeakError) as caught:
            check.assert_clean()
        # Leaving the outer block shows the other half: once it has ended, it is no leak.
        check._settle_s = 5
    assert any(leak.kind == kind and word in leak.what for leak in caught.value.leaks), caught.value
    assert word in str(caught.value)


def test_a_context_that_leaked_names_its_open_sockets(tmp_path: Path) -> None:
    check = LeakCheck(settle_s=0)
    check.snapshot()
    with leaked_context(tmp_path), pytest.raises(LeakError, match=r"hint: open: <zmq\.Socket"):
        check.assert_clean()


def test_a_thread_that_ends_in_time_is_no_leak() -> None:
    with LeakCheck(settle_s=5):
        threading.Timer(0.05, lambda: None).start()


def test_a_probe_of_ones_own() -> None:
    registry: dict[object, str] = {"kept": "request kept"}
    check = LeakCheck(settle_s=0, probes={"registry entry": lambda: dict(registry)})
    check.snapshot()
    registry["lost"] = "request lost"
    assert check.find() == [("registry entry", "request lost")]


def test_the_body_s_own_error_goes_first(tmp_path: Path) -> None:
    def fail() -> None:
        (tmp_path / "left").touch()
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"), LeakCheck(settle_s=0, directories=[tmp_path]):
        fail()


@pytest.mark.anyio
async def test_a_leaked_task_is_found_and_named() -> None:
    async with anyio.create_task_group() as group:
        with pytest.raises(LeakError, match="task: planted") as caught:
            async with no_leaked_tasks(settle_s=0.01):
                group.start_soon(anyio.sleep_forever, name="planted")
        group.cancel_scope.cancel()
    assert [leak.kind for leak in caught.value.leaks] == ["task"]


@pytest.mark.anyio
async def test_a_task_that_ends_in_time_is_no_leak() -> None:
    async with anyio.create_task_group() as group, no_leaked_tasks():
        group.start_soon(anyio.sleep, 0.01)


IMPATIENT = """
from anyengine.testing.leaks import LeakCheck, no_leaked_tasks
from anyengine.testing.pytest_plugin import *

for function in (LeakCheck.__init__, no_leaked_tasks.__wrapped__):
    function.__kwdefaults__["settle_s"] = 0.1
"""

PLANTED = """
import anyio, asyncio, os, pytest, tempfile, threading
from hypothesis import given, strategies as st

lost = []

def test_thread():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    lost.append(release)

def test_descriptor():
    lost.append(os.pipe())

def test_temporary_directory():
    tempfile.mkdtemp(prefix="anyengine-")

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_task():
    lost.append(asyncio.create_task(anyio.sleep_forever()))

@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@given(st.booleans())
async def test_task_of_an_example(_):
    lost.append(asyncio.create_task(anyio.sleep_forever()))

def test_clean():
    pass
"""


def test_the_plugin_fails_tests_that_leak(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(IMPATIENT)
    (tmp_path / "test_planted.py").write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--rootdir=.", "--basetemp=base", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    outcome = {line.split("::")[1].split()[0]: line.split()[0] for line in done.stdout.splitlines() if "py::" in line}
    assert outcome == {
        "test_thread": "ERROR",
        "test_descriptor": "ERROR",
        "test_temporary_directory": "ERROR",
        "test_task[asyncio]": "FAILED",
        "test_task_of_an_example[asyncio]": "FAILED",
        "test_clean": "PASSED",
    }, done.stdout
