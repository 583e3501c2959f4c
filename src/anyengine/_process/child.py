"""One child process: how it is started, awaited, stopped and reaped.

Owns the process handle and its pipes. Knows nothing of the wire: what the child says on its standard output goes to a
callback, line by line. No thread: the exit is awaited on a pidfd (Linux), elsewhere on the end of the child's pipes;
pipes are read without blocking.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import select
import signal
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from anyengine._owned_directories import OwnedDirectory

from .orphans import kill_all_but_trackers, live_members, wait_ended

__all__ = ["ChildProcess", "ProcessExit"]

_logger = logging.getLogger("anyengine.engine")

_STDERR_TAIL_LINES = 200
_STDERR_TAIL_CHARS = 4096  # of each line: the tail is for a person to read
_KILLED_LIMIT_S = 10.0  # for the kernel, to end what was killed: milliseconds, unless it holds very much
_TRACKER_GRACE_S = 3.0  # for a resource tracker, once those that it serves are gone, on a busy machine
_TEAR_DOWN_S = 1.0  # what nobody has awaited, or in vain, may hold up the loop for as long
_LOOK_S = 0.02  # nothing tells when a process that is no child of ours ends
_READ_BYTES = 16384
_MAX_STDIN_BYTES = 60_000  # a pipe takes 64 KiB without blocking
# A child that never ends its line must fill neither our memory nor our time. A status line is whole or useless; a log
# line is cut, since bytes that are no UTF-8 take 0.15 s for each MiB to spell out.
_MAX_STATUS_BYTES = 1 << 20
_MAX_LOG_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended: ``exit_code`` or ``signal`` (a name such as ``"SIGKILL"``), the other is ``None``.

    Both are ``None`` if someone else took its exit status: the host, which ignores SIGCHLD or waits for any child.
    ``pid`` is ``None`` for what only stands in for a process.
    """

    pid: int | None
    exit_code: int | None
    signal: str | None

    def __str__(self) -> str:
        if self.signal is not None:
            return f"was killed by {self.signal}"
        return "exited in an unknown way" if self.exit_code is None else f"exited with code {self.exit_code}"


