"""One child process: its last words, how it ended, and that nothing of it stays behind. Real processes throughout."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
from child_scripts import FORK, PATIENCE_S, Start, Transcript, wait_gone, watching

from anyengine._process.child import ChildProcess, ProcessExit

pytestmark = pytest.mark.anyio

PAUSE = "import os, signal; os.write(1, b'up\\n'); signal.pause()"


@pytest.fixture
def start() -> Iterator[Start]:
    with watching() as start:
        yield start


def host_child(script: str, *, start_new_session: bool = False) -> subprocess.Popen[bytes]:
    """A process that the host started by itself."""
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", script], start_new_session=start_new_session)


@pytest.fixture
def said() -> Transcript:
    return Transcript()


def has_ended(pid: int) -> bool:
    """Whether a process runs no more, be it reaped or not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 0)[0])
    finally:
        os.close(pidfd)


# -------------------------------------------------------------------------------------------------------- how it ended


@pytest.mark.parametrize("code", [0, 3, 255])
async def test_an_exit_code(start: Start, said: Transcript, code: int) -> None:
    child = start(f"raise SystemExit({code})")
    await said.watch(child)
    assert child.exited.is_set()
    assert child.poll() == child.reap() == ProcessExit(child.pid, code, None)
    assert str(child.poll()) == f"exited with code {code}"


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGKILL, "SIGKILL"), (signal.SIGTERM, "SIGTERM"), (signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")],
)
async def test_a_signal_by_name(start: Start, said: Transcript, number: int, name: str) -> None:
    child = start(
        f"import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), {int(number)})"
    )
    await said.watch(child)
    assert child.poll() == child.reap() == ProcessExit(child.pid, None, name)
    assert str(child.poll()) == f"was killed by {name}"


async def test_a_child_that_lives_has_not_ended(start: Start, said: Transcript) -> None:
    child = start(PAUSE)
    assert child.poll() is None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: said.stdout == [b"up"])
        assert child.poll() is None
        assert not child.exited.is_set()
        child.kill()
    assert child.poll() == ProcessExit(child.pid, None, "SIGKILL")


async def test_children_that_die_at_once(start: Start) -> None:
    """Whether they are seen before or after their end, and whether or not they read what they are told."""
    for _ in range(5):
        child, said = start("import os; os.close(0); os._exit(7)", stdin_line=b"x" * 10_000), Transcript()
        await said.watch(child)
        assert child.poll() == ProcessExit(child.pid, 7, None)


async def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ChildProcess(["/no-such-program"], stdin_line=b"\n")


async def test_a_host_that_ignores_sigchld_never_learns_how(start: Start, said: Transcript) -> None:
    """The kernel reaps for such a host, and the id may be anybody's from then on: nothing may be sent to it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child = start("raise SystemExit(3)")
        await said.watch(child)
        assert child.poll() == ProcessExit(child.pid, None, None)
        assert str(child.poll()) == "exited in an unknown way"
        child.terminate()
        child.kill()
        assert child.reap() == ProcessExit(child.pid, None, None)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("missing", ["no such call", "refused"])
async def test_without_a_pidfd_the_pipes_tell(
    start: Start, said: Transcript, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Other systems than Linux have none, and old sandboxes refuse it."""

    def refuse(pid: int) -> int:
        raise PermissionError(1, "refused by the sandbox")

    if missing == "refused":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    child = start("import os; os.write(2, b'last words'); os._exit(3)")
    await said.watch(child)
    assert child.poll() == child.reap() == ProcessExit(child.pid, 3, None)
    assert child.stderr_tail() == ("last words",)


# -------------------------------------------------------------------------------------------------------- what it says


async def test_what_it_is_told_and_what_it_inherits(start: Start, said: Transcript) -> None:
    script = "import os; print(input(), os.environ['WORD'], os.getsid(0) == os.getpgid(0) == os.getpid())"
    child = start(script, stdin_line=b"a line\n", env={"WORD": "w"})
    await said.watch(child)
    assert said.stdout == [b"a line w True"]


@pytest.mark.feature("F11")
async def test_lines_arrive_in_order_however_they_are_cut(start: Start, said: Transcript) -> None:
    script = """
import os
text = b"".join(b"line %d\\n" % i for i in range(2000)) + b"\\n\\nlast"
for i in range(0, len(text), 997):
    os.write(1, text[i:i + 997])
    os.write(2, text[i:i + 997])
"""
    child = start(script)
    await said.watch(child)
    lines = [f"line {i}" for i in range(2000)] + ["", "", "last"]
    assert [line.decode() for line in said.stdout] == lines
    assert said.stderr == lines


