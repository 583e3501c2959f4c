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
from typing import Literal, TypeAlias

import anyio

from anyengine._process.status import Status
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import Connection, DeadSentinel, EEPNotification, FaultStatus, MalformedMessage, UtilityReply
from anyengine._transport.abc import Message
from anyengine._transport.endpoints import Endpoints
from anyengine._transport.monitor import PeerMonitor
from anyengine._wire import EngineCoreOutputs, EngineCoreReadyResponse
from anyengine.config import CommandEngine, EmbeddedEngine
from anyengine.exceptions import ClientClosedError, ClientFailedError, EngineDeadError, WrongLoopError

__all__ = ["ClientState", "Notification", "Session", "SessionItem", "SessionSettings"]

_logger = logging.getLogger("anyengine.client")

_LAST_WORDS_S = 1.0  # how long a dying engine may take to exit, so that the error can say how it ended

Notification: TypeAlias = EEPNotification | FaultStatus

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

    engine: EmbeddedEngine | CommandEngine
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

    def __init__(self, settings: SessionSettings, endpoints: Endpoints, tasks: anyio.abc.TaskGroup) -> None:
        self.settings = settings
        self.endpoints = endpoints
        self.tasks = tasks
        self.state = ClientState.STARTING
        self.cause: EngineDeadError | None = None
        self.ended = anyio.Event()
        self.body_scope = anyio.CancelScope()
        self.engines: dict[int, SupervisedEngine] = {}
        self.registrations: dict[int, EngineCoreReadyResponse | None] = {}
        self.feed, self.stream = anyio.create_memory_object_stream[SessionItem](math.inf)
        self.last_heard_s = anyio.current_time()
        self.notification_failures = 0
        self.in_order = False
        """Set by a client whose consumer of ``stream`` also resolves the replies and passes the cause on, so that a
        reply is a fence: everything sent before it has reached its consumers. Otherwise both happen as they arrive."""
        self._thread_id = threading.get_ident()
        self._outputs_gone = anyio.Event()
        self._drain_scope = anyio.CancelScope()
        self._drained = anyio.Event()
        self._dying = False

    # --------------------------------------------------------------------- state

    def check_usable(self) -> None:
        """Raise the error that a new call deserves, if any.

        Raises:
            EngineDeadError: the engine died, or the client is closed (:class:`ClientClosedError`).
            WrongLoopError: called from another thread than the session's.
        """
        if self.cause is not None:
            raise self.cause.for_waiter()
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

    def told_everyone(self) -> None:
        """Every waiter has been told of the cause: now the body may be cancelled."""
        if self.settings.on_death == "cancel" and not isinstance(self.cause, ClientClosedError):
            self.body_scope.cancel()

    # --------------------------------------------------------------------- tasks

    async def own(
        self,
        task: Callable[[], Awaitable[None]],
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run one of the client's own tasks; a failure of it ends the session instead of leaving the group."""
        task_status.started()
        try:
            await task()
        except Exception as exc:
            # Our own bug, whatever it is: everyone who waits must hear of it.
            name = getattr(task, "__qualname__", repr(task))
            _logger.exception("the client's own task %s failed", name)
            failure = ClientFailedError(f"the client's own task {name} failed: {exc!r}")
            failure.__cause__ = exc
            self.end(failure)

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
            if isinstance(event, EngineCoreOutputs) or (self.in_order and isinstance(event, UtilityReply)):
                if self.cause is None:
                    self.feed.send_nowait(event)
            elif isinstance(event, UtilityReply):
                self.connection.utilities.resolve(event.rank, event.output)
            elif isinstance(event, DeadSentinel):
                engine = next(iter(self.engines.values()))
                self.tasks.start_soon(self.bury, engine, "it sent ENGINE_CORE_DEAD")
            elif isinstance(event, MalformedMessage):
                _logger.warning("dropped a message of the engine that cannot be decoded: %s", event.error)
            elif self.settings.on_notification is not None:
                self.tasks.start_soon(self._handle, self.settings.on_notification, event)

    async def watch_output_connection(self, monitor: PeerMonitor) -> None:
        """Notice when the engine's connection to the output socket is gone: everything it sent has arrived then."""
        async for event in monitor:
            if event.kind == "disconnected":
                self._outputs_gone.set()

    async def supervise(self, engine: SupervisedEngine) -> None:
        """Watch one engine process to its end, which, once it was ready, is the end of the session."""
        await engine.supervise()
        if self.state is ClientState.READY:
            await self.bury(engine)

    async def bury(self, engine: SupervisedEngine, symptom: str | None = None) -> None:
        """The engine is dying or dead: learn how it ended and take what it still sent, then end the session."""
        if self._dying:
            return
        self._dying = True
        with anyio.move_on_after(_LAST_WORDS_S):
            await engine.child.exited.wait()
            await self._outputs_gone.wait()
        self._drain_scope.cancel()  # safe: cancelling the wait for readiness loses no message
        await self._drained.wait()
        while messages := self.endpoints.outputs.drain_nowait():
            self._receive(messages)
        self.end(engine.death(symptom))

    async def _handle(self, handler: Callable[[Notification], Awaitable[None]], notification: Notification) -> None:
        """An EEP notification's (or fault status') handler: a child task of the session."""
        try:
            await handler(notification)
        except Exception:
            # Rule 5: a user's handler fails alone; it is reported, and the session goes on.
            self.notification_failures += 1
            _logger.exception("the handler of %r failed", notification)
