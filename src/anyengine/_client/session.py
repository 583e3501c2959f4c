"""One session: what a client owns between entering and leaving its block, and how its end is told.

Owns the session's tasks, its state and its one sticky cause. Protocol decisions are the connection's; what an output
means to a consumer is the client's; the order of starting and stopping is :mod:`.lifecycle`'s. Session tasks never
raise out of the group: they end the session with a cause.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVarTuple

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from anyengine._process.status import Status
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import Connection, DeadSentinel, EEPNotification, FaultStatus, MalformedMessage, UtilityReply
from anyengine._transport.abc import Message
from anyengine._transport.endpoints import Endpoints
from anyengine._transport.monitor import PeerMonitor
from anyengine._wire import EngineCoreOutputs, EngineCoreReadyResponse, OutputBatch
from anyengine.config import EngineSettings
from anyengine.exceptions import ClientClosedError, ClientFailedError, EngineDeadError, WrongLoopError

__all__ = ["ClientState", "Notification", "Session", "SessionItem", "SessionSettings"]

_logger = logging.getLogger("anyengine.client")

_LAST_WORDS_S = 1.0  # how long a dying engine may take to exit, so that the error can say how it ended

Notification: TypeAlias = EEPNotification | FaultStatus

ArgsT = TypeVarTuple("ArgsT")

SessionItem: TypeAlias = EngineCoreOutputs | UtilityReply | EngineDeadError
"""What travels through the session's stream, in the order received; the error that ends the session is the last
item."""


class ClientState(enum.Enum):
    """Where a client is in its life."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session is told by its client."""

    engine: EngineSettings
    startup_timeout_s: float
    shutdown_grace_s: float
    on_death: Literal["report", "cancel"]
    on_progress: Callable[[Status], None] | None
    on_notification: Callable[[Notification], Awaitable[None]] | None


