"""What a killed client leaves behind is found by the next one, and nothing else is touched."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from anyengine._owned_directories import OwnedDirectory, remove_leftovers

KILLED = """
import os, signal, sys
from anyengine._owned_directories import OwnedDirectory
owned = OwnedDirectory(sys.argv[1])
(owned.path / "i").touch()
if sys.argv[2] == "fork" and os.fork() == 0:
    print(owned.path, flush=True)
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] != "fork":
    print(owned.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(base: Path, *, fork: bool = False) -> tuple[subprocess.Popen[str], Path]:
    """A process that was killed with a directory of its own, and that directory."""
    command = [sys.executable, "-c", KILLED, str(base), "fork" if fork else "-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    path = Path(process.stdout.readline().rstrip())
    assert process.wait(10) == -signal.SIGKILL
    return process, path


@pytest.mark.case("K14")
def test_the_next_start_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    process, left = killed(tmp_path)
    with process:
        assert (left / "i").exists()
    mine = OwnedDirectory(tmp_path)
    assert not left.exists()
    other = OwnedDirectory(tmp_path)  # what is in use stays
    assert mine.path.is_dir() and other.path.is_dir() and mine.path != other.path
    mine.remove()
    mine.remove()
    assert list(tmp_path.iterdir()) == [other.path]
    other.remove()


@pytest.mark.case("K14")
def test_what_a_fork_of_its_owner_still_uses_stays(tmp_path: Path) -> None:
    process, left = killed(tmp_path, fork=True)
    with process:
        assert remove_leftovers(tmp_path) == []
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.read()  # the fork ends
    assert remove_leftovers(tmp_path) == [left]


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "anyengine-no-lock").mkdir()
    (tmp_path / "anyengine-file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "owner").touch()
    (tmp_path / "anyengine-link").symlink_to(tmp_path / "other")
    tricky = tmp_path / "anyengine-tricky"
    tricky.mkdir()
    (tricky / "owner").symlink_to(tmp_path / "other" / "owner")
    before = sorted(tmp_path.iterdir())
    assert remove_leftovers(tmp_path) == []
    assert sorted(tmp_path.iterdir()) == before
    assert remove_leftovers(tmp_path / "nowhere") == []


def test_where_files_cannot_be_locked_nothing_is_taken_for_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    mine = OwnedDirectory(tmp_path)
    monkeypatch.undo()
    assert remove_leftovers(tmp_path) == []
    assert mine.path.is_dir()
    mine.remove()
    assert list(tmp_path.iterdir()) == []
