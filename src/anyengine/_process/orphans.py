"""What an ended child has left running in its process group.

Owns the one distinction that matters there: Python's resource tracker outlives the processes that it serves, removes
what they left in shared memory, and ends. Whoever kills it leaks that. Does nothing where there is no ``/proc``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["kill_all_but_trackers", "live_members", "wait_ended"]

_TRACKER = b"multiprocessing.resource_tracker"


def live_members(group: int) -> list[int]:
    """The processes of ``group`` that run."""
    return [int(entry.name) for entry in _members(group) if _runs(entry)]


def kill_all_but_trackers(group: int, *, spare: int | None = None) -> list[int]:
    """SIGKILL to every process of ``group`` but resource trackers and ``spare``; which these were."""
    killed: list[int] = []
    for entry in _members(group):
        with suppress(OSError, AttributeError):  # gone meanwhile; or no pidfd
            if int(entry.name) != spare and _runs(entry) and _kill_member(entry, group):
                killed.append(int(entry.name))
    return killed


def wait_ended(group: int, limit_s: float) -> None:
    """Block until no process of ``group`` runs, for ``limit_s`` at most. Call it when all have been killed: a process
    closes its files, and so its end of every pipe, a moment before it has ended."""
    deadline_s = time.monotonic() + limit_s
    while any(_runs(entry) for entry in _members(group)) and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _members(group: int) -> Iterator[Path]:
    with suppress(OSError):
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and os.getpgid(int(entry.name)) == group:
                    yield entry


def _runs(entry: Path) -> bool:
    try:
        state = (entry / "stat").read_bytes().rpartition(b") ")[2][:1]
    except OSError:
        return False
    return state not in b"ZX"  # a zombie, or dead: it has ended, and waits for whoever inherited it


def _kill_member(entry: Path, group: int) -> bool:
    pid = int(entry.name)
    if _TRACKER in (entry / "cmdline").read_bytes():
        return False
    pidfd = os.pidfd_open(pid)
    try:
        if os.getpgid(pid) != group:  # another one by now; from here on the descriptor keeps the id from being reused
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)
