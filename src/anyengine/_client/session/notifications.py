"""EEP notifications and fault statuses on their way to the user's handler.

Owns the child tasks of the session that run the handler, one for each notification, and what becomes of its failures.
What a notification means is the user's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio
import anyio.abc

from anyengine._protocol import EEPNotification, FaultStatus

__all__ = ["Notification", "Notifications", "is_worth_a_line"]

_logger = logging.getLogger("anyengine.client")

_MAX_HANDLERS = 256  # at a time: a reconfiguration notifies once for each rank and stage

Notification: TypeAlias = EEPNotification | FaultStatus


class Notifications:
    """See the module. Lifetime: one session, in whose group the handlers run."""

    def __init__(self, handler: Callable[[Notification], Awaitable[None]] | None, tasks: anyio.abc.TaskGroup) -> None:
        self._handler = handler
        self._tasks = tasks
        self._running = 0
        self.failures: int = 0
        """How many were not handled: the handler failed, or too many were running."""

    def take(self, notification: Notification) -> None:
        """Hand it to the handler, if there is one. Synchronous."""
        if self._handler is None:
            return
        if self._running < _MAX_HANDLERS:
            self._running += 1
            self._tasks.start_soon(self._handle, self._handler, notification)
        else:  # an engine that notifies without end, or handlers that do not end: neither may fill our memory
            self.failures += 1
            if is_worth_a_line(self.failures):
                _logger.error("dropped %r: %d handlers are still running", notification, _MAX_HANDLERS)

    async def _handle(self, handler: Callable[[Notification], Awaitable[None]], notification: Notification) -> None:
        try:
            await handler(notification)
        except GeneratorExit:
            raise
        except (Exception, anyio.get_cancelled_exc_class()) as exc:  # noqa: ASYNC103 - see below
            if not isinstance(exc, Exception) and anyio.current_effective_deadline() == -math.inf:
                raise
            # Rule 5: a user's handler fails alone; it is reported, and the session goes on. The same if a future that
            # it awaits, or its task, was cancelled natively: the group would take that for its own cancellation.
            self.failures += 1
            if is_worth_a_line(self.failures):
                _logger.exception("the handler of %r failed", notification)
        finally:
            self._running -= 1


def is_worth_a_line(count: int) -> bool:
    """Whether the event of this number should be logged: the 1st, 2nd, 4th, 8th and so on, so that what a broken engine
    repeats does not fill the disk."""
    return count & (count - 1) == 0
