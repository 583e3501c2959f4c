"""Makes an engine process end when its host does, and when somebody sends SIGTERM.

Owns the process-wide arrangements: the parent-death signal, the signal dispositions, file descriptors 0 to 2, and one
thread that waits for the end of standard input and for signals. (An engine that was started by hand has no host: then
signals alone end it from outside.) Imports the standard library only, because all of
this must stand before anything slow is imported. Knows nothing of engines: what a graceful stop means is a callable,
given when there is one.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable

__all__ = ["Lifeline", "arm_parent_death_signal", "divert_standard_streams", "ignore_interrupts"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_GRACE_S = 1.0
"""How long the main thread may take to leave on its own once the host is gone."""


def arm_parent_death_signal() -> None:
    """Ask Linux for a SIGHUP when the thread that started this process ends; elsewhere, standard input alone has to
    tell. It ends the process at once while nobody watches; then :class:`Lifeline` takes along what the process started.

    A host that died before the call is noticed by its process id; one that died before the first line here ran is
    noticed by the end of standard input.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, *map(ctypes.c_ulong, (signal.SIGHUP, 0, 0, 0)))
    if os.getppid() != parent:
        os._exit(1)


def ignore_interrupts() -> None:
    """A terminal sends SIGINT to its whole process group; what Ctrl-C means is for the host to decide."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def divert_standard_streams() -> tuple[int, int]:
    """Take file descriptors 0 and 1 for ourselves: ``(launch, status)``, both private and not inherited.

    Whatever else prints lands in standard error, and whatever else reads standard input finds it empty.
    """
    launch_fd, status_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.dup2(2, 1)
    return launch_fd, status_fd


class Lifeline:
    """Reads the launch line, then watches; start to finish of the process, one thread of its own.

    While :meth:`on_stop` names no graceful way, a signal ends the process at once with exit code 0, even while the
    main thread is deep in native code (loading a model): the signal only writes to a descriptor, and this thread acts
    on it. ``launch_fd`` is ``None`` for an engine without a host: then SIGINT counts like SIGTERM, and a second signal
    ends at once what a graceful stop has not ended yet.
    """

    def __init__(self, launch_fd: int | None) -> None:
        self._launch_fd = launch_fd
        self._stop_requested = False
        self._stop: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._signals, self._signal_sink = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)

    def read_launch_line(self) -> bytes:
        """The one line the host wrote, without its end. Raises EOFError if the host is gone before."""
        assert self._launch_fd is not None
        received = bytearray()
        while b"\n" not in received:
            chunk = os.read(self._launch_fd, 65536)
            if not chunk:
                raise EOFError("standard input ended before the launch line did")
            received += chunk
        return bytes(received.partition(b"\n")[0])

    def watch(self) -> None:
        """Take over the signals and start the thread.

        Main thread only. Call it after :meth:`read_launch_line`: both read the same descriptor.
        """
        self._signal_sink.setblocking(False)
        signal.set_wakeup_fd(self._signal_sink.fileno(), warn_on_full_buffer=False)
        hosted = self._launch_fd is not None
        for number in (signal.SIGTERM, signal.SIGHUP) if hosted else (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signum, frame: None)  # without one, nothing is written to the descriptor
        self._thread.start()

    def on_stop(self, stop: Callable[[], None] | None) -> None:
        """From now on a signal calls ``stop``, in this object's thread, and the main thread leaves in its own time.
        ``None``: nothing needs an orderly end any more, so one that was asked for, and came too late for ``stop``, is
        now."""
        with self._lock:
            self._stop = stop
            if stop is None and self._stop_requested:
                os._exit(0)

    def close(self) -> None:
        """End the watch: the main thread is leaving and must not be cut short. Idempotent."""
        self._closing.set()
        self._signals.shutdown(socket.SHUT_RD)
        self._thread.join()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._signals, select.POLLIN)
        if self._launch_fd is not None:
            poller.register(self._launch_fd, select.POLLIN)
        while not self._closing.is_set():
            ready = {fd for fd, _ in poller.poll()}
            if self._launch_fd in ready and not os.read(self._launch_fd, 65536):
                self._host_is_gone()
            if self._signals.fileno() in ready:
                for number in self._signals.recv(64):
                    if number == signal.SIGHUP:
                        self._host_is_gone()
                    elif number in (signal.SIGTERM, signal.SIGINT):
                        self._signalled(number)

    def _signalled(self, number: int) -> None:
        if self._launch_fd is None and self._stop_requested:
            os._exit(128 + number)
        self._request_stop()

    def _host_is_gone(self) -> None:
        self._request_stop(after=_end_group)
        self._closing.wait(_GRACE_S)
        _end_group()
        if not self._closing.is_set():
            os._exit(1)

    def _request_stop(self, after: Callable[[], None] | None = None) -> None:
        with self._lock:
            if self._stop is None:
                if after is not None:
                    after()
                os._exit(0)
            self._stop_requested = True
            self._stop()


def _end_group() -> None:
    """Kill what this process has started, which nobody else will: the host, who would have, is gone."""
    if os.getpgrp() == os.getpid():  # else the group is somebody else's, too
        from anyengine._process.orphans import kill_all_but_trackers

        kill_all_but_trackers(os.getpid(), spare=os.getpid())
