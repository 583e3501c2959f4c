"""One supervised engine process: its start-up stages, its log, and the errors that its end becomes.

Owns the translation of what a child process does (status lines, stderr, exit) into what a user is told. Knows nothing
of sockets or requests; the session decides what an exit means.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import anyio

from anyengine.exceptions import EngineDeadError, EngineStartupError, StartupTimeout

from .child import ProcessExit
from .status import Status, decode_status

__all__ = ["Child", "SupervisedEngine"]

_logger = logging.getLogger("anyengine.engine")

_MAX_LOG_BYTES = 1 << 16  # of a line on standard output: spelling out 1 MiB that is no UTF-8 takes 0.15 s

_STAGES = frozenset({"importing", "configuring", "resolving", "downloading", "loading", "handshake", "ready", "failed"})
"""What a status line can report; a line with any other stage is somebody's output that happens to be JSON."""


class Child(Protocol):
    """What is supervised: a process (:class:`~.child.ChildProcess`), or a task that stands in for one
    (:class:`~.task_child.TaskChild`)."""

    @property
    def pid(self) -> int | None: ...
    @property
    def name(self) -> str: ...
    @property
    def exited(self) -> anyio.Event: ...
    def stderr_tail(self, lines: int = 50) -> tuple[str, ...]: ...
    async def watch(self, on_stdout_line: Callable[[bytes], None], on_stderr_line: Callable[[str], None]) -> None: ...
    @property
    def killed_orphans(self) -> Sequence[int]: ...
    async def wait_orphans(self, on_stderr_line: Callable[[str], None], limit_s: float) -> None: ...
    def poll(self) -> ProcessExit | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def reap(self) -> ProcessExit: ...


class SupervisedEngine:
    """An engine core process of ours. Owning task: the session task that runs :meth:`supervise`."""

    def __init__(self, rank: int, child: Child, on_status: Callable[[Status], None] | None = None) -> None:
        self.rank = rank
        self.child = child
        self.status: Status = Status(stage="spawned")
        self.model_dir: str | None = None
        self._on_status = on_status
        self._stage_started_s = anyio.current_time()
        self._stage_seconds: dict[str, float] = {}
        self._shield: anyio.CancelScope | None = None
        self._report()

    async def supervise(self) -> None:
        """Relay status and log lines until the process has ended.

        Shielded: it ends with the process, which the session's teardown ends in every case, so the last words of an
        engine are read even while the session is being cancelled.
        """
        # Bounded by whoever stops the session, who kills the process, and abandons it if that does not end it.
        with anyio.CancelScope(shield=True) as self._shield:
            await self.child.watch(self._take_status, self._take_log)

    async def wait_ended(self) -> None:
        """Wait until the process has ended; what it has written may not have been read yet.

        Cancellation: safe.
        """
        await self.child.exited.wait()

    def abandon(self) -> None:
        """Watch it no longer: it has been killed and does not end, since the kernel holds it. Synchronous."""
        if self._shield is not None:
            self._shield.cancel()

    async def see_off(self, limit_s: float = math.inf) -> None:
        """After the process: let what it started end by itself, for as long as it has a grace period, or ``limit_s``.

        Cancellation: reaping the process waits instead.
        """
        await self.child.wait_orphans(self._take_log, limit_s)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds spent in each start-up stage so far, the present one included."""
        running = anyio.current_time() - self._stage_started_s
        return {**self._stage_seconds, self.status.stage: self._stage_seconds.get(self.status.stage, 0.0) + running}

    def startup_error(self) -> EngineStartupError:
        """The process ended before it was ready."""
        ended = self.child.poll()
        error = self.status.error
        cause = f"{error.type}: {error.message}" if error else None
        return EngineStartupError(
            f"engine {self.rank} ({self.child.name}) {ended} at stage {self._last_stage!r}"
            + (f": {cause}" if cause else ", without saying why"),
            rank=self.rank,
            pid=self.child.pid,
            exit_code=ended.exit_code if ended else None,
            signal=ended.signal if ended else None,
            stderr_tail=self.child.stderr_tail(),
            stage=self._last_stage,
            child_exception=cause,
        )

    def handshake_error(self, trouble: Exception) -> EngineStartupError:
        """The process said something, on its way to ready, that makes no sense."""
        error = EngineStartupError(
            f"engine {self.rank} ({self.child.name}): its handshake makes no sense: {trouble}",
            rank=self.rank,
            pid=self.child.pid,
            stderr_tail=self.child.stderr_tail(),
            stage=self.status.stage,
        )
        error.__cause__ = trouble
        return error

    def startup_timeout(self, timeout_s: float, also_late: str = "") -> StartupTimeout:
        """The deadline passed while the process was still starting; ``also_late`` says who else was."""
        seconds = self.stage_seconds
        spent = ", ".join(f"{stage} {value:.1f} s" for stage, value in seconds.items())
        return StartupTimeout(
            f"engine {self.rank} ({self.child.name}) is not ready after startup_timeout_s={timeout_s:g}{also_late}; "
            f"stage reached: {self.status.stage!r} ({spent})",
            rank=self.rank,
            pid=self.child.pid,
            stderr_tail=self.child.stderr_tail(),
            stage=self.status.stage,
            stage_seconds=seconds,
        )

    def death(self, symptom: str | None = None, kind: type[EngineDeadError] = EngineDeadError) -> EngineDeadError:
        """The engine died after it was ready. ``symptom`` is how that was noticed, should its process still live."""
        ended = self.child.poll()
        error = self.status.error  # what it reported before it went
        return kind(
            f"engine {self.rank} ({self.child.name}) {ended or f'lives, but {symptom}'}"
            + (f": {error.type}: {error.message}" if error else ""),
            rank=self.rank,
            pid=self.child.pid,
            exit_code=ended.exit_code if ended else None,
            signal=ended.signal if ended else None,
            stderr_tail=self.child.stderr_tail(),
        )

    @property
    def _last_stage(self) -> str:
        """The last stage before the child reported its failure."""
        if self.status.stage == "failed" and self._stage_seconds:
            return list(self._stage_seconds)[-1]
        return self.status.stage

    def _take_status(self, line: bytes) -> None:
        status = decode_status(line)
        if status is None or status.stage not in _STAGES:
            self._take_log(line[:_MAX_LOG_BYTES].decode("utf-8", "backslashreplace"))
            return
        if status.stage != self.status.stage:
            now_s = anyio.current_time()
            spent = self._stage_seconds.pop(self.status.stage, 0.0)  # the last stage stands last
            self._stage_seconds[self.status.stage] = spent + now_s - self._stage_started_s
            self._stage_started_s = now_s
        self.status = status
        if status.model_dir:
            self.model_dir = status.model_dir
        self._report()

    def _report(self) -> None:
        if self._on_status is not None:
            try:
                self._on_status(self.status)
            except Exception:
                # Rule 5: a user's callback fails alone.
                _logger.exception("the on_progress callback failed on %r; engine %d goes on", self.status, self.rank)

    def _take_log(self, line: str) -> None:
        # Rule 5: an application's logging filter or handler fails alone. Reporting that could only fail again.
        with suppress(Exception):
            _logger.info("(engine %d %s) %s", self.rank, self.child.name.replace(" ", "="), line)
