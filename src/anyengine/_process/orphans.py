"""What an ended child has left running in its process group.

Owns the one distinction that matters there: Python's resource tracker outlives the processes that it serves, removes
what they left in shared memory, and ends. Whoever kills it leaks that.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["kill_all_but_trackers", "live_members"]

_TRACKER = b"multiprocessing.resource_tracker"


def live_members(group: int) -> Iterator[int]:
    """The processes of ``group`` that run; none where there is no ``/proc``."""
    with suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # gone meanwhile
                    if os.getpgid(int(entry.name)) == group and not _is_zombie(entry):
                        yield int(entry.name)


def kill_all_but_trackers(group: int) -> list[int]:
    """SIGKILL to every process of ``group`` but resource trackers; which these were. Does nothing where there is no
    ``/proc``."""
    killed: list[int] = []
    for pid in live_members(group):
        with suppress(OSError, AttributeError):  # gone meanwhile; or no pidfd
            if _kill_member(pid, group):
                killed.append(pid)
    return killed


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"


def _kill_member(pid: int, group: int) -> bool:
    if _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes():
        return False
    pidfd = os.pidfd_open(pid)
    try:
        if os.getpgid(pid) != group:  # another one by now; from here on the descriptor keeps the id from being reused
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        return True
    finally:
        os.close(pidfd)
