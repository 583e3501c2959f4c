"""A scripted engine as a process: performs what :class:`~.core.ScriptedCore` says, over ZeroMQ.

Owns sockets, signals, the clock and the log file. Decides nothing.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Self

import msgspec
import zmq

from anyengine._process.orphans import kill_all_but_trackers

from .core import (
    Acquire,
    Action,
    Close,
    Connect,
    Ended,
    Hang,
    Log,
    Report,
    ScriptedCore,
    Send,
    Serve,
    Sleep,
    SocketName,
)
from .records import Record, encode_record
from .resources import take_resources
from .script import Script

__all__ = ["Place", "run_process"]

_LINGER_MS = 1000
_READS = 64  # messages of one turn
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the engine finds its front end, and what it says of itself. ``host_fd``: its end is the end of the host."""

    handshake_address: str
    rank: int = 0
    local: bool = True
    headless: bool = False
    host_fd: int | None = None
    log: Path | None = None


def run_process(script: Script, place: Place, *, reports: bool = True) -> int:
    """Run an engine to its end; the exit code, unless it ends by a signal. ``reports``: write status lines."""
    with ExitStack() as stack:
        file = None if place.log is None else stack.enter_context(place.log.open("ab", buffering=0))
        engine = _ProcessEngine(script, place, file, reports=reports)
        try:
            return engine.run()
        except Exception as exc:  # noqa: BLE001 - the outermost frame: the host has only what is reported here
            traceback.print_exc()
            engine.perform([Report("failed", (type(exc).__name__, str(exc)))])
            return 1
        finally:
            engine.close()


class _Ended(Exception):
    """Leaves the loop."""


class _ProcessEngine:
    def __init__(self, script: Script, place: Place, log: BinaryIO | None, *, reports: bool) -> None:
        self._script = script
        self._place = place
        self._reports = reports
        self._resources = ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: dict[SocketName, zmq.Socket[bytes]] = {}
        self._exit_code = 0
        self._signals = self._resources.enter_context(_Signals(ignored=script.ignore_sigterm))

        def write(record: Record) -> None:
            if log is not None:
                log.write(encode_record(record))

        self._core = ScriptedCore(script, place.rank, local=place.local, headless=place.headless, log=write)

    def run(self) -> int:
        try:
            self.perform(self._core.start(time.monotonic()))
            while True:
                self._turn()
        except _Ended:
            return self._exit_code

    def close(self) -> None:
        """Send what is unsent, within bounds; give back what was taken."""
        for socket in self._sockets.values():
            socket.close(linger=_LINGER_MS)
        if self._context is not None:
            self._context.term()
        self._resources.close()

    # ---------------------------------------------------------------------------------------------- the loop

    def _turn(self) -> None:
        core, now_s = self._core, time.monotonic()
        if core.deadline_s() <= now_s:
            self.perform(core.wake(now_s))
        ready = self._poll(time.monotonic())
        if self._signals.take() or (self._place.host_fd in ready and self._host_is_gone()):
            self.perform(core.terminate(time.monotonic()))
        for name in ("handshake", "input"):
            socket = self._sockets.get(name)
            if socket is not None and socket in ready:
                self._read(name, socket)

    def _poll(self, now_s: float) -> dict[Any, int]:
        poller = zmq.Poller()
        poller.register(self._signals.fd, zmq.POLLIN)
        if self._place.host_fd is not None and not self._script.outlive_host:
            poller.register(self._place.host_fd, zmq.POLLIN)
        reads_after_s = self._core.reads_after_s()
        for name in ("handshake", "input"):
            if name in self._sockets and reads_after_s <= now_s:
                poller.register(self._sockets[name], zmq.POLLIN)
        due_s = min([self._core.deadline_s(), *([reads_after_s] if reads_after_s > now_s else [])])
        return dict(poller.poll(None if due_s == math.inf else max(0, math.ceil((due_s - now_s) * 1000))))

    def _read(self, name: SocketName, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_READS):
            now_s = time.monotonic()
            if socket.closed or self._core.reads_after_s() > now_s:
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.perform(self._core.receive(name, frames, now_s))

    # --------------------------------------------------------------------------------------------- the actions

    def perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send(name, payload):
                    self._sockets[name].send(payload)
                case Acquire():
                    self._resources.enter_context(take_resources(self._script))
                    self._context = zmq.Context()
                case Connect(name, address):
                    self._connect(name, address or self._place.handshake_address)
                case Close(name):
                    self._sockets.pop(name).close(linger=_LINGER_MS)
                case Report(stage, error):
                    self._report(stage, error)
                case Log(text):
                    sys.stderr.write(text + "\n")
                    sys.stderr.flush()
                case Sleep(seconds):
                    self._idle(seconds)
                case Serve():
                    self._signals.catch()
                case Hang():
                    self._signals.restore()
                    self._idle(None)
                case Ended(exit_code, name_of_signal):
                    self._end(exit_code, name_of_signal)

    def _connect(self, name: SocketName, address: str) -> None:
        assert self._context is not None
        socket = self._context.socket(zmq.PUSH if name == "output" else zmq.DEALER)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        socket.set_hwm(0)
        if name != "output":
            socket.setsockopt(zmq.IDENTITY, self._place.rank.to_bytes(2, "little"))
        socket.connect(address)
        self._sockets[name] = socket

    def _report(self, stage: str, error: tuple[str, str] | None) -> None:
        if not self._reports:
            return
        status: dict[str, Any] = {"stage": stage}
        if error is not None:
            status["error"] = {"type": error[0], "message": error[1]}
        sys.stdout.buffer.write(msgspec.json.encode(status) + b"\n")
        sys.stdout.buffer.flush()

    def _idle(self, seconds: float | None) -> None:
        """Neither read nor write; only the end of the host ends it early."""
        poller = select.poll()
        if self._place.host_fd is not None and not self._script.outlive_host:
            poller.register(self._place.host_fd, select.POLLIN)
        end_s = math.inf if seconds is None else time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if poller.poll(None if left_s == math.inf else left_s * 1000) and self._host_is_gone():
                raise _Ended

    def _host_is_gone(self) -> bool:
        """Whether it is; then the grandchildren go first, which nobody else will end."""
        assert self._place.host_fd is not None
        if os.read(self._place.host_fd, 1024):
            return False
        if os.getpgrp() == os.getpid():
            kill_all_but_trackers(os.getpid(), spare=os.getpid())
        return True

    def _end(self, exit_code: int, name_of_signal: str | None) -> NoReturn:
        if name_of_signal is not None:
            number = signal.Signals[name_of_signal]
            if number is not signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._exit_code = exit_code
        raise _Ended


class _Signals:
    """SIGTERM and SIGINT: as ever before :meth:`catch`, afterwards through ``fd``; or ignored throughout."""

    def __init__(self, *, ignored: bool) -> None:
        self._ignored = ignored

    def __enter__(self) -> Self:
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._ignored:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self.fd)
        os.close(self._writer)

    def catch(self) -> None:
        """From now on they can be taken."""
        if not self._ignored:
            signal.set_wakeup_fd(self._writer)
            for number in _SIGNALS:
                signal.signal(number, lambda *_: None)

    def restore(self) -> None:
        """They end the process again."""
        if not self._ignored:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def take(self) -> bool:
        """Whether one has come."""
        try:
            return bool(os.read(self.fd, 64))
        except BlockingIOError:
            return False
