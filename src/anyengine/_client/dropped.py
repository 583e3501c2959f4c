"""Requests whose stream was dropped without being closed, on their way from ``__del__`` to the session.

Owns a mailbox that may be filled at any moment: by a collection in another thread, or in the middle of a multipart
send. Filling it touches no socket and no registry: it appends to a deque and writes one byte to a pipe, which wakes the
session's task.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress

import anyio

from .request_state import RequestState

__all__ = ["DroppedRequests"]


class DroppedRequests:
    """The mailbox. Owning task: the one that calls :meth:`take`. Lifetime: one session."""

    def __init__(self) -> None:
        self._states: deque[RequestState] = deque()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._closed = False
        # Keeps another thread's put from writing to a descriptor number that was closed and given away; re-entrant,
        # since a collection can run inside close itself.
        self._closing = threading.RLock()

    def put(self, state: RequestState) -> None:
        """Leave a request to be aborted. Safe in any thread and at any moment; after :meth:`close` there is nothing
        to abort."""
        self._states.append(state)
        with self._closing:
            if not self._closed:
                with suppress(BlockingIOError):  # full: the task is being woken already
                    os.write(self._write_fd, b"\0")

    async def take(self) -> list[RequestState]:
        """Wait for at least one; all that are there.

        Raises:
            ClosedResourceError: the mailbox was closed.

        Cancellation: loses none.
        """
        while not self._states:
            self._check_open()
            await anyio.wait_readable(self._read_fd)
            self._check_open()  # a wait may return normally after a close: the number may be somebody else's by now
            with suppress(BlockingIOError):
                os.read(self._read_fd, 4096)
        return [self._states.popleft() for _ in range(len(self._states))]

    def close(self) -> None:
        """Close the pipe; a parked :meth:`take` ends. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                anyio.notify_closing(
                    self._read_fd
                )  # libuv aborts the process if a descriptor that it watches is closed
                os.close(self._write_fd)
                os.close(self._read_fd)

    def _check_open(self) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
