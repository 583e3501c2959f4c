"""Work in threads, so many at once, of which a caller need not await the end.

Owns the count: a thread that nobody awaits any more still has its place until it ends. (AnyIO's own limiter gives it
away on asyncio as soon as the caller is cancelled.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from anyengine._client.session.wakeup import make_caller

__all__ = ["WorkerThreads"]

T = TypeVar("T")


class WorkerThreads:
    """``most`` threads at once. Belongs to one event loop."""

    def __init__(self, most: int) -> None:
        self._places = anyio.CapacityLimiter(most)
        self._threads = anyio.CapacityLimiter(math.inf)  # whoever has a place has a thread

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """What ``work(*args)`` returns or raises, in a thread; callers have their turn in the order they came.

        Cancellation: returns at once. What runs then runs to its end, and its result is discarded.
        """
        place, begun = object(), threading.Lock()  # taken by the thread, or by a caller who has gone before it began
        call_in_loop = make_caller()
        await self._places.acquire_on_behalf_of(place)

        def in_thread() -> T | None:
            if not begun.acquire(blocking=False):
                return None
            try:
                return work(*args)
            finally:
                call_in_loop(lambda: self._places.release_on_behalf_of(place))

        try:
            result = await anyio.to_thread.run_sync(in_thread, abandon_on_cancel=True, limiter=self._threads)
        except BaseException:
            if begun.acquire(blocking=False):
                self._places.release_on_behalf_of(place)
            raise
        return result  # type: ignore[return-value] # None of work's own
