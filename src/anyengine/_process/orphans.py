"""What an ended child has left running in its process group.

Owns the one distinction that matters there: Python's resource tracker outlives the processes that it serves, removes
what they left in shared memory, and ends. Whoever kills it leaks that.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["kill_all_but_trackers"]

_TRACKER = b"multiprocessing.resource_tracker"


def kill_all_but_trackers(group: int) -> None:
    """SIGKILL to every process of ``group`` but resource trackers. Does nothing where there is no ``/proc``."""
    with suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError, AttributeError):  # gone meanwhile; or no pidfd
                    _kill_member(entry, group)


def _kill_member(entry: Path, group: int) -> None:
    pid = int(entry.name)
    if os.getpgid(pid) != group or _TRACKER in (entry / "cmdline").read_bytes():
        return
    pidfd = os.pidfd_open(pid)
    try:
        if os.getpgid(pid) == group:  # still the same one, since the descriptor keeps its id from being given away
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
