"""An engine that runs as a task of the client's own event loop, where another one is a child process.

Owns what stands in for a process: standard error, status reports, SIGTERM, an exit status, a kill that cannot be
refused. Knows nothing of sockets. The counterpart of :class:`~anyengine._process.child.ChildProcess`.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from .child import ProcessExit
from .status import ChildError, Status, encode_status

__all__ = ["TaskChild", "TaskExit", "TaskHost"]

_STDERR_TAIL_LINES = 200


class TaskExit(Exception):
    """Ends the engine's task as ``os._exit`` or a signal would end a process."""

    def __init__(self, exit_code: int | None = 0, signal: str | None = None) -> None:
        super().__init__(exit_code, signal)
        self.exit_code = None if signal else exit_code
        self.signal = signal


class TaskHost:
    """What an engine finds around itself. ``on_terminate`` is called at SIGTERM, which is up to the engine to obey;
    ``terminated`` says whether that has come."""

    def __init__(self, on_status: Callable[[bytes], None], on_line: Callable[[str], None]) -> None:
        self._on_status = on_status
        self._on_line = on_line
        self.terminated: bool = False
        self.on_terminate: Callable[[], None] | None = None

    def report(self, status: Status) -> None:
        """What a process writes to its standard output."""
        self._on_status(encode_status(status).rstrip())

    def log(self, text: str) -> None:
        """What a process writes to its standard error."""
        for line in text.splitlines():
            self._on_line(line)


class TaskChild:
    """Runs ``serve``. Owning task: the one that runs :meth:`watch`, which ends with it. Lifetime: one session."""

    pid: int | None = None
    killed_orphans: tuple[int, ...] = ()

    def __init__(self, serve: Callable[[TaskHost], Awaitable[None]]) -> None:
        self._serve = serve
        self._scope = anyio.CancelScope()
        self._terminated = False
        self._host: TaskHost | None = None
        self._exit: ProcessExit | None = None
        self._stderr_tail: deque[str] = deque(maxlen=_STDERR_TAIL_LINES)
        self.exited: anyio.Event = anyio.Event()

    @property
    def name(self) -> str:
        """How messages call it."""
        return "a task"

    def stderr_tail(self, lines: int = 50) -> tuple[str, ...]:
        """The last lines that it logged, oldest first."""
        return tuple(self._stderr_tail)[-lines:]

    async def watch(self, on_stdout_line: Callable[[bytes], None], on_stderr_line: Callable[[str], None]) -> None:
        """Run the engine to its end.

        Cancellation: kills it.
        """

        def keep(line: str) -> None:
            self._stderr_tail.append(line)
            on_stderr_line(line)

        if self._exit is not None:
            return
        self._host = host = TaskHost(on_stdout_line, keep)
        host.terminated = self._terminated
        ended = ProcessExit(None, None, "SIGKILL")
        try:
            with self._scope:
                ended = await self._run(host)
        finally:
            self._exit = ended
            self.exited.set()

    async def _run(self, host: TaskHost) -> ProcessExit:
        try:
            await self._serve(host)
        except TaskExit as exc:
            return ProcessExit(None, exc.exit_code, exc.signal)
        except Exception as exc:  # noqa: BLE001 - whatever ends an engine is told by its exit, as for a process
            host.log(traceback.format_exc())
            host.report(Status("failed", error=ChildError(type(exc).__name__, str(exc))))
            return ProcessExit(None, 1, None)
        return ProcessExit(None, 0, None)

    async def wait_orphans(self, on_stderr_line: Callable[[str], None], limit_s: float) -> None:
        """It has none."""

    def poll(self) -> ProcessExit | None:
        """How it ended, or ``None`` while it lives."""
        return self._exit

    def terminate(self) -> None:
        """Ask it to stop."""
        self._terminated = True
        if self._host is not None and not self.exited.is_set():
            self._host.terminated = True
            if self._host.on_terminate is not None:
                self._host.on_terminate()

    def kill(self) -> None:
        """Make sure that it ends. Synchronous, idempotent; the end itself takes a turn of the event loop."""
        self._scope.cancel()

    def reap(self) -> ProcessExit:
        """How it ended; of one that never ran, that it was killed. Synchronous, idempotent."""
        self.kill()
        return self._exit or ProcessExit(None, None, "SIGKILL")
