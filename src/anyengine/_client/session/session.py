"""One session: what a client owns between entering and leaving its block, and how its end is told.

Owns the session's tasks, its state and its one sticky cause. Protocol decisions are the connection's; what an output
means to a consumer is the client's; the order of starting and stopping is :mod:`.lifecycle`'s. Session tasks never
raise out of the group: they end the session with a cause.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeAlias, TypeVarTuple

import anyio
import anyio.lowlevel

from anyengine._client.engines.burials import Burials, RankDeath
from anyengine._client.engines.fences import FencePassed, Fences
from anyengine._client.engines.liveness import Liveness
from anyengine._client.engines.restarts import Restarts
from anyengine._client.engines.send_budget import SendBudget
from anyengine._process.attached import AttachedRank
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import (
    Balancer,
    Connection,
    DeadSentinel,
    FaultBoard,
    FaultStatus,
    Frames,
    Life,
    MalformedMessage,
    UtilityReply,
    balancer_for,
)
from anyengine._transport.abc import ClientEndpoints, Message, PeerUnreachable
from anyengine._transport.subscription import Subscription
from anyengine._wire import EngineCoreOutputs, EngineCoreReadyResponse, OutputBatch, engine_identity
from anyengine.config import engine_ranks
from anyengine.exceptions import (
    ClientClosedError,
    ClientFailedError,
    EngineDeadError,
    RequestRejected,
    WrongLoopError,
)

from .closing import Closing
from .notifications import Notification, Notifications, is_worth_a_line
from .session_feed import SessionFeed
from .settings import SessionSettings

__all__ = ["Session", "SessionItem"]

_logger = logging.getLogger("anyengine.client")

ArgsT = TypeVarTuple("ArgsT")


SessionItem: TypeAlias = EngineCoreOutputs | UtilityReply | FencePassed | RankDeath | EngineDeadError
"""What travels through the session's feed, in the order received; the error that ends the session is the last
item."""


class Session:
    """See the module. Owning task: the one that entered the client. Lifetime: one ``async with``.

    Invariants: ``cause`` is set once, with the first fatal error; once it is set nothing is registered any more, and
    what was registered before is told through ``feed``, behind everything received earlier.
    """

    connection: Connection

    def __init__(
        self, settings: SessionSettings, endpoints: ClientEndpoints, tasks: anyio.abc.TaskGroup, life: Life
    ) -> None:
        self.settings = settings
        self.endpoints = endpoints
        self.tasks = tasks
        self.life = life
        self.cause: EngineDeadError | None = None
        self.is_released: bool = False
        """Everything is torn down; nothing can be sent any more."""
        self.ended: anyio.Event = anyio.Event()
        self.body_scope: anyio.CancelScope = anyio.CancelScope()
        self.ranks: tuple[int, ...] = engine_ranks(settings.engines)
        self.engines: dict[int, SupervisedEngine | AttachedRank] = {}
        self.registrations: dict[int, EngineCoreReadyResponse | None] = {}
        self.merged_registration: EngineCoreReadyResponse | None = None
        self.burials: Burials = Burials(self, self.ranks)
        self.restarts: Restarts = Restarts(self)
        self.feed: SessionFeed[SessionItem] = SessionFeed()
        self.liveness: Liveness = Liveness(self, self.ranks)
        self.sent_again: int = 0
        """How many requests wait to be sent once more: they are in no registry, and in flight all the same."""
        self.send_budget: SendBudget = SendBudget(self, self.ranks, settings.max_unread_bytes)
        self.balancer: Balancer = settings.balancer if settings.balancer is not None else balancer_for(len(self.ranks))
        self.fences: Fences = Fences(self)
        self.on_room: Callable[[], None] = _nothing
        """Called when there may be room for a request where there was none."""
        self.notifications: Notifications = Notifications(settings.on_notification, tasks)
        self.faults: FaultBoard = FaultBoard(self.ranks)
        self.closing: Closing = Closing(self)
        self.subscriptions: set[Subscription] = set()
        """To what engines publish; read by whoever has them, and closed with the session at the latest."""
        self.running_tasks: Counter[str] = Counter()
        """The tasks of :meth:`own`, by name."""
        self._messages_dropped = 0
        self.received_s: float = anyio.current_time()
        """When messages were last read, on the event loop's clock."""
        self.in_order: bool = False
        """Set by a client whose consumer of ``feed`` also resolves the replies and passes the cause on, so that a
        reply is a fence: everything sent before it has reached its consumers. Otherwise both happen as they arrive."""
        self._idle = anyio.Event()
        self._thread_id = threading.get_ident()
        self._loop = anyio.lowlevel.current_token()
        self._unwatched: dict[int, anyio.Event] = {}
        self._drain_scope = anyio.CancelScope()
        self._drained = anyio.Event()

    # --------------------------------------------------------------------- state

    @property
    def is_ready(self) -> bool:
        """Whether the engines were ready and the session has not ended."""
        return self.cause is None and (self.life.is_running or self.closing.is_draining)

    @property
    def is_connected(self) -> bool:
        """Whether there is a :attr:`connection`: the engines have shaken hands."""
        return hasattr(self, "connection")

    @property
    def is_left(self) -> bool:
        """The block is being left: whoever waits for the last word of the ranks that live reads, and nobody else."""
        return isinstance(self.cause, ClientClosedError)

    @property
    def children(self) -> list[SupervisedEngine]:
        """The engine processes that are ours."""
        return [engine for engine in self.engines.values() if isinstance(engine, SupervisedEngine)]

    def check_rank(self, rank: int, parameter: str = "rank") -> int:
        """``rank``, if it is one of the session's; ``parameter`` is who says it.

        Raises:
            RequestRejected: it is not.
        """
        if rank not in self.ranks:
            remedy = f"use one of {', '.join(map(str, self.ranks))}"
            raise RequestRejected(f"there is no rank {rank!r}", parameter=parameter, value=rank, remedy=remedy)
        return rank

    def is_lost(self, rank: int) -> bool:
        """Whether nothing can be said to the rank any more."""
        return rank in self.burials.deaths and rank not in self.restarts.pending

    def down(self) -> EngineDeadError:
        """What a call deserves that needs a rank, when none lives: one of them is being started again."""
        rank = min(self.restarts.pending)
        error = self.burials.death(rank)
        error.args = (f"engine {rank} is being started again; it died before: {error.args[0]}",)
        return error

    def send(self, rank: int, frames: Frames) -> None:
        """Send one message to an engine. Synchronous.

        Raises:
            EngineDeadError: it is dead, or cannot be reached, which is the same.
        """
        if rank in self.burials.deaths:
            raise self.burials.death(rank)
        try:
            self.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable as exc:
            # Its process may still be on its way out: what everyone will be told is told here already.
            symptom = "its input connection is gone"
            self.burials.bury(rank, symptom)
            raise self.burials.death(rank, symptom) from exc

    def check_usable(self) -> None:
        """Raise the error that a new call deserves, if any.

        Raises:
            EngineDeadError: the engine died, or the client is closed (:class:`ClientClosedError`).
            WrongLoopError: called from another thread than the session's.
        """
        if self.cause is not None:
            raise self.cause.for_waiter()
        self.check_thread()

    def check_admitting(self) -> None:
        """Refuse a new request while those in flight are being finished.

        Raises:
            ClientClosedError: they are.
        """
        if self.closing.is_draining:
            raise ClientClosedError("the client is being closed: it finishes what is in flight, and takes nothing new")

    def abort_live(self) -> None:
        """Abort every request in flight, and tell its consumer. Synchronous; an engine that is gone is
        no error. Also when the session has ended: a task of its own may have noticed first that the block is left."""
        if self.is_connected:
            for rank, frames in self.connection.abort([*self.connection.requests.live]):
                with suppress(PeerUnreachable):
                    self.endpoints.inputs.send_nowait([engine_identity(rank), *frames])

    async def wait_idle(self) -> None:
        """Wait until no request is in flight, or the session has ended; look again then.

        Cancellation: safe.
        """
        await self._idle.wait()

    def note_idle(self) -> None:
        """The last request in flight has left: everyone who waits for that looks. Synchronous."""
        self._idle.set()
        self._idle = anyio.Event()

    def check_thread(self) -> None:
        """Refuse another thread or event loop than the session's, before anything is touched.

        Raises:
            WrongLoopError: it is another one.
        """
        if threading.get_ident() != self._thread_id or not self._in_own_loop():
            raise WrongLoopError(
                "this client belongs to the event loop that entered it; from another thread, reach it "
                "with anyio.from_thread"
            )

    def _in_own_loop(self) -> bool:
        try:
            return anyio.lowlevel.current_token() == self._loop
        except RuntimeError:  # a synchronous call outside of any task: no other loop has made it
            return True

    def end(self, cause: EngineDeadError) -> None:
        """End the session with ``cause``, unless it has ended. Synchronous, idempotent."""
        if self.cause is not None:
            return
        self.cause = cause
        if not isinstance(cause, ClientClosedError):
            self.life.died(cause)
        self.feed.send_nowait(cause)
        self.feed.close()
        self.burials.all_end(cause)
        self.ended.set()
        self.note_idle()
        self.send_budget.wake()
        self.restarts.look()
        if not self.in_order:
            if self.is_connected:
                self.connection.utilities.fail_all(cause)
            self.told_everyone()

    def close(self) -> None:
        """End the session since its block is being left, or cancelled; with the death of an engine that is dying, if
        none is left that serves."""
        self.closing.note_closed()
        dying = self.burials.untold
        alone = dying and not self.connection.rota.serving
        self.end(self.burials.death(dying[0]) if alone else ClientClosedError("the client was closed"))

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
        name = getattr(task, "__qualname__", repr(task))
        self.running_tasks[name] += 1
        try:
            await task(*args)
        except Exception as exc:
            # Our own bug, whatever it is: everyone who waits must hear of it.
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
        finally:
            self.running_tasks[name] -= 1

    async def drain_outputs(self) -> None:
        """The output drain: reads the output socket until it is empty at each wake-up, decodes, hands over."""
        try:
            with self._drain_scope:
                while True:
                    self.receive(await self.endpoints.outputs.drain())
        finally:
            self._drained.set()

    async def stop_drain(self) -> None:
        """End the output drain; whoever calls it reads on. Cancelling its wait for readiness loses no message.

        Cancellation: safe.
        """
        self._drain_scope.cancel()
        await self._drained.wait()

    def resume_drain(self) -> None:
        """Start the output drain again, which :meth:`stop_drain` has ended."""
        self._drain_scope, self._drained = anyio.CancelScope(), anyio.Event()
        self.tasks.start_soon(self.own, self.drain_outputs)

    def receive(self, messages: list[Message]) -> None:
        """Decode what came over the output socket and hand it over."""
        self.received_s = now_s = anyio.current_time()
        last_heard_s, stepped = self.liveness.last_heard_s, self.liveness.stepped
        receive = self.connection.receive
        for frames in messages:
            event = receive(frames)
            if isinstance(event, OutputBatch):
                rank = event.engine_index
                if rank in last_heard_s:
                    stepped(rank, event.scheduler_stats, now_s)
                if self.cause is None:
                    self.feed.send_nowait(event)
            elif isinstance(event, UtilityReply):
                rank = event.rank
                if self.in_order and self.cause is None:
                    self.feed.send_nowait(event)
                else:
                    self.connection.utilities.resolve(rank, event.output)
            else:
                self._take_event(event)
                continue
            if rank in last_heard_s:  # it is what the engine says
                last_heard_s[rank] = now_s
        if warnings := self.connection.dialects.warnings:
            for warning in warnings:
                _logger.warning("%s", warning)
            warnings.clear()

    def _take_event(self, event: DeadSentinel | MalformedMessage | Notification) -> None:
        if isinstance(event, DeadSentinel):
            self.liveness.sentinel()
        elif isinstance(event, MalformedMessage):
            self._messages_dropped += 1
            if is_worth_a_line(self._messages_dropped):
                total = self._messages_dropped
                _logger.warning("dropped message %d of an engine that cannot be decoded: %s", total, event.error)
        else:
            if isinstance(event, FaultStatus):
                self.faults.told(event)
            self.notifications.take(event)

    def take_over(self, engine: SupervisedEngine) -> None:
        """Watch a started engine process from now on; whoever stops the session ends it."""
        self.engines[engine.rank] = engine
        self._unwatched[engine.rank] = anyio.Event()
        self.tasks.start_soon(self.own, self._supervise, engine)

    async def wait_unwatched(self, engine: SupervisedEngine) -> None:
        """Wait until the task that watches the process has ended: with the process, or before it (``cause`` is set)."""
        await self._unwatched[engine.rank].wait()

    async def _supervise(self, engine: SupervisedEngine) -> None:
        """Watch one engine process to its end, which, once it was ready, is the end of its rank."""
        try:
            await engine.supervise()
        finally:
            self._unwatched[engine.rank].set()
        if self.is_ready:
            self.burials.bury(engine.rank)


def _nothing() -> None:
    """Nobody waits for room."""
