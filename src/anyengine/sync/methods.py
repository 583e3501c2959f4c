"""Blocking twins of asynchronous methods, with the same signatures.

Owns the decorators that make one of the other. What they decorate has a name, a docstring and no body: type checkers,
editors and ``inspect.signature`` see the parameters and the result of the asynchronous method, whatever becomes of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from anyengine._client.client import EngineClient
from anyengine._client.engines.kv_events import KVEventStream
from anyengine._client.requests.input_session import InputSession
from anyengine._client.requests.many import Answer, RequestGroup
from anyengine._client.requests.stream import RequestStream
from anyengine._client.session.events import ClientEvents

from .client_thread import ClientThread
from .contexts import BlockingContext
from .groups import SyncClientEvents, SyncInputSession, SyncKVEventStream, SyncRequestGroup
from .streams import SyncRequestStream

__all__ = [
    "Facade",
    "blocking",
    "calling",
    "conversing",
    "entering",
    "following",
    "gathering",
    "streaming",
    "submitting",
    "subscribing",
]

P = ParamSpec("P")
R = TypeVar("R")
X = TypeVar("X")


class Facade(Protocol):
    """What has such methods."""

    def _running(self) -> ClientThread: ...


F = TypeVar("F", bound=Facade)
Stub: TypeAlias = Callable[[F], object]
Method: TypeAlias = Callable[Concatenate[EngineClient, P], R]
Twin: TypeAlias = Callable[[Stub[F]], Callable[Concatenate[F, P], R]]


def blocking(method: Method[P, Awaitable[R]]) -> Twin[F, P, R]:
    """``method``, awaited in the client's loop."""
    return _twin(method, ClientThread.call)


def calling(method: Method[P, R]) -> Twin[F, P, R]:
    """``method``, which does not wait, called in the client's loop."""

    return _twin(method, ClientThread.call_now)


def entering(method: Method[P, AbstractAsyncContextManager[R]]) -> Twin[F, P, AbstractContextManager[R]]:
    """``method``, whose context is entered and left in the client's loop."""
    return _twin(method, lambda thread, bound: BlockingContext(thread, bound()))


def streaming(method: Method[P, RequestStream]) -> Twin[F, P, SyncRequestStream]:
    """``method``, which is inert, and its stream for threads."""
    return _twin(method, lambda thread, bound: SyncRequestStream(thread, bound()))


def submitting(method: Method[P, Awaitable[RequestStream]]) -> Twin[F, P, SyncRequestStream]:
    """``method``, awaited in the client's loop, and its stream for threads."""
    return _twin(method, lambda thread, bound: SyncRequestStream(thread, thread.call(bound), started=True))


def gathering(method: Method[P, RequestGroup[Answer]]) -> Twin[F, P, SyncRequestGroup[Answer]]:
    """``method``, which is inert, and its group for threads."""
    return _twin(method, lambda thread, bound: SyncRequestGroup(thread, bound()))


def conversing(method: Method[P, InputSession]) -> Twin[F, P, SyncInputSession]:
    """``method``, whose session belongs to the client's loop, and the session for threads."""
    return _twin(method, lambda thread, bound: SyncInputSession(thread, thread.call_now(bound)))


def following(method: Method[P, ClientEvents]) -> Twin[F, P, SyncClientEvents]:
    """``method``, which is inert, and its events for threads."""
    return _twin(method, lambda thread, bound: SyncClientEvents(thread, bound()))


def subscribing(method: Method[P, KVEventStream]) -> Twin[F, P, SyncKVEventStream]:
    """``method``, which is inert, and its stream for threads."""
    return _twin(method, lambda thread, bound: SyncKVEventStream(thread, bound()))


def _twin(method: Method[P, X], act: Callable[[ClientThread, Callable[[], X]], R]) -> Twin[F, P, R]:
    def decorate(stub: Stub[F]) -> Callable[Concatenate[F, P], R]:
        def call(self: F, /, *args: P.args, **kwargs: P.kwargs) -> R:
            thread = self._running()
            return act(thread, partial(method, thread.client, *args, **kwargs))

        dressed: Any = update_wrapper(call, stub)
        dressed.__signature__ = inspect.signature(method)  # what inspect.signature looks for first
        return call

    return decorate
