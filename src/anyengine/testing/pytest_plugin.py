"""A pytest plugin: every test on every event loop, and nothing left behind by any of them.

Use it with ``from anyengine.testing.pytest_plugin import *`` in a ``conftest.py``. Owns the three loops (asyncio in
debug mode, asyncio on uvloop, trio) and the automatic leak checks; must not know how a leak is found
(:mod:`anyengine.testing.leaks` does). Needs pytest, trio and uvloop.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from anyengine.testing.leaks import LeakCheck, no_leaked_tasks

__all__ = [
    "BACKENDS",
    "anyio_backend",
    "first_loop",
    "nothing_left_behind",
    "private_temp_dir",
    "pytest_pyfunc_call",
    "pytest_runtest_makereport",
]

BACKENDS: dict[str, tuple[str, dict[str, bool]]] = {
    "asyncio": ("asyncio", {"debug": True}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}

_failed = pytest.StashKey[bool]()


@pytest.fixture(scope="module", params=list(BACKENDS.values()), ids=list(BACKENDS))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Runs an async test three times. Of module scope, so that async fixtures may live as long."""
    return request.param


@pytest.fixture(scope="session")
def first_loop() -> None:
    """libuv makes a signal pipe with the first loop of a process and keeps it; have it before anything is counted."""
    anyio.run(anyio.lowlevel.checkpoint, backend="asyncio", backend_options={"use_uvloop": True})


@pytest.fixture
def private_temp_dir(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary directory of the test's own, also for its children; short: an ipc path has 107 bytes at most."""
    tmp_path_factory.getbasetemp()  # made now, or it would be made inside the first test's own directory
    # torch keeps a cache for each user in the temporary directory, whoever imports it first.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"))
    path = Path(tempfile.mkdtemp(prefix="ae-"))
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, first_loop: None, private_temp_dir: Path) -> Iterator[None]:
    """Fails a test that leaves a thread, a ZMQ context, a descriptor, a process or a temporary file."""
    check = LeakCheck(directories=[private_temp_dir])
    with check:
        yield
        if request.node.stash.get(_failed, False):
            check.snapshot()  # the test has failed already: what it left is no second failure


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Looks for leaked tasks from inside the loop, when the body of an async test has ended."""
    hypothesis = getattr(pyfuncitem.obj, "hypothesis", None)
    if hypothesis is not None:
        # AnyIO's plugin replaces inner_test, and finds what it replaced under this name the next time.
        inner = getattr(hypothesis.inner_test, "_anyio_original_func", hypothesis.inner_test)
        if inspect.iscoroutinefunction(inner):
            hypothesis.inner_test = _checking_tasks(inner)
    elif inspect.iscoroutinefunction(pyfuncitem.obj):
        pyfuncitem.obj = _checking_tasks(pyfuncitem.obj)
    return (yield)


def _checking_tasks(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    if hasattr(function, "_checks_tasks"):
        return function  # a Hypothesis test comes by once for each loop

    @functools.wraps(function)
    async def checked(*args: Any, **kwargs: Any) -> None:
        async with no_leaked_tasks():
            await function(*args, **kwargs)

    checked._checks_tasks = True  # type: ignore[attr-defined]  # a mark on a function
    return checked
