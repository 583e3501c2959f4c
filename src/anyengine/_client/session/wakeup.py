"""The parking primitive: how the one consumer of a request stream sleeps and is woken. The only module that knows
backends.

Owns the wait of the hot loop. ``anyio.Event`` would do and costs 1.4 to 2.8 us more for each token (docs/hot-loop.md):
a parker is reusable and makes one future (asyncio) or nothing (trio) for each wait. One task parks at a time;
:meth:`Parker.wake` is synchronous and may only be called from the loop's thread; other threads have a bell.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from contextvars import Context
from functools import cache
from threading import get_ident
from types import coroutine
from typing import TYPE_CHECKING, Any, Protocol

from anyengine.exceptions import WrongLoopError

if TYPE_CHECKING:
    import asyncio

__all__ = ["EndBell", "Parker", "make_bell", "make_caller", "make_parker", "settle_context"]

_ANOTHER_LOOP = "a request stream belongs to the thread and the event loop of its client, and this is another one"


class Parker(Protocol):
    """One sleeper. A wake without a sleeper does nothing: the sleeper must look at its condition before it parks,
    and again after it wakes."""

    def park(self) -> Awaitable[None]:
        """Sleep until woken, when awaited.

        Raises:
            WrongLoopError: called in another thread than the one that made the parker.

        Cancellation: leaves nothing behind; a wake that raced with it is forgotten.
        """

    def wake(self) -> None:
        """Wake the sleeper, if there is one."""


class _AsyncioParker:
    __slots__ = ("_future", "_loop", "_thread_id")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = get_ident()
        self._future: asyncio.Future[None] | None = None

    def park(self) -> asyncio.Future[None]:
        loop = self._loop
        # Which loop runs here is not asked for: asyncio's answer takes a system call (its process may have forked).
        if get_ident() != self._thread_id or not loop.is_running():
            raise WrongLoopError(_ANOTHER_LOOP)
        # That nobody waits for it any more is seen by its being done: a cancelled one is.
        future: asyncio.Future[None] = loop.create_future()
        self._future = future
        return future

    def wake(self) -> None:
        future = self._future
        if future is not None and not future.done():
            future.set_result(None)


class _Ending(Protocol):
    @property
    def ended(self) -> bool: ...


class EndBell:
    """In place of a parker where nobody sleeps for one request: rings when it ends, and at nothing else."""

    __slots__ = ("_request", "_ring")

    def __init__(self, request: _Ending, ring: Callable[[], None]) -> None:
        self._request = request
        self._ring = ring

    async def park(self) -> None:
        """Nobody sleeps here."""
        raise AssertionError("a request that rings is not waited for")

    def wake(self) -> None:
        if self._request.ended:
            self._ring()


def make_parker() -> Parker:
    """A parker for the running event loop."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return _trio_parker_class()()
    return _AsyncioParker(sys.modules["asyncio"].get_running_loop())  # not ours to import: a program on trio has none


def make_bell(parker: Parker) -> Callable[[], None]:
    """What wakes ``parker``, made for the running event loop, from any thread and at any moment: a signal handler or a
    collection may ring. Does nothing once the loop has ended."""
    call = make_caller()
    return lambda: call(parker.wake)


def make_caller() -> Callable[[Callable[[], object]], None]:
    """What has a function called in the running event loop, soon, from any thread and at any moment; after the loop's
    end it does nothing."""
    trio = sys.modules.get("trio")
    call_soon: Callable[[Callable[[], object]], object]
    if trio is not None and trio.lowlevel.in_trio_task():
        call_soon = trio.lowlevel.current_trio_token().run_sync_soon
    else:
        call_soon = sys.modules["asyncio"].get_running_loop().call_soon_threadsafe

    def call(function: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed (trio's RunFinishedError is one, too)
            call_soon(function)

    return call


def settle_context(context: Context) -> None:
    """Make ``context``, a copy from another thread, one for tasks of the running loop: what it says of the event loop
    is what the present one says."""
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        library = sniffio.current_async_library_cvar
        context.run(library.set, library.get())


@cache
def _trio_parker_class() -> type[Parker]:
    from outcome import Value  # what trio's tasks are woken with
    from trio import lowlevel

    succeeded = lowlevel.Abort.SUCCEEDED
    current_task, reschedule = lowlevel.current_task, lowlevel.reschedule
    woken = Value(None)  # a value is unwrapped once only, and this one never
    # What wait_task_rescheduled() says to the loop: always the same, so one is enough. The coroutines around it, made
    # for each wait, would cost more than the rest of the wait.
    waiting = lowlevel.wait_task_rescheduled(lambda _: succeeded)  # noqa: ASYNC105 - for what it yields
    trap = waiting.send(None)
    waiting.close()

    class TrioParker:
        __slots__ = ("_task", "_thread_id")

        def __init__(self) -> None:
            self._task: lowlevel.Task | None = None
            self._thread_id = get_ident()

        @coroutine
        def park(self) -> Generator[Any, Any, None]:
            if get_ident() != self._thread_id:  # a wake would put a task of one loop into the queue of another
                raise WrongLoopError(_ANOTHER_LOOP)
            try:
                task = current_task()
            except RuntimeError:
                raise WrongLoopError(_ANOTHER_LOOP) from None
            self._task, task.custom_sleep_data = task, self
            try:
                outcome = yield trap
            finally:
                self._task = None
            if outcome is not woken:
                outcome.unwrap()  # it is cancelled

        def wake(self) -> None:
            task = self._task
            if task is not None:
                self._task = None
                if task.custom_sleep_data is self:  # else something else has woken it already: a cancellation
                    reschedule(task, woken)

    return TrioParker
