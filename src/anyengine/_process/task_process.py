"""An engine core that is a task of the client's own event loop: it stands where a process would.

Owns what a process has and a task has not: a status channel, a log, a signal, an exit code. Knows nothing of the wire;
the engine core is a coroutine function that is given its connections by whoever starts it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import anyio

from .child import ProcessExit
from .status import Status, encode_status

__all__ = ["TaskProcess"]

_TAIL_LINES = 200


class TaskProcess:
    """A :class:`~anyengine._process.child.Child` without a process.

    ``main(self)`` is the engine core. What it returns is the exit code (``None``: 0; negative: minus the number of a
    signal, as in :mod:`subprocess`); an exception is exit code 1, and the last line of its log. Owning task: the one
    that runs :meth:`watch`.
    """

    pid: None = None
    killed_orphans: tuple[int, ...] = ()

    def __init__(self, main: Callable[[TaskProcess], Awaitable[int | None]]) -> None:
        self._main = main
        self.exited: anyio.Event = anyio.Event()
        self.terminated: anyio.Event = anyio.Event()
        """Set when it is asked to stop: its SIGTERM."""
        self._exit: ProcessExit | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._scope = anyio.CancelScope()
        self._started = False
        self._status_lines: deque[bytes] = deque()
        self._on_status_line: Callable[[bytes], None] = self._status_lines.append
        self._on_log_line: Callable[[str], None] | None = None

    # ------------------------------------------------------------------- for main

    def report(self, status: Status) -> None:
        """Tell the client how far the start is, or of what it failed. Synchronous."""
        self._on_status_line(encode_status(status).rstrip(b"\n"))

    def log(self, line: str) -> None:
        """One line of the engine's log. Synchronous."""
        self._tail.append(line)
        if self._on_log_line is not None:
            self._on_log_line(line)

    # ---------------------------------------------------------- what a process has

    def stderr_tail(self, lines: int = 50) -> tuple[str, ...]:
        """The last lines of its log, oldest first."""
        return tuple(self._tail)[-lines:]

    async def watch(self, on_stdout_line: Callable[[bytes], None], on_stderr_line: Callable[[str], None]) -> None:
        """Run the engine core; returns when it has ended. Again: returns at once.

        Cancellation: ends the engine core, as SIGKILL would.
        """
        if self._started:  # whoever cancelled its task natively has ended it
            return
        self._started = True
        self._on_status_line, self._on_log_line = on_stdout_line, on_stderr_line
        code = -9  # cancelled
        try:
            with self._scope:
                code = await self._main(self) or 0
        except Exception as exc:  # noqa: BLE001 - whatever ends a process ends it with an exit code
            self.log(f"{type(exc).__name__}: {exc}")
            code = 1
        finally:
            self._exit = ProcessExit.of(None, code)
            self.exited.set()

    async def wait_orphans(self, on_stderr_line: Callable[[str], None], limit_s: float) -> None:
        """There are none."""

    def poll(self) -> ProcessExit | None:
        """How it ended, or ``None`` while it lives."""
        return self._exit

    def terminate(self) -> None:
        """Ask it to stop."""
        self.terminated.set()

    def kill(self) -> None:
        """End it: it is cancelled. Synchronous, idempotent."""
        self._started = True  # should it not have begun
        self._scope.cancel()

    def reap(self) -> ProcessExit:
        """Nothing is left to collect; how it ended. Synchronous, idempotent."""
        self.kill()
        if self._exit is None:
            self._exit = ProcessExit.of(None, -9)
            self.exited.set()
        return self._exit