class ChildProcess:
    """A child in a session (and process group) of its own, so that a terminal's Ctrl-C reaches only its host.

    Owning task: the one that runs :meth:`watch`, which ends when the child has ended. Whoever created the object must
    call :meth:`kill` and :meth:`reap` last, in every case; they are synchronous, so that native cancellation cannot
    interrupt them.

    Args:
        orphans_grace_s: how long what the child started may live on after it, to clean up. It gets SIGTERM; whoever
            holds standard error open is waited for, by :meth:`wait_orphans` or, failing that, by :meth:`reap`; then it
            is killed, a resource tracker of multiprocessing last.
        scratch_dir: a directory of the child's own, which :meth:`reap` removes.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin_line: bytes,
        env: Mapping[str, str] | None = None,
        orphans_grace_s: float = 0.0,
        scratch_dir: OwnedDirectory | None = None,
    ) -> None:
        if len(stdin_line) > _MAX_STDIN_BYTES:
            raise ValueError(
                f"the launch line has {len(stdin_line)} bytes, and at most {_MAX_STDIN_BYTES} fit in the pipe at once: "
                "give the engine fewer or shorter options"
            )
        self._orphans_grace_s = orphans_grace_s
        self._scratch_dir = scratch_dir
        self._popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
            bufsize=0,
        )
        self.pid: int = self._popen.pid
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        self.killed_orphans: list[int] = []
        """The processes that it left behind, and that had to be killed."""
        self._exit: ProcessExit | None = None
        self.exited: anyio.Event = anyio.Event()
        self._pidfd = _open_pidfd(self.pid)
        try:
            for pipe in (self._popen.stdout, self._popen.stderr):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
            assert self._popen.stdin is not None
            with suppress(BrokenPipeError):  # it died at once: the exit tells more than this
                self._popen.stdin.write(stdin_line)
        except BaseException:  # KeyboardInterrupt, for one: nobody else knows the child yet
            self.reap()
            raise

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"pid {self.pid}"

    def stderr_tail(self, lines: int = 50) -> tuple[str, ...]:
        """The last lines of its standard error, oldest first."""
        return tuple(self._stderr_tail)[-lines:]

    async def watch(self, on_stdout_line: Callable[[bytes], None], on_stderr_line: Callable[[str], None]) -> None:
        """Read both pipes and wait for the exit; returns when the child has ended and what it wrote has been read.

        Cancellation: stops watching; the child is not touched.
        """
        assert self._popen.stdout is not None
        stdout = _LinePump(self._popen.stdout.fileno(), on_stdout_line, _MAX_STATUS_BYTES)
        stderr = self._stderr_pump(on_stderr_line)
        async with anyio.create_task_group() as pumps:
            pumps.start_soon(stdout.run)
            pumps.start_soon(stderr.run)
            await self._wait_exit(stdout.ended)
            # A grandchild may hold the pipes open, and write, for ever: what the child itself wrote is in them by now.
            pumps.cancel_scope.cancel()
        await stdout.finish()
        await stderr.finish()
        self.exited.set()

    async def wait_orphans(self, on_stderr_line: Callable[[str], None], limit_s: float = math.inf) -> None:
        """After :meth:`watch`, read on until nobody that the child started lives, or ``orphans_grace_s`` is over, or
        ``limit_s``; then kill them, and wait for the kernel to end them, as for those that :meth:`kill` has killed.

        Cancellation: :meth:`reap` waits instead.
        """
        if not self._orphans_grace_s:
            await self._killed_ended()
            return
        stderr = self._stderr_pump(on_stderr_line)
        self._signal_group(signal.SIGTERM)
        with anyio.move_on_after(min(self._orphans_grace_s, limit_s)):
            await stderr.run()
        if not stderr.ended.is_set():
            self.killed_orphans += kill_all_but_trackers(self.pid)
            await self._killed_ended()
            with anyio.move_on_after(_TRACKER_GRACE_S):
                await stderr.run()
        self._orphans_grace_s = 0.0

    async def _killed_ended(self) -> None:
        with anyio.move_on_after(_KILLED_LIMIT_S):
            while self._still_ending():  # noqa: ASYNC110 - see _LOOK_S
                await anyio.sleep(_LOOK_S)

    def _still_ending(self) -> bool:
        """Whether any of those that were killed holds on to what it had: a resource tracker waits for it."""
        return bool(self.killed_orphans) and not set(self.killed_orphans).isdisjoint(live_members(self.pid))

    def _wait_orphans_blocking(self) -> None:
        self._signal_group(signal.SIGTERM)
        if not self._read_stderr_to_end(self._orphans_grace_s):
            self.killed_orphans += kill_all_but_trackers(self.pid)
            deadline_s = time.monotonic() + _KILLED_LIMIT_S
            while self._still_ending() and time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
            self._read_stderr_to_end(_TRACKER_GRACE_S)
        self._orphans_grace_s = 0.0

    def _read_stderr_to_end(self, limit_s: float) -> bool:
        assert self._popen.stderr is not None
        fd = self._popen.stderr.fileno()
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        deadline_s = time.monotonic() + limit_s
        while (left_s := deadline_s - time.monotonic()) > 0 and poller.poll(left_s * 1000):
            if not os.read(fd, _READ_BYTES):
                return True
        return False

    def _stderr_pump(self, on_line: Callable[[str], None]) -> _LinePump:
        def keep(line: bytes) -> None:
            text = line.decode("utf-8", "backslashreplace")
            self._stderr_tail.append(text[:_STDERR_TAIL_CHARS])
            on_line(text)

        assert self._popen.stderr is not None
        return _LinePump(self._popen.stderr.fileno(), keep, _MAX_LOG_BYTES)

    async def _wait_exit(self, status_pipe_closed: anyio.Event) -> None:
        if self._pidfd is None:
            # No pidfd: the status pipe ends with the child, then the exit is a matter of moments.
            await status_pipe_closed.wait()
            while self.poll() is None:  # noqa: ASYNC110 - nothing tells when a process without a pidfd is gone
                await anyio.sleep(0.02)
            return
        while self.poll() is None:
            await anyio.wait_readable(self._pidfd)

    def poll(self) -> ProcessExit | None:
        """How it ended, or ``None`` while it lives.

        Where the platform allows, the child is left unreaped until :meth:`reap`: as long as it is, its process
        group id cannot be given to anyone else, so that what it left behind can be killed safely.
        """
        if self._exit is None and self._popen.returncode is None:
            if hasattr(os, "waitid"):
                try:
                    info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:  # the host ignores SIGCHLD, or has reaped what is not its own
                    self._popen.wait()  # finds the same, and keeps us from signalling a stranger under this id
                    self._exit = ProcessExit(self.pid, None, None)
                    return self._exit
                if info is not None:
                    self._exit = _describe(
                        self.pid, info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
                    )
            elif (returncode := self._popen.poll()) is not None:
                self._exit = _describe(self.pid, returncode)
        return self._exit

    def terminate(self) -> None:
        """Ask it to stop: SIGTERM to the child alone."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def hang_up(self) -> None:
        """End its standard input, as the death of the host would. Idempotent."""
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            with suppress(BrokenPipeError):
                self._popen.stdin.close()

    def kill(self) -> None:
        """Make sure that it ends: SIGKILL. Synchronous, idempotent. So does whatever it started in its process group,
        unless that has a grace period, which begins now."""
        if self._orphans_grace_s:
            if self.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
        else:
            known = (self.pid, *self.killed_orphans)
            left = [pid for pid in live_members(self.pid) if pid not in known] if self._popen.returncode is None else []
            self.killed_orphans += left
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        self.poll()  # does not signal what somebody else has reaped
        if self._popen.returncode is None:
            with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left
                os.killpg(self.pid, number)

    def reap(self) -> ProcessExit:
        """Collect the ended process and close its pipes. Synchronous, idempotent; :meth:`watch` must have ended.

        Blocks for the moment that the kernel needs to tear killed processes down, which is bounded; and, if
        :meth:`wait_orphans` was not called or cut short, for ``orphans_grace_s`` and what that waits for besides.
        """
        self.kill()
        if self._orphans_grace_s:
            self._wait_orphans_blocking()
            self.kill()
        self.poll()  # is it ours still?
        if self._popen.returncode is None:
            wait_ended(self.pid, _TEAR_DOWN_S)  # with what it had started, while the group's id is its own
        try:
            self._exit = self.poll() or _describe(self.pid, self._popen.wait(_TEAR_DOWN_S))
            self._popen.wait(_TEAR_DOWN_S)
        except subprocess.TimeoutExpired:  # in the hands of a driver: nobody can do more about it
            _logger.warning("process %d does not end, though it was killed", self.pid)
            self._exit = ProcessExit(self.pid, None, None)
        self._close_pipes()
        if self._scratch_dir is not None:
            self._scratch_dir.remove()
        return self._exit

    def _close_pipes(self) -> None:
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):
                    pipe.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _open_pidfd(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends; ``None`` where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        # An old kernel, a sandbox, no descriptor left, or a host that ignores SIGCHLD and a child that is gone by now.
        return None


def _describe(pid: int, returncode: int) -> ProcessExit:
    if returncode >= 0:
        return ProcessExit(pid, returncode, None)
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return ProcessExit(pid, None, name)


class _LinePump:
    """Reads a pipe line by line, for one :meth:`ChildProcess.watch`. Reads never wait; only readiness is awaited."""

    def __init__(self, fd: int, on_line: Callable[[bytes], None], max_line_bytes: int) -> None:
        self.ended = anyio.Event()
        self._fd = fd
        self._on_line = on_line
        self._max_line_bytes = max_line_bytes
        self._pending = b""

    async def run(self) -> None:
        """Read to the end. Cancellation: loses nothing."""
        while not self.ended.is_set():
            try:
                self._read()
            except BlockingIOError:
                await anyio.wait_readable(self._fd)
            else:
                await anyio.lowlevel.checkpoint()  # one who writes without pause must not keep the loop to himself

    async def finish(self) -> None:
        """Read what is in the pipe at this moment, and pass on the last line even if it has no end."""
        left_bytes = 0 if self.ended.is_set() else _bytes_in_pipe(self._fd)
        while left_bytes > 0:
            left_bytes -= self._read()
            await anyio.lowlevel.checkpoint()
        self._flush()

    def _read(self) -> int:
        chunk = os.read(self._fd, _READ_BYTES)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            self._on_line(line)
        if len(self._pending) > self._max_line_bytes or not chunk:
            self._flush()
        if not chunk:
            self.ended.set()
        return len(chunk)

    def _flush(self) -> None:
        if self._pending:
            line, self._pending = self._pending, b""
            self._on_line(line)


def _bytes_in_pipe(fd: int) -> int:
    answer = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)
