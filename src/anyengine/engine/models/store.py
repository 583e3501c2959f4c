"""The user's cache directory, and how files get into it.

Owns the rule that whatever has its final name is complete: work happens under a temporary name in the same file
system and one rename publishes it, so any number of processes may race for the same thing and a killed one leaves
only a temporary directory behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cache_dir", "file_sha256", "publish_dir", "publish_file", "workspace"]

_ABANDONED_AFTER_S = 24 * 3600


def cache_dir() -> Path:
    """``$ANYENGINE_CACHE``, else ``$XDG_CACHE_HOME/anyengine``, else ``~/.cache/anyengine``. It need not exist yet."""
    if own := os.environ.get("ANYENGINE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anyengine"


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A fresh directory beside the published files; what is left in it goes at the end."""
    parent = cache_dir() / "partial"
    parent.mkdir(parents=True, exist_ok=True)
    _sweep(parent)
    path = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the workspaces of processes that were killed a day ago or more."""
    for path in parent.iterdir():
        with contextlib.suppress(OSError):  # another process may be sweeping, too
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def publish_file(source: Path, target: Path) -> None:
    """Give a complete file its final name; an existing one is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)


def publish_dir(source: Path, target: Path) -> None:
    """Give a complete directory its final name; one that another process has published meanwhile stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        source.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def file_sha256(path: Path, *, first_bytes: int | None = None) -> str:
    """Hex digest of the file, or of its first bytes."""
    with path.open("rb") as file:
        if first_bytes is None:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return hashlib.sha256(file.read(first_bytes)).hexdigest()
