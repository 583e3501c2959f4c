"""How the answer of a call comes back: a future that one thread fills, and another one waits for.

Owns the two waits, and what is done with an answer that nobody waits for any more. Knows nothing of calls.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from anyengine._client.session.wakeup import make_bell, make_parker
from anyengine.exceptions import ClientClosedError

__all__ = ["refuse", "settle", "wait", "wait_async"]

T = TypeVar("T")


def settle(func: Callable[[], T], future: Future[T]) -> None:
    """Put into ``future`` what ``func`` returns or raises."""
    if not future.cancelled():
        try:
            future.set_result(func())
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - for the thread that waits: raised there
            with suppress(InvalidStateError):  # nobody waits any more
                future.set_exception(exc)


def wait(future: Future[T], ask: Callable[[], object]) -> T:
    """Wait for ``future``, after ``ask`` has had somebody else fill it; a signal handler's exception, which may come as
    soon as that one works, cancels it.

    Raises: what was put into it.
    """
    try:
        ask()
        return future.result()
    finally:
        future.cancel()  # without effect, unless it is a signal that ends the waiting
        del future, ask  # an error refers to this frame


async def wait_async(future: Future[T]) -> T:
    """:func:`wait` in an event loop.

    Raises: what was put into it.

    Cancellation: cancels it.
    """
    parker = make_parker()
    bell = make_bell(parker)
    future.add_done_callback(lambda _: bell())
    try:
        while not future.done():
            await parker.park()
        return future.result()
    finally:
        future.cancel()  # without effect, unless it is the caller who is cancelled
        del future


def refuse(future: Future[Any]) -> None:
    """Nobody will answer any more."""
    with suppress(InvalidStateError):
        future.set_exception(ClientClosedError("the client was closed"))
