"""The one queue between what reads from the engines and what tells the consumers.

Owns the order: first in, first out, whoever takes. Knows nothing of what travels. Not an AnyIO memory object stream:
that one hands an item to the task that waits, which may run later than somebody who takes the next item synchronously
(as the end of a block does), and loses it if that task is cancelled natively. Here an item stays in the queue until a
running task takes it (rule 3: only the wait is cancelled, never the read).
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

__all__ = ["SessionFeed"]

ItemT = TypeVar("ItemT")


class SessionFeed(Generic[ItemT]):
    """Unbounded: what bounds memory is that requests merge what their consumers do not take. Owning loop: the
    session's. Lifetime: one session."""

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._closed = False
        self._changed: anyio.Event | None = None  # somebody waits for it

    def __len__(self) -> int:
        return len(self._items)

    def send_nowait(self, item: ItemT) -> None:
        """Add an item.

        Raises:
            ClosedResourceError: the feed is closed.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        self._items.append(item)
        self._wake()

    def close(self) -> None:
        """Nothing follows what is there. Synchronous, idempotent."""
        self._closed = True
        self._wake()

    def discard(self) -> None:
        """Close, and drop what nobody has taken. Synchronous, idempotent."""
        self._items.clear()
        self.close()

    def receive_nowait(self) -> ItemT:
        """The oldest item.

        Raises:
            WouldBlock: there is none now.
            EndOfStream: there is none, and none will come.
        """
        if self._items:
            return self._items.popleft()
        if self._closed:
            raise anyio.EndOfStream
        raise anyio.WouldBlock

    async def receive(self) -> ItemT:
        """The oldest item, as soon as there is one. Always lets other tasks run.

        Raises:
            EndOfStream: there is none, and none will come.

        Cancellation: loses nothing, in whatever way it comes.
        """
        if self._items or self._closed:
            await anyio.lowlevel.checkpoint()  # else the wait lets them run, in one turn of the loop less
        while not (self._items or self._closed):
            if self._changed is None:
                self._changed = anyio.Event()
            await self._changed.wait()
        return self.receive_nowait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
