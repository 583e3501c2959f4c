"""What engines tell of their KV caches: who publishes it, and a stream of it for whoever routes or accounts by it.

Owns the stream: its subscription, and how it ends. What a message means is :mod:`anyengine._protocol.kv_events`'s.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel

from anyengine._client.session.events import EventLog
from anyengine._client.session.notifications import is_worth_a_line
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import KVEventBatch, KVEventReader
from anyengine._rules import instance
from anyengine._transport.abc import Message
from anyengine._transport.endpoints import is_local_address
from anyengine._transport.subscription import MAX_QUEUED, Subscription, publisher_address
from anyengine._wire import KVEventsConfig, read_kv_events_config
from anyengine.exceptions import DecodeError, EngineDeadError, EngineError, RequestRejected

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["KVEventSources", "KVEventStream"]

_logger = logging.getLogger("anyengine.client")


class KVEventSources:
    """Part of :class:`EngineCoreClient`. Lifetime: the client's."""

    _log: EventLog

    @property
    def session(self) -> Session:
        """The session of the present (or last) block."""
        raise NotImplementedError

    def usable_session(self) -> Session:
        """:attr:`session`, if new calls can be made on it."""
        raise NotImplementedError

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        """How each rank publishes its KV cache events, as it said when it became ready; without those that do not
        publish any, or whose release does not say (vLLM up to 0.26). Asks no engine.

        Raises:
            ClientClosedError: the client has not been entered.
            DecodeError: what a rank said makes no sense.
        """
        said = {rank: _source_of(self.session, rank) for rank in self.session.registrations}
        return {rank: config for rank, config in said.items() if config is not None}

    def kv_events(self, rank: int = 0, *, endpoint: str | None = None) -> KVEventStream:
        """Follow what a rank's KV cache takes in and drops: a stream of :class:`KVEventBatch`. Inert until it is used.

        It subscribes to the rank's own publisher (vLLM: ``kv_events_config={"enable_kv_cache_events": True}``), to
        which any number may; nothing is asked of the engine's main loop. ``endpoint`` says where the publisher is
        ("tcp://gpu-7:5557"), if that is not what the engine says of itself: an engine on another host says
        ``tcp://*:5557``, and not the host. Publishers are not authenticated: subscribe on networks that you trust.
        """
        return KVEventStream(self.usable_session, self._log, rank, endpoint)


