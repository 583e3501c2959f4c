"""What this process holds right now: threads, descriptors, child processes, files. One probe for each kind.

A probe returns ``{key: description}``; whatever has a key that was not there before has been left behind. Owns how the
operating system is asked, and which caches of others are fine; must not know what a leak means to whom
(:mod:`anyengine.testing.leaks` does). Descriptors, native threads and processes are read from ``/proc``: on other
systems than Linux those three see nothing.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

__all__ = ["TOKEN_VARIABLE", "Holdings", "Probe", "descriptors", "files", "pids", "processes", "threads", "zmq_threads"]

Holdings: TypeAlias = Mapping[Hashable, str]
"""What one probe saw: a key for each thing, and words for a person."""

Probe: TypeAlias = Callable[[], Holdings]

TOKEN_VARIABLE = "ANYENGINE_LEAK_CHECK"  # noqa: S105 - the name of a variable
"""Set in our environment while a check runs: children inherit it, and are known as ours even without their parent."""

_PROC = Path("/proc")

# Idle workers that the backends keep on purpose: AnyIO's (asyncio) until its loop ends, trio's for 10 s. A busy
# trio worker carries another name.
_IDLE_WORKER = re.compile(r"AnyIO worker thread|Trio thread \d+")

# Opened once for each process by the interpreter or a driver, never by us.
_CACHED_DESCRIPTOR = re.compile(r"/dev/u?random|/dev/nvidia.*")


def threads() -> Holdings:
    """Python threads, apart from idle workers of the backends."""
    return {thread: repr(thread) for thread in threading.enumerate() if not _IDLE_WORKER.fullmatch(thread.name)}


def zmq_threads() -> Holdings:
    """libzmq's own threads: while they run, a context has not been terminated."""
    found: dict[Hashable, str] = {}
    for task in _listdir(_PROC / "self" / "task"):
        name = _read(_PROC / "self" / "task" / task / "comm").decode(errors="replace").strip()
        if name.startswith("ZMQ"):
            found[task] = f"{name} (a ZMQ context that was not terminated)"
    return found


def descriptors() -> Holdings:
    """Open file descriptors and what they lead to."""
    found: dict[Hashable, str] = {}
    for number in _listdir(_PROC / "self" / "fd"):
        try:
            target = str((_PROC / "self" / "fd" / number).readlink())
        except OSError:
            continue  # closed meanwhile; the listing's own descriptor always is
        if not _CACHED_DESCRIPTOR.fullmatch(target):
            found[number, target] = f"fd {number} -> {target}"
    return found


def files(directories: Iterable[Path]) -> Holdings:
    """Everything below ``directories``."""
    return {path: str(path) for directory in directories for path in directory.rglob("*")}


def pids() -> frozenset[int]:
    """Every process of the system."""
    return frozenset(int(name) for name in _listdir(_PROC) if name.isdecimal())


def processes(known: frozenset[int], token: str) -> Holdings:
    """Processes outside ``known`` that descend from us or carry ``token`` in their environment; zombies count."""
    mark = f"{TOKEN_VARIABLE}={token}".encode()
    found: dict[Hashable, str] = {}
    for pid in pids() - known:
        if _descends_from_us(pid) or mark in _read(_PROC / str(pid) / "environ").split(b"\0"):
            command = _read(_PROC / str(pid) / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
            found[pid] = f"pid {pid}: {command or 'a zombie that nobody waited for'}"
    return found


def _descends_from_us(pid: int) -> bool:
    us = os.getpid()
    while pid > 1:
        # "pid (comm) state ppid ...": comm may hold spaces and brackets, so count from its end.
        fields = _read(_PROC / str(pid) / "stat").rpartition(b")")[2].split()
        if len(fields) < 2:
            return False  # gone meanwhile
        pid = int(fields[1])
        if pid == us:
            return True
    return False


def _listdir(path: Path) -> list[str]:
    try:
        return [entry.name for entry in path.iterdir()]
    except OSError:
        return []  # not Linux


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # gone meanwhile, or another user's
