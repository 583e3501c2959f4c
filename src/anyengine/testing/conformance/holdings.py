"""What an engine's processes hold of the operating system, and what of it is still there afterwards.

Owns the reading of ``/proc``; sees nothing on other systems than Linux. Blocking: for a worker thread.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["Holdings", "holdings_of", "left_of"]

_PROC = Path("/proc")
_SHARED_MEMORY = re.compile(rb"/dev/shm/\S+")


class Holdings(NamedTuple):
    """The process group of an engine and the shared memory that its processes have mapped."""

    group: int
    shared_memory: frozenset[str]


def holdings_of(pid: int) -> Holdings:
    """What the engine with this process id (which leads its group) holds now."""
    mapped: set[str] = set()
    for member in _members(pid):
        with suppress(OSError):
            mapped |= {os.fsdecode(name) for name in _SHARED_MEMORY.findall((_PROC / member / "maps").read_bytes())}
    return Holdings(pid, frozenset(mapped))


def left_of(holdings: Holdings) -> list[str]:
    """What is still there: processes that run, segments of shared memory."""
    running = [f"process {member}" for member in _members(holdings.group)]
    return [*running, *sorted(name for name in holdings.shared_memory if Path(name).exists())]


def _members(group: int) -> list[str]:
    """The processes of ``group`` that run."""
    found = []
    with suppress(OSError):
        for entry in _PROC.iterdir():
            if entry.name.isdecimal():
                with suppress(OSError):  # gone meanwhile
                    # "pid (comm) state ppid pgrp ...": comm may hold spaces and brackets, so count from its end.
                    state, _, pgrp, *_ = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                    if int(pgrp) == group and state not in (b"Z", b"X"):
                        found.append(entry.name)
    return found