class Session:
    """See the module. Owning task: the one that entered the client. Lifetime: one ``async with``.

    Invariants: ``cause`` is set once, with the first fatal error; once it is set nothing is registered any more, and
    what was registered before is told through ``stream``, behind everything received earlier.
    """

    connection: Connection
    feed: MemoryObjectSendStream[SessionItem]
    stream: MemoryObjectReceiveStream[SessionItem]

    def __init__(self, settings: SessionSettings, endpoints: Endpoints, tasks: anyio.abc.TaskGroup) -> None:
        self.settings = settings
        self.endpoints = endpoints
        self.tasks = tasks
        self.state: ClientState = ClientState.STARTING
        self.cause: EngineDeadError | None = None
        self.ended: anyio.Event = anyio.Event()
        self.body_scope: anyio.CancelScope = anyio.CancelScope()
        self.engines: dict[int, SupervisedEngine] = {}
        self.registrations: dict[int, EngineCoreReadyResponse | None] = {}
        self.feed, self.stream = anyio.create_memory_object_stream[SessionItem](math.inf)
        self.last_heard_s: float = anyio.current_time()
        self.notification_failures: int = 0
        self.in_order: bool = False
        """Set by a client whose consumer of ``stream`` also resolves the replies and passes the cause on, so that a
        reply is a fence: everything sent before it has reached its consumers. Otherwise both happen as they arrive."""
        self._thread_id = threading.get_ident()
        self._unwatched: dict[int, anyio.Event] = {}
        self.lost_links: set[str] = set()
        self._outputs_gone = anyio.Event()
        self._drain_scope = anyio.CancelScope()
        self._drained = anyio.Event()
        self._dying: tuple[SupervisedEngine, str | None] | None = None

    # --------------------------------------------------------------------- state

    def check_usable(self) -> None:
        """Raise the error that a new call deserves, if any.

        Raises:
            EngineDeadError: the engine died, or the client is closed (:class:`ClientClosedError`).
            WrongLoopError: called from another thread than the session's.
        """
        if self.cause is not None:
            raise self.cause.for_waiter()
        self.check_thread()

    def check_thread(self) -> None:
        """Refuse another thread than the session's, before anything is touched.

        Raises:
            WrongLoopError: it is another one.
        """
        if threading.get_ident() != self._thread_id:
            raise WrongLoopError(
                "this client belongs to the event loop that entered it; from another thread, reach it "
                "with anyio.from_thread"
            )

    def end(self, cause: EngineDeadError) -> None:
        """End the session with ``cause``, unless it has ended. Synchronous, idempotent."""
        if self.cause is not None:
            return
        self.cause = cause
        if not isinstance(cause, ClientClosedError):
            self.state = ClientState.DEAD
        self.feed.send_nowait(cause)
        self.feed.close()
        self.ended.set()
        if not self.in_order:
            if hasattr(self, "connection"):
                self.connection.utilities.fail_all(cause)
            self.told_everyone()

    def close(self) -> None:
        """End the session since its block is being left, or cancelled; with the death of an engine that is dying."""
        self.end(
            ClientClosedError("the client was closed") if self._dying is None else self._dying[0].death(self._dying[1])
        )

    def told_everyone(self) -> None:
        """Every waiter has been told of the cause: now the body may be cancelled."""
        if self.settings.on_death == "cancel" and not isinstance(self.cause, ClientClosedError):
            self.body_scope.cancel()

    # --------------------------------------------------------------------- tasks

    async def own(
        self,
        task: Callable[[*ArgsT], Awaitable[None]],
        *args: *ArgsT,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run one of the client's own tasks; a failure of it ends the session instead of leaving the group."""
        task_status.started()
        try:
            await task(*args)
        except Exception as exc:
            # Our own bug, whatever it is: everyone who waits must hear of it.
            name = getattr(task, "__qualname__", repr(task))
            _logger.exception("the client's own task %s failed", name)
            failure = ClientFailedError(f"the client's own task {name} failed: {exc!r}")
            failure.__cause__ = exc
            self.end(failure)
        except GeneratorExit:
            raise  # the loop itself is gone, and everybody with it
        except BaseException as exc:
            # Cancelled, by a scope around the block or natively. The body may be shielded, and wait for what this task
            # will not bring any more: it must hear of it now, not when the block is left. If it is not shielded, it
            # must see the cancellation first, which asyncio delivers one turn later to the task that called cancel().
            try:
                if isinstance(exc, anyio.get_cancelled_exc_class()):
                    await anyio.lowlevel.cancel_shielded_checkpoint()
            finally:
                self.close()
            raise

    async def drain_outputs(self) -> None:
        """The output drain: reads the output socket until it is empty at each wake-up, decodes, hands over."""
        try:
            with self._drain_scope:
                while True:
                    self._receive(await self.endpoints.outputs.drain())
        finally:
            self._drained.set()

    def _receive(self, messages: list[Message]) -> None:
        self.last_heard_s = anyio.current_time()
        receive = self.connection.receive
        for frames in messages:
            event = receive(frames)
            if isinstance(event, OutputBatch) or (self.in_order and isinstance(event, UtilityReply)):
                if self.cause is None:
                    self.feed.send_nowait(event)
            elif isinstance(event, UtilityReply):
                self.connection.utilities.resolve(event.rank, event.output)
            elif isinstance(event, DeadSentinel):
                engine = next(iter(self.engines.values()))
                self.tasks.start_soon(self.own, self.bury, engine, "it sent ENGINE_CORE_DEAD")
            elif isinstance(event, MalformedMessage):
                _logger.warning("dropped a message of the engine that cannot be decoded: %s", event.error)
            elif self.settings.on_notification is not None:
                self.tasks.start_soon(self._handle, self.settings.on_notification, event)
        if warnings := self.connection.dialects.warnings:
            for warning in warnings:
                _logger.warning("%s", warning)
            warnings.clear()

    async def watch_connections(self, link: Literal["input", "output"], monitor: PeerMonitor) -> None:
        """Notice when the engine's connection to a socket is gone.

        After the output connection's end everything that was sent has arrived. While the process lives, an engine
        without one of the two is deaf or mute, for ever: its thread has ended, and nothing else would tell.
        """
        connections: set[int] = set()
        async for event in monitor:
            if event.kind == "connected":
                connections.add(event.connection)
                self.lost_links.discard(link)
                if link == "output" and self._outputs_gone.is_set():
                    self._outputs_gone = anyio.Event()  # that was a stray one, before the engine's own
                continue
            connections.discard(event.connection)
            if connections:
                continue
            self.lost_links.add(link)
            if link == "output":
                self._outputs_gone.set()
            if self.state is ClientState.READY:
                engine = next(iter(self.engines.values()))
                self.tasks.start_soon(self.own, self.bury, engine, f"its {link} connection is gone")

    def take_over(self, engine: SupervisedEngine) -> None:
        """Watch a started engine process from now on; whoever stops the session ends it."""
        self.engines[engine.rank] = engine
        self._unwatched[engine.rank] = anyio.Event()
        self.tasks.start_soon(self.own, self._supervise, engine)

    async def wait_unwatched(self, engine: SupervisedEngine) -> None:
        """Wait until the task that watches the process has ended: with the process, or before it (``cause`` is set)."""
        await self._unwatched[engine.rank].wait()

    async def _supervise(self, engine: SupervisedEngine) -> None:
        """Watch one engine process to its end, which, once it was ready, is the end of the session."""
        try:
            await engine.supervise()
        finally:
            self._unwatched[engine.rank].set()
        if self.state is ClientState.READY:
            await self.bury(engine)

    async def bury(self, engine: SupervisedEngine, symptom: str | None = None) -> None:
        """The engine is dying or dead: learn how it ended and take what it still sent, then end the session."""
        if self._dying is not None:
            return
        self._dying = engine, symptom
        with anyio.move_on_after(_LAST_WORDS_S):
            await engine.child.exited.wait()
            await self._outputs_gone.wait()
        self._drain_scope.cancel()  # safe: cancelling the wait for readiness loses no message
        await self._drained.wait()
        with anyio.move_on_after(_LAST_WORDS_S):  # a broken one lives on, and may send without end
            while messages := self.endpoints.outputs.drain_nowait():
                self._receive(messages)
                await anyio.lowlevel.checkpoint()
        self.end(engine.death(symptom))
        self.endpoints.outputs.close()  # nobody listens any more: what it may still send must not fill our memory

    async def _handle(self, handler: Callable[[Notification], Awaitable[None]], notification: Notification) -> None:
        """An EEP notification's (or fault status') handler: a child task of the session."""
        try:
            await handler(notification)
        except GeneratorExit:
            raise
        except (Exception, anyio.get_cancelled_exc_class()) as exc:  # noqa: ASYNC103 - see below
            if not isinstance(exc, Exception) and anyio.current_effective_deadline() == -math.inf:
                raise
            # Rule 5: a user's handler fails alone; it is reported, and the session goes on. The same if a future that
            # it awaits, or its task, was cancelled natively: the group would take that for its own cancellation.
            self.notification_failures += 1
            _logger.exception("the handler of %r failed", notification)
