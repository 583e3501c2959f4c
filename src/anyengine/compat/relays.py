"""Methods of ``AsyncLLM`` that are the client's own: awaited here, run there.

Owns the decorator; what it decorates has a name, a docstring and no body, as in :mod:`anyengine.sync.methods`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from anyengine._client.client import EngineClient
from anyengine.sync.client_thread import ClientThread

__all__ = ["Relaying", "relayed"]

P = ParamSpec("P")
R = TypeVar("R")


class Relaying(Protocol):
    """What has such methods."""

    _thread: ClientThread


F = TypeVar("F", bound=Relaying)


def relayed(
    method: Callable[Concatenate[EngineClient, P], Awaitable[R]],
) -> Callable[[Callable[[F], object]], Callable[Concatenate[F, P], Coroutine[Any, Any, R]]]:
    """``method``, run in the client's loop and awaited in the caller's."""

    def decorate(stub: Callable[[F], object]) -> Callable[Concatenate[F, P], Coroutine[Any, Any, R]]:
        async def call(self: F, /, *args: P.args, **kwargs: P.kwargs) -> R:
            thread = self._thread
            return await thread.call_async(partial(method, thread.client, *args, **kwargs))

        dressed: Any = update_wrapper(call, stub)
        dressed.__signature__ = inspect.signature(method)  # what inspect.signature looks for first
        return call

    return decorate
