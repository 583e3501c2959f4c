"""Private directories of a client, and those that a killed one has left behind.

Owns the directories under the system's temporary places: each has a file that its owner keeps locked. The kernel drops
the lock with the last process that holds it, however that ends, so whoever gets the lock knows that nobody needs the
directory any more. Nothing here depends on a process ending in order.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

__all__ = ["OwnedDirectory", "remove_leftovers"]

_PREFIX = "anyengine-"
_LOCK = "owner"


class OwnedDirectory:
    """A private directory (mode 0700) under ``base``, owned until :meth:`remove`. Making one removes what killed
    clients have left there.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, base: str | Path) -> None:
        import tempfile  # loads hashlib, and is needed once

        remove_leftovers(base)
        self.path: Path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Locked before it has its name, or another client could find it without an owner. A fork of the host holds the
        # lock too; what it executes does not.
        unnamed = self.path / f"{_LOCK}.new"
        self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: then it has no lock file, and is never taken for left
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Remove the directory and all that is in it. Synchronous, idempotent; never raises."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove_leftovers(base: str | Path) -> list[Path]:
    """Remove the directories under ``base`` whose owner, a client of this user, is no more; which these were.

    One without its lock file is left alone: it is being made now, or it is not ours.
    """
    removed: list[Path] = []
    with suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX):
                with suppress(OSError):  # somebody else's, in use, or gone meanwhile
                    if _was_left(Path(entry.path)):
                        removed.append(Path(entry.path))
    return removed


def _was_left(path: Path) -> bool:
    """Whether nobody owned ``path``; then it has been removed.

    Raises:
        OSError: it is in use, or not to be touched.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(fd)
