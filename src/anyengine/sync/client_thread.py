"""One client in an event loop and a thread of its own, for callers in other threads.

Owns the thread, and the way into its loop and back: a call is one entry in an inbox and one future. Must not know what
is called. This is what ``anyio.from_thread.BlockingPortal`` does, with four differences that a client needs: a call
costs one crossing instead of two; it may be made from a thread that runs an event loop, of any backend; whoever submits
does not wait for the loop; and no call is left unanswered when the loop ends under it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from math import inf
from threading import Event, Thread, get_ident
from typing import Any, Final, Literal, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from anyengine._client.client import EngineClient
from anyengine._client.session.wakeup import make_bell, make_parker, settle_context
from anyengine.exceptions import ClientClosedError, WrongLoopError

from .answers import refuse, settle, wait, wait_async

__all__ = ["Backend", "ClientThread"]

Backend: TypeAlias = Literal["asyncio", "trio"]

T = TypeVar("T")

_LAST_WORDS_S: Final = 1.0  # for calls in flight to hear that the client was closed; what does not listen is cancelled

_LAUNCH_S: Final = 1.0  # for a thread that was asked for to run its first line


class _LeftInHurryError(Exception):
    """Leaves the client's block as an exception of its body does: nothing is waited for."""


class ClientThread:
    """See the module. Lifetime: :meth:`start` to :meth:`stop`, once.

    Invariants: only the loop touches the client between these two. Every future that :meth:`submit` has given out is
    done at the latest when the thread has ended: whoever submits puts it into ``_pending`` before it looks at
    ``_ended``, and the thread sets ``_ended`` before it looks through ``_pending``.
    """

    def __init__(
        self,
        client: EngineClient,
        *,
        backend: Backend = "asyncio",
        backend_options: Mapping[str, Any] | None = None,
        allow_running_loop: bool = False,
    ) -> None:
        self.client = client
        self._run_options: dict[str, Any] = {
            "backend": backend,
            "backend_options": None if backend_options is None else dict(backend_options),
        }
        self._allow_running_loop = allow_running_loop
        self._pid = os.getpid()
        self._inbox: deque[Callable[[], object]] = deque()
        self._bell: Callable[[], None] = _nobody_listens
        self._pending: set[Future[Any]] = set()
        self._runs = Event()
        self._ready: Future[None] = Future()
        self._ended: Future[None] = Future()
        self._failure: BaseException | None = None
        self._in_hurry = False
        self._takes_no_calls = False
        # Daemonic: a program that forgets its client ends all the same, and its engines with it.
        self._thread = Thread(target=self._run, name="anyengine client", daemon=True)

    @property
    def has_ended(self) -> bool:
        """Whether the loop is gone: nobody but the caller touches what is left of the client."""
        return self._ended.done()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a fork of the one that has the thread."""
        return os.getpid() != self._pid

    # --------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Enter the client in the thread, and wait until it is ready.

        Raises: see :meth:`EngineClient.__aenter__`; a signal handler's exception, when everything has ended again.
        """
        self._check_running_loop()
        try:
            self._thread.start()
            self._ready.result()
        except BaseException:
            self.post(self._cut_off)
            if self._runs.wait(_LAUNCH_S):  # else a signal came before there was a thread
                self._leave(in_hurry=True)
            raise

    def stop(self, *, in_hurry: bool = False) -> None:
        """Leave the client's block, and wait for the end of the thread. A signal handler's exception meanwhile (Ctrl-C)
        ends the waiting for requests in flight, and is raised when all has ended. Idempotent; does nothing in a fork.

        Raises: see :meth:`EngineClient.__aexit__`.
        """
        self._leave(in_hurry=in_hurry)
        if self._failure is not None:
            raise self._failure

    def leave_soon(self) -> None:
        """:meth:`stop` in a hurry, without waiting. Safe at any moment, a collection included."""
        self._in_hurry = True
        self.post(self._let_go)

    def _leave(self, *, in_hurry: bool) -> None:
        if self.is_foreign:
            return  # the thread is the parent's, and so is what it holds
        self.check_place()
        interruption: BaseException | None = None
        while True:
            try:
                self._in_hurry |= in_hurry
                self.post(self._let_go)
                self._ended.result()
                break
            except BaseException as exc:  # noqa: ASYNC103, BLE001 - a signal handler's: raised below, when all has ended
                interruption = exc
                self.post(self._cut_off)
        self._thread.join()  # it has said its last word; an interrupted join would take a running thread for ended
        if interruption is not None:
            raise interruption

    def _let_go(self) -> None:
        self._left.set()

    def _cut_off(self) -> None:
        self._scope.cancel()

    # ----------------------------------------------------------------------------- calls

    def check_caller(self) -> None:
        """Refuse a caller that must not wait here, or that nobody would answer.

        Raises:
            WrongLoopError: it is the client's own thread, a thread that runs an event loop, or a forked process.
            ClientClosedError: the client's block has ended.
        """
        self.check_place()
        if self.has_ended:
            raise ClientClosedError("the client was closed")
        self._check_running_loop()

    def check_place(self) -> None:
        """The part of :meth:`check_caller` that costs next to nothing: whether waiting here can end at all.

        Raises:
            WrongLoopError: it cannot.
        """
        if self.is_foreign:
            raise WrongLoopError(
                f"this client lives in process {self._pid}, of which this is a fork: make another one here"
            )
        if get_ident() == self._thread.ident:
            raise WrongLoopError(
                "a blocking call in the client's own thread would wait for itself: callbacks of the client must not "
                "call it; let another thread do it"
            )

    def _check_running_loop(self) -> None:
        if self._allow_running_loop:
            return
        try:
            anyio.lowlevel.current_token()
        except RuntimeError:
            return
        raise WrongLoopError(
            "an event loop runs in this thread, and would stand still during a blocking call: use EngineClient, with "
            "`async with` and `await`; or a worker thread; or, where nothing else needs the loop (a notebook), give "
            "allow_running_loop=True"
        )

    def post(self, action: Callable[[], object]) -> None:
        """Have the loop call ``action``, which must not raise. Safe in any thread and at any moment; when the loop has
        ended, nothing happens."""
        if not self.is_foreign:
            self._inbox.append(action)
            self._bell()

    def submit(self, func: Callable[[], Awaitable[T]], *, outlives_client: bool = False) -> Future[T]:
        """Run ``func`` in a task of the loop, in a copy of the caller's context. Cancelling the future cancels it.

        When the client's block has ended, tasks have a moment to end by themselves; those that outlive the client are
        cancelled behind it. A task that is cancelled so, or never started, gives :class:`ClientClosedError`.
        """
        future: Future[T] = Future()
        self._submit(func, future, outlives_client=outlives_client)
        return future

    def _submit(self, func: Callable[[], Awaitable[T]], future: Future[T], *, outlives_client: bool = False) -> None:
        self._hand_in(partial(self._start_task, copy_context(), func, future, outlives_client), future)

    def _hand_in(self, action: Callable[[], object], future: Future[Any]) -> None:
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self.post(action)
        if self.has_ended:
            refuse(future)

    def call(self, func: Callable[[], Awaitable[T]]) -> T:
        """Run ``func`` in the loop, and wait for its result; a signal handler's exception cancels it.

        Raises: what it raises; and see :meth:`check_caller`.
        """
        self.check_caller()
        future: Future[T] = Future()
        return wait(future, lambda: self._submit(func, future))

    def call_now(self, func: Callable[[], T]) -> T:
        """Run ``func``, which does not wait, in the loop, without a task of its own.

        Raises: what it raises; and see :meth:`check_caller`.
        """
        self.check_caller()
        future: Future[T] = Future()
        return wait(future, lambda: self._hand_in(partial(settle, func, future), future))

    def call_last(self, func: Callable[[], T]) -> T:
        """:meth:`call_now`; when the loop has ended, or ends before it comes to it, here.

        Raises: what ``func`` raises; and see :meth:`check_caller`.
        """
        if not self.has_ended:
            try:
                return self.call_now(func)
            except ClientClosedError:
                if not (self._takes_no_calls or self.has_ended):
                    raise
                self._ended.result()  # it is about to
        return func()

    def ask(self, func: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """:meth:`call`; when the loop has ended, what ``func`` can say without waiting.

        Raises:
            ClientClosedError: the loop has ended, and it cannot.
        """
        if not self.has_ended or self.is_foreign:
            try:
                return self.call(func)
            except ClientClosedError:
                if not self._takes_no_calls:
                    raise
                self._ended.result()  # it is about to
        coroutine = func()
        try:
            coroutine.send(None)
        except StopIteration as stop:
            result: T = stop.value
            return result
        coroutine.close()
        raise ClientClosedError("the client was closed")

    async def call_async(self, func: Callable[[], Awaitable[T]]) -> T:
        """:meth:`call` for another event loop, which goes on meanwhile.

        Raises: what ``func`` raises; ``WrongLoopError``: in a forked process.

        Cancellation: cancels the call, without waiting for its end.
        """
        self.check_place()
        return await wait_async(self.submit(func))

    async def call_now_async(self, func: Callable[[], T]) -> T:
        """:meth:`call_now` for another event loop.

        Raises: see :meth:`call_async`.

        Cancellation: safe.
        """
        self.check_place()
        future: Future[T] = Future()
        self._hand_in(partial(settle, func, future), future)
        return await wait_async(future)

    def on_end(self, action: Callable[[], object]) -> None:
        """Have ``action`` called when the loop is gone, in whatever thread."""
        self._ended.add_done_callback(lambda _: action())

    def wait_ended(self) -> None:
        """Wait until the loop is gone, which it is about to be."""
        self._ended.result()

    # ------------------------------------------------------------------------ in the loop

    def _run(self) -> None:
        self._runs.set()
        try:
            anyio.run(self._main, **self._run_options)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - whoever waits for the thread must hear of it
            self._failure = exc
        self._ended.set_result(None)
        for future in list(self._pending):
            refuse(future)
        if not self._ready.done():
            self._ready.set_exception(self._failure or ClientClosedError("the client was closed while it started"))

    async def _main(self) -> None:
        self._left, self._scope, limit = anyio.Event(), anyio.CancelScope(), anyio.CancelScope()
        async with anyio.create_task_group() as self._outliving:
            self._outliving.start_soon(self._empty_inbox)
            with limit:
                async with anyio.create_task_group() as self._calls:
                    with self._scope:
                        await self._live()
                    limit.deadline = anyio.current_time() + _LAST_WORDS_S
            self._takes_no_calls = True
            self._outliving.cancel_scope.cancel()

    async def _live(self) -> None:
        try:
            async with self.client:
                self._ready.set_result(None)
                await self._left.wait()
                if self._in_hurry:
                    raise _LeftInHurryError
        except _LeftInHurryError:
            pass
        except Exception as exc:  # noqa: BLE001 - for the thread that waits: raised there
            self._failure = exc

    async def _empty_inbox(self) -> None:
        parker = make_parker()
        self._bell = make_bell(parker)
        while True:
            while self._inbox:
                self._inbox.popleft()()
            await parker.park()

    def _start_task(
        self, context: Context, func: Callable[[], Awaitable[T]], future: Future[T], outlives_client: bool
    ) -> None:
        tasks: TaskGroup = self._outliving if outlives_client else self._calls
        settle_context(context)
        task = self._perform(func, future)
        try:
            context.run(tasks.start_soon, lambda: task)
        except RuntimeError:  # the group has ended, or does this moment, when AnyIO leaves what it was given to nobody
            task.close()
            refuse(future)

    async def _perform(self, func: Callable[[], Awaitable[T]], future: Future[T]) -> None:
        with anyio.CancelScope() as scope:
            future.add_done_callback(lambda done: self.post(scope.cancel) if done.cancelled() else None)
            try:
                result = await func()
            except anyio.get_cancelled_exc_class() as exc:
                # asyncio's may be of func's own making, such as that of a task it waited for: the caller's to hear of,
                # where no scope was cancelled, since it would end the client.
                if anyio.current_effective_deadline() > -inf:
                    with suppress(InvalidStateError):
                        future.set_exception(exc)
                    return  # noqa: ASYNC104 - it is another's
                refuse(future)  # unless it is the caller who has cancelled it
                raise
            except BaseException as exc:  # noqa: BLE001 - for the thread that waits: raised there
                with suppress(InvalidStateError):  # nobody waits any more
                    future.set_exception(exc)
            else:
                with suppress(InvalidStateError):
                    future.set_result(result)


def _nobody_listens() -> None:
    """The loop has not started: it looks into the inbox when it does."""
