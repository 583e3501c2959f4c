"""An asynchronous context manager, entered and left by a thread.

Owns the task that holds it open between the two: scopes inside it belong to one task.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, TypeVar

import anyio

from anyengine.exceptions import ClientClosedError

from .client_thread import ClientThread

__all__ = ["BlockingContext"]

R = TypeVar("R", covariant=True)


class _BodyInterruptedError(Exception):
    """Stands for what must not be raised inside an event loop (KeyboardInterrupt, SystemExit, GeneratorExit), or cannot
    be inside a coroutine: StopIteration."""


class BlockingContext(Generic[R]):
    """See the module. Good for one ``with``; the body's exception goes through the asynchronous one."""

    def __init__(self, thread: ClientThread, context: AbstractAsyncContextManager[R]) -> None:
        self._thread = thread
        self._context = context
        self._exception: BaseException | None = None
        self._scope: anyio.CancelScope | None = None
        self._given_up = False

    def __enter__(self) -> R:
        """Enter it in the client's loop.

        Raises: what entering it raises; see :meth:`ClientThread.call`.
        """
        self._thread.check_caller()
        entered: Future[R] = Future()

        def ended(done: Future[None]) -> None:
            if not done.cancelled() and not entered.done():
                entered.set_exception(done.exception())  # what entering has raised

        try:
            self._held = self._thread.submit(lambda: self._hold(entered))
            self._held.add_done_callback(ended)
            return entered.result()
        except BaseException:  # a signal handler's, at any moment, or what entering has raised
            self._given_up = True  # nobody will leave what has been entered, or will be
            self._thread.post(self._give_up)
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Leave it, with the body's exception; whether that ends here.

        Raises: what leaving it raises; see :meth:`ClientThread.call`.
        """
        if self._thread.is_foreign:
            return False
        passes = isinstance(exc, Exception) and not isinstance(exc, StopIteration)
        self._exception = exc if exc is None or passes else _BodyInterruptedError()
        self._thread.post(self._leave)
        try:
            self._held.result()
        except (_BodyInterruptedError, ClientClosedError):
            if exc is None:
                raise
            return False
        except Exception as raised:
            if raised is exc:
                return False
            raise
        return isinstance(exc, Exception)

    def _leave(self) -> None:
        self._body_ended.set()

    def _give_up(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _hold(self, entered: Future[R]) -> None:
        self._body_ended = anyio.Event()
        with anyio.CancelScope() as self._scope:
            if self._given_up:
                return
            async with self._context as value:
                entered.set_result(value)
                await self._body_ended.wait()
                if self._exception is not None:
                    raise self._exception
