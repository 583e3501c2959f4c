"""What a scripted engine takes of the machine: a lock file that stands for a GPU, shared memory, grandchildren.

Owns the taking and the giving back.
"""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import ExitStack
from pathlib import Path

from .script import Script

__all__ = ["take_resources"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where named segments live on Linux


def take_resources(script: Script) -> ExitStack:
    """Take everything; the stack gives back what does not go by itself when the process ends.

    Raises:
        OSError: somebody else has the lock, or a segment of that name exists.
    """
    with ExitStack() as taken:
        if script.lock_file is not None:
            fd = os.open(script.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            taken.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise OSError(f"the device is in use: somebody else has locked {script.lock_file}") from exc
        if script.shared_memory is not None:
            segment = _SHARED_MEMORY / script.shared_memory
            fd = os.open(segment, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            taken.callback(segment.unlink, missing_ok=True)
            try:
                os.posix_fallocate(fd, 0, script.shared_memory_bytes)
            finally:
                os.close(fd)
        for _ in range(script.grandchildren):
            _leave_grandchild()
        return taken.pop_all()


def _leave_grandchild() -> None:
    """A process that holds what it inherits (pipes, the lock), ignores SIGTERM and never ends by itself."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