@pytest.mark.feature("F11")
async def test_the_last_lines_are_kept_even_of_one_that_is_killed(start: Start, said: Transcript) -> None:
    child = start(
        "import os\nfor i in range(300): os.write(2, b'%d\\n' % i)\nos.write(2, b'last words')\nos.kill(os.getpid(), 9)"
    )
    await said.watch(child)
    assert child.poll() == ProcessExit(child.pid, None, "SIGKILL")
    everything = [*map(str, range(300)), "last words"]
    assert said.stderr == everything
    assert child.stderr_tail(1) == ("last words",)
    assert child.stderr_tail() == tuple(everything[-50:])
    assert child.stderr_tail(200) == child.stderr_tail(1000) == tuple(everything[-200:])
    child.reap()
    assert child.stderr_tail(1) == ("last words",)


async def test_one_that_ended_before_anyone_watched_is_heard(start: Start, said: Transcript) -> None:
    child = start("import os\nfor fd in (1, 2): os.write(fd, b'x' * 30_000 + b'\\n' + b'y' * 30_000)")
    await wait_gone(child.pid)
    await said.watch(child)
    assert said.stdout == [b"x" * 30_000, b"y" * 30_000]
    assert said.stderr == ["x" * 30_000, "y" * 30_000]


async def test_bytes_that_are_no_text_do_not_stop_it(start: Start, said: Transcript) -> None:
    child = start(r"import os; os.write(2, b'caf\xc3\xa9 \xff\xfe\n'); os.write(1, b'\xff\n')")
    await said.watch(child)
    assert child.stderr_tail() == ("café \\xff\\xfe",)
    assert said.stdout == [b"\xff"]


async def test_a_mebibyte_is_one_line_and_more_is_cut(start: Start, said: Transcript) -> None:
    script = (
        "import sys; w = sys.stdout.buffer.write; w(b'a' * (1 << 20)); w(b'\\n'); w(b'b' * (3 << 20)); w(b'\\nc\\n')"
    )
    await said.watch(start(script))
    assert said.stdout[0] == b"a" * (1 << 20)
    long = said.stdout[1:-1]
    assert b"".join(long) == b"b" * (3 << 20)
    assert len(long) >= 2
    assert max(map(len, long)) < (1 << 20) + (1 << 17)  # what is held of a line that never ends is bounded
    assert said.stdout[-1] == b"c"


@pytest.mark.parametrize("stream", [1, 2])
async def test_one_that_writes_without_pause_does_not_keep_the_loop(start: Start, stream: int) -> None:
    child = start(f"import os\nwhile True: os.write({stream}, b'y\\n' * 100)")
    lines = 0
    first = anyio.Event()

    def take(_: object) -> None:
        nonlocal lines
        lines += 1
        assert lines < 5_000_000, "no other task got its turn"
        first.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.watch, take, take)
        await first.wait()
        child.kill()
    assert child.poll() == ProcessExit(child.pid, None, "SIGKILL")


# ----------------------------------------------------------------------------------------------------- how it is ended


async def test_terminate_asks_the_child_alone(start: Start, said: Transcript) -> None:
    child = start(FORK + "fork(signal.pause); signal.pause()")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: bool(said.stdout))
        child.terminate()
    assert child.poll() == ProcessExit(child.pid, None, "SIGTERM")
    assert not has_ended(int(said.stdout[0]))  # the grandchild goes with reap()
    child.terminate()  # of one that has ended: nothing


async def test_one_that_ignores_sigterm_is_killed(start: Start, said: Transcript) -> None:
    child = start(
        "import os, signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'no\\n'))\n"
        "os.write(1, b'up\\n')\n"
        "while True: signal.pause()"
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: said.stdout == [b"up"])
        child.terminate()
        await said.until(lambda: said.stdout == [b"up", b"no"])
        assert child.poll() is None
        child.kill()
    assert child.reap() == ProcessExit(child.pid, None, "SIGKILL")


