"""What has happened to a client, for whoever wants to follow it: a short memory, and readers with a place in it.

Owns how events reach their readers. What an event is, and when there is one, is the life's
(:class:`~anyengine._protocol.Life`). Nobody registers, so nobody has to be forgotten: a reader is a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Self

import anyio
import anyio.lowlevel

from anyengine._protocol import ClientEvent, ClientState, CurrentState

__all__ = ["ClientEvents", "EventLog"]

_KEPT = 256


class EventLog:
    """The last events of a client, each with its number. Lifetime: the client's, block after block.

    Invariant: memory is bounded, however many readers there are and however slow they are.
    """

    def __init__(self) -> None:
        self._events: deque[ClientEvent] = deque(maxlen=_KEPT)
        self._waiting: set[anyio.Event] = set()  # each of the loop of whoever waits, and gone with it
        self.next_number: int = 0

    def publish(self, event: ClientEvent) -> None:
        """Something has happened. Synchronous."""
        self._events.append(event)
        self.next_number += 1
        for waiting in self._waiting:
            waiting.set()

    def read(self, number: int) -> ClientEvent | None:
        """The event of this number; ``None`` where it is forgotten."""
        index = len(self._events) - (self.next_number - number)
        return None if index < 0 else next(islice(self._events, index, None))

    async def wait(self) -> None:
        """Wait for the next event.

        Cancellation: safe.
        """
        changed = anyio.Event()
        self._waiting.add(changed)
        try:
            await changed.wait()
        finally:
            self._waiting.discard(changed)


class ClientEvents:
    """An asynchronous iterator over what happens to a client: first how things stand, then every change, until the
    block has been left. Any number of them can be read at a time; each belongs to one task.
    """

    def __init__(self, log: EventLog, current: Callable[[int], CurrentState], check: Callable[[], None]) -> None:
        self._log = log
        self._current = current
        self._check = check
        self._number: int | None = None
        self._over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ClientEvent:
        """The next event, in the order in which they happened.

        Raises:
            StopAsyncIteration: the client is closed, which was told.
            WrongLoopError: called from another thread than the one that entered the client.

        Cancellation: safe; no event is lost.
        """
        if not self._over:
            self._check()
            await anyio.lowlevel.checkpoint()
            while self._number == self._log.next_number:
                await self._log.wait()
        return self.next_nowait()

    def next_nowait(self) -> ClientEvent:
        """The next event, if there is one: once the client is closed, the rest.

        Raises:
            StopAsyncIteration: the client is closed, which was told.
            WouldBlock: nothing has happened since the last one.
        """
        if self._over:
            raise StopAsyncIteration
        log = self._log
        if self._number == log.next_number:
            raise anyio.WouldBlock
        event = None if self._number is None else log.read(self._number)
        if event is None:
            event = self._current(0 if self._number is None else log.next_number - self._number)
            self._number = log.next_number
        else:
            assert self._number is not None
            self._number += 1
        self._over = event.state is ClientState.CLOSED
        return event
