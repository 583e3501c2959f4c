"""Leak checks: what a piece of code left behind when it ended.

:class:`LeakCheck` compares what the process holds before and after: threads, ZMQ contexts, file descriptors, child
processes (orphaned grandchildren included), files in given directories, and whatever probe is added.
:func:`no_leaked_tasks` does the same for tasks, from inside the event loop. Owns the comparison and the patience that
endings need; must not know which library made the thing that leaked. :mod:`anyengine.testing.pytest_plugin` runs both
around every test.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import anyio
import anyio.lowlevel

from anyengine.testing import _probes
from anyengine.testing._probes import Holdings, Probe

__all__ = ["Leak", "LeakCheck", "LeakError", "no_leaked_tasks"]


class Leak(NamedTuple):
    """One thing that was left behind."""

    kind: str
    what: str


class LeakError(AssertionError):
    """Something outlived the code that made it. ``leaks`` lists everything that was found."""

    def __init__(self, leaks: Sequence[Leak], hints: Sequence[str] = ()) -> None:
        self.leaks: tuple[Leak, ...] = tuple(leaks)
        lines = [f"{len(leaks)} left behind:", *(f"  {leak.kind}: {leak.what}" for leak in leaks)]
        super().__init__("\n".join([*lines, *(f"  hint: {hint}" for hint in hints)]))


class LeakCheck:
    """A context manager that raises :class:`LeakError` when its body leaves something behind.

    ``directories`` must hold the same files afterwards. ``probes`` adds kinds of one's own: ``{"registry entry":
    probe}``, where a probe is a function without arguments that returns ``{key: description}``. Endings take a moment
    (a thread that was told to stop, a child that was killed), so what is found is looked at again for ``settle_s``
    before it counts. When the body raises, that exception goes on and nothing is checked.

    The check blocks while it waits: use it around an event loop, not inside one.
    """

    def __init__(
        self, *, settle_s: float = 2.0, directories: Sequence[Path] = (), probes: Mapping[str, Probe] | None = None
    ) -> None:
        self._settle_s = settle_s
        self._token = uuid.uuid4().hex
        self._outer_token: str | None = None
        self._known_pids: frozenset[int] = frozenset()
        self._before: dict[str, Holdings] = {}
        self._probes: dict[str, Probe] = {
            "thread": _probes.threads,
            "ZMQ context": _probes.zmq_threads,
            "file descriptor": _probes.descriptors,
            "process": lambda: _probes.processes(self._known_pids, self._token),
            "file": lambda: _probes.files(directories),
            **(probes or {}),
        }

    def __enter__(self) -> Self:
        self._outer_token = os.environ.get(_probes.TOKEN_VARIABLE)
        os.environ[_probes.TOKEN_VARIABLE] = self._token
        self.snapshot()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer_token is None:
            os.environ.pop(_probes.TOKEN_VARIABLE, None)
        else:
            os.environ[_probes.TOKEN_VARIABLE] = self._outer_token
        if exc is None:
            self.assert_clean()

    def snapshot(self) -> None:
        """Take what the process holds now as what it may hold at the end."""
        self._known_pids = _probes.pids()
        self._before = {kind: probe() for kind, probe in self._probes.items()}

    def find(self) -> list[Leak]:
        """What is there now and was not at the snapshot, without waiting for anything to end."""
        return [
            Leak(kind, description)
            for kind, probe in self._probes.items()
            for key, description in probe().items()
            if key not in self._before[kind]
        ]

    def assert_clean(self) -> None:
        """Wait until nothing is left, for at most ``settle_s``.

        Raises:
            LeakError: something stayed.
        """
        deadline = time.monotonic() + self._settle_s
        pause_s = 0.001
        while leaks := self.find():
            if time.monotonic() >= deadline:
                raise LeakError(leaks, _open_zmq_objects())
            gc.collect()  # what only a reference cycle keeps alive is late, not leaked
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.1)


@asynccontextmanager
async def no_leaked_tasks(*, settle_s: float = 1.0) -> AsyncIterator[None]:
    """Raise :class:`LeakError` when a task that started in the body still runs ``settle_s`` after it.

    Raises:
        LeakError: tasks were left running; their names and coroutines are named.

    Cancellation: may be cancelled at any point; then nothing is checked.
    """
    # The coroutine is the key, and is kept: a task's id may be used again as soon as the task is gone.
    before = [info.coro for info in anyio.get_running_tasks()]
    yield
    deadline = anyio.current_time() + settle_s
    await anyio.lowlevel.checkpoint()
    while left := [info for info in anyio.get_running_tasks() if not any(info.coro is known for known in before)]:
        if anyio.current_time() >= deadline:
            raise LeakError([Leak("task", f"{info.name} ({info.coro!r})") for info in left])
        await anyio.sleep(0.005)


def _open_zmq_objects() -> list[str]:
    """The likeliest owners of a descriptor. Walks every object of the process: only for a check that has failed."""
    zmq = sys.modules.get("zmq")
    if zmq is None:
        return []
    kinds = (zmq.Socket, zmq.Context)
    # type(), since isinstance() asks an object for its __class__, and not every object of a process answers kindly.
    return [f"open: {found!r}" for found in gc.get_objects() if issubclass(type(found), kinds) and not found.closed]
