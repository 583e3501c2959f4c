"""A mailbox that any thread may fill, at any moment, and one task empties.

Owns the way from a thread to an event loop, on every backend, without a token of the loop: a deque and one byte in a
pipe. Knows nothing of what is put in. Filling it takes no lock but its own, which a collection in the middle of
:meth:`Mailbox.close` may take again.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

__all__ = ["Mailbox"]

T = TypeVar("T")


class Mailbox(Generic[T]):
    """See the module. Owning task: the one that calls :meth:`take`. Lifetime: until :meth:`close`."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._closed = False
        # Keeps another thread's put from writing to a descriptor number that was closed and given away; re-entrant,
        # since a collection can run inside close itself.
        self._closing = threading.RLock()

    def put(self, item: T) -> None:
        """Leave one item. Safe in any thread and at any moment; after :meth:`close` nobody takes it."""
        self._items.append(item)
        with self._closing:
            if not self._closed:
                with suppress(BlockingIOError):  # full: the task is being woken already
                    os.write(self._write_fd, b"\0")

    async def take(self) -> list[T]:
        """Wait for at least one; all that are there.

        Raises:
            ClosedResourceError: the mailbox was closed.

        Cancellation: loses none.
        """
        while not self._items:
            self._check_open()
            await anyio.wait_readable(self._read_fd)
            self._check_open()  # a wait may return normally after a close: the number may be somebody else's by now
            with suppress(BlockingIOError):
                os.read(self._read_fd, 4096)
        return [self._items.popleft() for _ in range(len(self._items))]

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