@pytest.mark.parametrize(
    ("ending", "ended"),
    [
        ("os._exit(0)", "exited with code 0"),
        ("os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("signal.pause()", "was killed by SIGKILL"),
    ],
    ids=["after it exited", "after it crashed", "while it lives"],
)
async def test_a_grandchild_is_gone_after_reap(start: Start, said: Transcript, ending: str, ended: str) -> None:
    no_core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
    # It holds enough that the kernel needs a while to tear it down.
    child = start(
        FORK
        + no_core
        + "held = bytearray(b'x') * 10**8\nfork(lambda: [held[::4096] and signal.pause() for _ in iter(int, 1)]); "
        + ending
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: bool(said.stdout))
        grandchild = int(said.stdout[0])
        if ending != "signal.pause()":
            await child.exited.wait()
            assert not has_ended(grandchild)
            assert str(child.poll()) == ended
        child.kill()
    assert str(child.reap()) == ended
    assert has_ended(grandchild)


@pytest.mark.parametrize("grandchild", ["signal.pause", "flood"], ids=["silent", "noisy"])
async def test_a_grandchild_that_holds_the_pipes_does_not_hold_us(
    start: Start, said: Transcript, grandchild: str
) -> None:
    child = start(
        FORK + f"fork({grandchild}); os.write(2, b'child: last words\\n'); os.write(1, b'no end of line'); os._exit(5)"
    )
    await said.watch(child)
    assert child.poll() == ProcessExit(child.pid, 5, None)
    assert said.stdout[-1] == b"no end of line"
    assert any("child: last words" in line for line in said.stderr)


@pytest.mark.parametrize("ended", [True, False])
async def test_kill_and_reap_may_be_repeated(start: Start, said: Transcript, ended: bool) -> None:
    child = start("raise SystemExit(4)" if ended else PAUSE)
    if ended:
        await said.watch(child)
    for _ in range(3):
        child.kill()
    first = child.reap()
    assert first == (ProcessExit(child.pid, 4, None) if ended else ProcessExit(child.pid, None, "SIGKILL"))
    for _ in range(3):
        child.kill()
        child.terminate()
        assert child.reap() is first
        assert child.poll() is first


async def test_cancelling_watch_leaves_the_child_alone(start: Start, said: Transcript) -> None:
    child = start(PAUSE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: said.stdout == [b"up"])
        tasks.cancel_scope.cancel()
    assert child.poll() is None
    assert not child.exited.is_set()
    child.kill()
    await said.watch(child)
    assert child.poll() == ProcessExit(child.pid, None, "SIGKILL")


# --------------------------------------------------------------------------------------------------- what stays behind


@pytest.mark.blocking_ok  # reads /proc
async def test_no_thread_is_started(start: Start, said: Transcript) -> None:
    def native_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = threading.enumerate(), native_threads()
    child = start(PAUSE)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(said.watch, child)
        await said.until(lambda: said.stdout == [b"up"])
        assert (threading.enumerate(), native_threads()) == before
        child.kill()
    child.reap()
    assert (threading.enumerate(), native_threads()) == before


@pytest.mark.blocking_ok  # reads /proc
async def test_every_descriptor_is_closed_by_reap(start: Start, said: Transcript) -> None:
    def descriptors() -> set[int]:  # the listing has one of its own, every time
        return {int(path.name) for path in Path("/proc/self/fd").iterdir()}

    before = descriptors()
    child = start("")
    assert len(descriptors() - before) == 4  # three pipes and the pidfd
    await said.watch(child)
    child.reap()
    assert descriptors() == before


@pytest.mark.case("K20")
async def test_children_of_the_host_survive_and_stay_the_hosts(start: Start, said: Transcript) -> None:
    with (
        host_child("import signal; signal.pause()") as beside,
        host_child("import signal; signal.pause()", start_new_session=True) as apart,
        host_child("raise SystemExit(9)") as ended,
    ):
        await wait_gone(ended.pid)
        killed, finished = start(PAUSE), start("raise SystemExit(1)")
        await said.watch(finished)
        for child in (killed, finished):
            child.terminate()
            child.kill()
            child.reap()
            child.kill()
        assert (beside.poll(), apart.poll()) == (None, None)
        assert ended.wait(PATIENCE_S) == 9  # nobody has taken its exit status
        beside.kill()
        apart.kill()


@pytest.mark.case("K20")
async def test_its_id_stays_its_own_until_it_is_reaped(start: Start, said: Transcript) -> None:
    """As long as it is not reaped nobody else can get its id: the group that kill() signals is still its own."""
    child = start("raise SystemExit(2)")
    await said.watch(child)
    for _ in range(3):
        assert child.poll() == ProcessExit(child.pid, 2, None)
        child.kill()
        os.kill(child.pid, 0)  # a zombie still takes its place
    child.reap()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_launch_line_that_would_block_the_loop_is_refused_before_anything_starts(start: Start) -> None:
    with pytest.raises(ValueError, match="60000 fit in the pipe"):  # and the leak check finds no process
        ChildProcess([sys.executable, "-S", "-c", "import signal; signal.pause()"], stdin_line=b"x" * 60_001)


async def test_an_interruption_of_the_start_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int, blocking: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "set_blocking", interrupted)
    with pytest.raises(KeyboardInterrupt):  # and the leak check finds neither process nor pipe
        ChildProcess([sys.executable, "-S", "-c", "import signal; signal.pause()"], stdin_line=b"\n")
