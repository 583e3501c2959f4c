"""What a child started may outlive it for a while: long enough to clean up, never for ever."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import anyio
import pytest
from child_scripts import FORK, PATIENCE_S, Start, Transcript, wait_gone, watching

from anyengine._owned_directories import OwnedDirectory
from anyengine._process import child as child_module
from anyengine._process.orphans import live_members

pytestmark = [pytest.mark.anyio, pytest.mark.blocking_ok]  # looks at files from inside the loop

TIDY = """
def tidy():  # an orphan that needs a moment, and says so
    def leave(*args):
        os.write(2, b"cleaned up\\n")
        os._exit(0)
    signal.signal(signal.SIGTERM, leave)
    os.write(1, b"ready\\n")
    while True:
        signal.pause()
"""
STUBBORN = """
def stubborn():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ready\\n")
    while True:
        signal.pause()
"""
SHARED = """
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=16).name, flush=True)
"""
LEAVE = "\nos.write(1, b'ready\\n')\nsignal.pause()"


@pytest.fixture
def start():
    with watching() as start:
        yield start


async def run_to_its_end(start: Start, said: Transcript, script: str, **options: object) -> tuple[object, list[str]]:
    """A child that leaves when its orphan is ready; the child, and what was on its standard output."""
    child = start(FORK + script + LEAVE, **options)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: said.stdout.count(b"ready") == 2)  # the orphan is, and the child
        child.terminate()
    return child, [line.decode() for line in said.stdout if line != b"ready"]


async def test_an_orderly_orphan_ends_by_itself(start: Start) -> None:
    said = Transcript()
    child, (pid,) = await run_to_its_end(start, said, TIDY + "fork(tidy)", orphans_grace_s=PATIENCE_S)
    child.kill()  # not the orphan
    with anyio.fail_after(PATIENCE_S):
        await child.wait_orphans(said.take_stderr)
    await wait_gone(int(pid))
    assert "cleaned up" in said.stderr


async def test_without_a_grace_period_it_is_killed(start: Start) -> None:
    said = Transcript()
    child, (pid,) = await run_to_its_end(start, said, TIDY + "fork(tidy)")
    child.kill()
    await wait_gone(int(pid))
    await child.wait_orphans(said.take_stderr)
    assert "cleaned up" not in said.stderr


@pytest.mark.parametrize("waits", ["in the loop", "when reaped"])
async def test_a_stubborn_orphan_is_killed_and_its_shared_memory_goes(start: Start, waits: str) -> None:
    """The resource tracker is left alone until it has done its work."""
    said = Transcript()
    child, (name, pid) = await run_to_its_end(start, said, STUBBORN + SHARED + "fork(stubborn)", orphans_grace_s=0.2)
    assert (Path("/dev/shm") / name).exists()
    if waits == "in the loop":
        await child.wait_orphans(said.take_stderr)
    child.reap()
    await wait_gone(int(pid))
    assert not (Path("/dev/shm") / name).exists()


@pytest.mark.feature("L05")
@pytest.mark.parametrize("waits", ["in the loop", "when reaped"])
async def test_a_resource_tracker_is_given_time_until_what_was_killed_has_ended(
    start: Start, waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may need seconds for that: here, until somebody has looked often enough."""
    monkeypatch.setattr(child_module, "_TEAR_DOWN_S", 0.05)
    pending, looks = list[int](), itertools.count()

    def take_note(group: int) -> list[int]:
        pending.extend(member for member in live_members(group) if b"resource_tracker" not in command_line(member))
        return list(pending)

    def look(group: int) -> list[int]:
        if next(looks) == 40:
            for member in pending:
                os.kill(member, signal.SIGKILL)
        return live_members(group)

    said = Transcript()
    child, (name, pid) = await run_to_its_end(start, said, STUBBORN + SHARED + "fork(stubborn)", orphans_grace_s=0.2)
    monkeypatch.setattr(child_module, "kill_all_but_trackers", take_note)
    monkeypatch.setattr(child_module, "live_members", look)
    if waits == "in the loop":
        await child.wait_orphans(said.take_stderr)
    child.reap()
    await wait_gone(int(pid))
    assert child.killed_orphans == [int(pid)]
    assert not (Path("/dev/shm") / name).exists()


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_a_scratch_directory_goes_last(start: Start, tmp_path: Path) -> None:
    said = Transcript()
    owned = OwnedDirectory(tmp_path)
    scratch = owned.path
    (scratch / "file").touch()
    child, _ = await run_to_its_end(start, said, TIDY + "fork(tidy)", orphans_grace_s=PATIENCE_S, scratch_dir=owned)
    assert scratch.exists()
    child.reap()
    assert not scratch.exists()