class KVEventStream:
    """The changes of one rank's KV cache: an asynchronous iterator, and an asynchronous context manager.

    ``async with client.kv_events(rank) as events: async for batch in events``. It begins with what is published once
    the subscription has reached the publisher, a moment after it is entered (or first iterated); it never ends by
    itself. One task iterates at a time.

    A consumer that is too slow loses messages, and is told so (``missed``): about a thousand wait here, then the
    publisher's own queue fills, and then it drops what is new.
    """

    def __init__(
        self, find_session: Callable[[], Session], log: EventLog, rank: int, endpoint: str | None = None
    ) -> None:
        self._find_session = find_session
        self._log = log
        self.rank: int = rank
        self._endpoint = endpoint
        self._reader = KVEventReader(rank)
        self._messages: deque[Message] = deque()
        self._subscription: Subscription | None = None
        self._error: EngineError | None = None
        self._owned_by_block = False
        self._busy = False
        self._over = False
        self.malformed_messages: int = 0
        """How many messages could not be read, and were left out."""

    # ------------------------------------------------------------------- context

    async def __aenter__(self) -> Self:
        """Subscribe, if that was not done.

        Raises:
            RequestRejected: there is no such rank, it publishes no events, or where it does cannot be reached.
            DecodeError: what the engine says of its publisher makes no sense.
            EngineDeadError: the engine died, or the client is closed.
            BrokenResourceError: ZeroMQ refuses the address; the cause is attached.
        """
        await anyio.lowlevel.checkpoint()
        if self._over:
            raise anyio.ClosedResourceError
        if self._subscription is None:
            self._subscribe()
        self._owned_by_block = True
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close_nowait()

    async def aclose(self) -> None:
        """End the subscription. Idempotent.

        Cancellation: it is ended in any case.
        """
        self.close_nowait()
        await anyio.lowlevel.checkpoint()

    def close_nowait(self) -> None:
        """:meth:`aclose` without a checkpoint. Synchronous: it may stand in a ``finally``."""
        self._unsubscribe()
        self._over = True
        self._messages.clear()

    def __del__(self) -> None:
        subscription = getattr(self, "_subscription", None)
        if subscription is not None:
            # A collection can run in another thread, or in the middle of a call on the socket: leave a note.
            subscription.is_dropped = True
            warnings.warn(
                f"a stream of the KV events of rank {self.rank} was dropped while it was subscribed: use it as `async "
                "with client.kv_events(...) as events`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ----------------------------------------------------------------- iteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> KVEventBatch:
        """The next batch; it waits until there is one.

        Raises:
            StopAsyncIteration: the stream was closed.
            EngineDeadError: the rank died (and may have been started again: then a new stream follows it), or the
                client is closed; behind what had arrived, and again on every further call.
            BusyResourceError: another task is iterating.
            RequestRejected, DecodeError, BrokenResourceError: see :meth:`__aenter__`; of the first call alone.

        Cancellation: loses no batch. It ends the subscription, unless the stream was entered with ``async with``.
        """
        if self._busy:
            raise anyio.BusyResourceError("iterating over")
        self._busy = True
        try:
            return await self._next()
        except BaseException:
            if not self._owned_by_block:
                self.close_nowait()
            raise
        finally:
            self._busy = False

    async def _next(self) -> KVEventBatch:
        if self._subscription is None and not self._over and self._error is None:
            self._subscribe()
        while True:
            if self._messages and not self._session.is_released:
                await anyio.lowlevel.checkpoint()
            while self._messages:
                batch = self._read(self._messages.popleft())
                if batch is not None:
                    return batch
            if self._error is not None:
                raise self._error.for_waiter()
            if self._over:
                raise StopAsyncIteration
            await self._receive()

    def _read(self, frames: Message) -> KVEventBatch | None:
        try:
            return self._reader.read(frames)
        except DecodeError as exc:
            self.malformed_messages += 1
            if is_worth_a_line(self.malformed_messages):
                count = self.malformed_messages
                _logger.warning("left out message %d of rank %d's KV events: %s", count, self.rank, exc)
            return None

    async def _receive(self) -> None:
        """Take what has arrived, and wait if nothing has; or learn why nothing will."""
        session, subscription = self._session, self._subscription
        assert subscription is not None
        if session.cause is None:
            session.check_thread()
        if (error := self._end()) is not None:
            if not session.is_released:  # what is here comes first; it may be a live one that publishes without end
                while len(self._messages) < MAX_QUEUED and (messages := subscription.socket.drain_nowait()):
                    self._messages.extend(messages)
            self._error = error
            self._unsubscribe()
            return
        failure: anyio.BrokenResourceError | None = None
        async with anyio.create_task_group() as waits:
            waits.start_soon(self._await_end, session, waits.cancel_scope)
            waits.start_soon(self._await_restart, waits.cancel_scope)
            try:
                self._messages.extend(await subscription.socket.drain())
            except anyio.ClosedResourceError:
                pass  # the stream is closed, or the client; the caller looks
            except anyio.BrokenResourceError as exc:
                failure = exc
            waits.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _await_end(self, session: Session, scope: anyio.CancelScope) -> None:
        await session.burials.ended[self.rank].wait()
        scope.cancel()

    async def _await_restart(self, scope: anyio.CancelScope) -> None:
        while self._end() is None:
            await self._log.wait()
        scope.cancel()

    def _end(self) -> EngineError | None:
        """Why nothing more will come; ``None``: it may."""
        session, rank = self._session, self.rank
        if session.cause is not None:
            return session.cause.for_waiter()
        if rank in session.burials.deaths:
            return session.burials.death(rank)
        if session.engines[rank] is not self._engine:
            what = f"engine {rank} has died and was started again, with an empty KV cache: follow its events anew"
            return EngineDeadError(what, rank=rank)
        return None

    # -------------------------------------------------------------- subscription

    def _subscribe(self) -> None:
        session = self._find_session()
        rank = session.check_rank(self.rank)
        if rank in session.burials.deaths:
            raise session.burials.death(rank)
        for dropped in [one for one in session.subscriptions if one.is_dropped]:
            session.subscriptions.discard(dropped)
            dropped.close()
        address, topic, listens = _publisher(session, rank, self._endpoint)
        if listens and any(one.listens and one.address == address for one in session.subscriptions):
            problem = f"the publisher of engine {rank} connects to {address}, where another stream listens already"
            remedy = "follow it with one stream, or have it publish at 'tcp://*:<port>'"
            raise RequestRejected(problem, parameter="rank", value=rank, remedy=remedy)
        self._session, self._engine = session, session.engines[rank]
        self._subscription = Subscription(address, topic, listens=listens)
        session.subscriptions.add(self._subscription)

    def _unsubscribe(self) -> None:
        subscription = self._subscription
        if subscription is not None:
            if not self._session.is_released:  # the session has closed it else
                subscription.close()  # in another thread it raises, and the stream is what it was
            self._session.subscriptions.discard(subscription)
            self._subscription = None


def _source_of(session: Session, rank: int) -> KVEventsConfig | None:
    ready = session.registrations.get(rank)
    try:
        config = None if ready is None else read_kv_events_config(ready)
    except DecodeError as exc:
        exc.rank = rank
        raise
    return config if config is not None and config.enable_kv_cache_events and config.publisher != "null" else None


def _publisher(session: Session, rank: int, endpoint: str | None) -> tuple[str, bytes, bool]:
    """Address and topic of a rank's publisher, and whether it connects to us.

    Raises:
        RequestRejected: it has none, or none that can be reached.
    """
    config = _source_of(session, rank)
    topic = b"" if config is None else config.topic.encode()
    if endpoint is not None:
        instance("endpoint", endpoint, str)
        try:
            return publisher_address(endpoint, is_local=True)[0], topic, False
        except ValueError as exc:
            remedy = "use 'tcp://<host>:<port>', or an 'ipc://' path"
            raise RequestRejected(f"{endpoint!r} {exc}", parameter="endpoint", value=endpoint, remedy=remedy) from exc
    if config is None:
        remedy = (
            "start it with KV events (vLLM: kv_events_config={'enable_kv_cache_events': True, 'publisher': 'zmq'}), or "
            "give endpoint= if it has a publisher and its release does not say so (vLLM up to 0.26)"
        )
        raise RequestRejected(f"engine {rank} publishes no KV events", parameter="rank", value=rank, remedy=remedy)
    inputs = session.endpoints.input_address
    is_ours = isinstance(session.engines[rank], SupervisedEngine)
    try:
        if config.publisher not in ("zmq", None):
            raise ValueError(f"is of a publisher {config.publisher!r}, which this client does not know")
        address, listens = publisher_address(config.endpoint, is_local=is_ours or is_local_address(inputs))
        if listens and not is_local_address(address):  # which nobody has asked this client to open to other hosts
            raise ValueError("is an address that its publisher connects to, and that this client does not listen at")
    except ValueError as exc:
        where = f"engine {rank} publishes its KV events at {config.endpoint!r}, which {exc}"
        remedy = "have it publish at 'tcp://*:<port>', or give endpoint='tcp://<its host, or a forwarder>:<port>'"
        raise RequestRejected(where, parameter="endpoint", value=None, remedy=remedy) from exc
    return address, topic, listens
