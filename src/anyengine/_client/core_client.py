"""``EngineCoreClient``: engine-core requests and output batches, one level above the wire.

Owns the public low-level client (vLLM: ``AsyncMPClient``) and the sending of commands. Knows nothing of text:
:mod:`.client` does.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Literal, Self

from anyengine._process.status import Status
from anyengine._protocol import Balancer, ClientState, Life, OutputConsumer, checked_ids
from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import (
    EngineCoreOutputs,
    EngineCoreRequest,
    engine_identity,
)
from anyengine.config import EngineSettings, InheritedEngine, engine_ranks
from anyengine.exceptions import (
    ClientClosedError,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestRejected,
    WrongLoopError,
)
from anyengine.policies import RestartPolicy

from .engines.engine_info import EngineInfo
from .engines.kv_events import KVEventSources
from .engines.rank_choice import choose_rank
from .requests.output_batches import BatchConsumer, OutputBatches
from .session.closing import ShutdownReport
from .session.events import ClientEvents, EventLog
from .session.lifecycle import open_session
from .session.notifications import Notification
from .session.session import Session
from .session.settings import SessionSettings

__all__ = ["EngineCoreClient"]


class EngineCoreClient(EngineInfo, KVEventSources):
    """One client of one engine core, or of several, in one task group.

    Use it as ``async with EngineCoreClient(...) as core:``. Construction touches no event loop. The output drain runs
    before the block's first statement; everything has ended before the statement after the block. Entering again starts
    afresh.

    Args:
        engine: what to start, or to join; the embedded engine with its default model if ``None``. Several engines of
            one model are the data-parallel ranks of one client: each request goes to one of them, and a rank that dies
            takes only its own with it.
        startup_timeout_s: how long the engine may take to become ready. ``None``: 600 s, or what the environment
            variable ``VLLM_ENGINE_READY_TIMEOUT_S`` says.
        shutdown_grace_s: how long it may take to stop after SIGTERM, before SIGKILL. ``None``: 5 s, and 20 s for vLLM,
            which has workers to end, besides its own ``shutdown_timeout``. Engines that were joined live on.
        drain_timeout_s: how long requests in flight may go on when the block ends normally, before they are aborted;
            new ones are refused meanwhile. Leaving by an exception, or cancelled, does not wait.
        liveness_timeout_s: how long an engine's main loop may leave a call unanswered, in a step of its work for one,
            before it is given up as stuck. ``None``: for ever.
        max_unread_bytes: how much may be on its way to one engine: sent, and not known to have been read. Beyond it,
            :class:`EngineClient` waits before it sends a request, and :meth:`add` refuses.
        on_death: ``"report"`` leaves the block running when the last engine dies (calls raise, :meth:`wait_dead`
            returns); ``"cancel"`` cancels the block after all waiters have been told, and raises the cause from it.
        on_progress: called with each start-up status of the engine.
        on_notification: called, in a task of the session, with each EEP notification and fault status.
        balancer: chooses the rank of a request that names none; an object of this client alone. ``None``:
            :class:`LeastLoaded`, where there is a choice.
        restart: start an engine again that dies once it was ready. ``None``: its death is final. Requests of a
            low-level client always fail with their engine (``in_flight`` is for :class:`EngineClient`).
        strict: raise :class:`ClientFailedError` at the end of a block that left a request, a call or a task behind: a
            bug of ours, for tests to find.
    """

    def __init__(
        self,
        engine: EngineSettings | Sequence[EngineSettings] | None = None,
        *,
        startup_timeout_s: float | None = None,
        shutdown_grace_s: float | None = None,
        drain_timeout_s: float = 0.0,
        liveness_timeout_s: float | None = 300.0,
        max_unread_bytes: int = 256 << 20,
        on_death: Literal["report", "cancel"] = "report",
        on_progress: Callable[[Status], None] | None = None,
        on_notification: Callable[[Notification], Awaitable[None]] | None = None,
        balancer: Balancer | None = None,
        restart: RestartPolicy | None = None,
        strict: bool = False,
    ) -> None:
        self._settings = SessionSettings.of(
            engine,
            startup_timeout_s=startup_timeout_s,
            shutdown_grace_s=shutdown_grace_s,
            drain_timeout_s=drain_timeout_s,
            strict=strict,
            liveness_timeout_s=liveness_timeout_s,
            max_unread_bytes=max_unread_bytes,
            on_death=on_death,
            on_progress=on_progress,
            on_notification=on_notification,
            balancer=balancer,
            restart=restart,
        )
        self._log = EventLog()
        self.life: Life = Life(self._log.publish)
        """Where the client and its ranks are in their lives; told by the session."""
        self._thread_id: int | None = None  # of the block, or the last one
        self._batch = BatchConsumer()
        self._was_entered = False
        self._session: Session | None = None
        self._shutdown_report: ShutdownReport | None = None
        self._context: AbstractAsyncContextManager[Session] | None = None

    async def __aenter__(self) -> Self:
        """Start the engine and wait until it is ready.

        Raises:
            EngineStartupError: it did not become ready; the error has the child's own exception.

        Cancellation: the engine is gone before it propagates.
        """
        if self._context is not None:
            raise RuntimeError("this client is in use already; make another one for another block")
        if self._was_entered and isinstance(self._settings.engines[0], InheritedEngine):
            raise RuntimeError("an InheritedEngine is good for one block, which closes its sockets")
        self._was_entered = True
        self._shutdown_report = None
        self._context = context = open_session(self._settings, self.life, self._note_report)
        self._thread_id = threading.get_ident()
        self.life.begin(engine_ranks(self._settings.engines))
        try:
            self._session = await context.__aenter__()
        except BaseException as exc:
            self.life.closed(exc if isinstance(exc, EngineError) else None)
            self._context = None
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        context, self._context = self._context, None
        assert context is not None
        return await context.__aexit__(exc_type, exc, traceback)  # noqa: ASYNC102 - the session shields what must not be cut

    def _note_report(self, report: ShutdownReport) -> None:
        self._shutdown_report = report

    @property
    def shutdown_report(self) -> ShutdownReport | None:
        """How the last block ended, or its start failed; ``None`` inside a block, and before the first."""
        return self._shutdown_report

    async def aclose(self, *, drain_timeout_s: float | None = None) -> None:
        """Close before the block is left, from any of its tasks: no new requests are taken, those in flight finish
        within ``drain_timeout_s`` (by default: the client's own) or are aborted, the engines are stopped. The block
        goes on, and calls raise :class:`ClientClosedError`; leaving it frees the rest. Idempotent.

        Raises:
            ClientClosedError: the client has not been entered.
            WrongLoopError: called from another thread than the one that entered it.

        Cancellation: what is in flight is aborted at once, and the engines are stopped before it propagates.
        """
        session = self.session
        await session.closing.close(drain_timeout_s, session.close)

    # ------------------------------------------------------------------ requests

    def add(
        self, request: EngineCoreRequest, consumer: OutputConsumer | None = None, *, rank: int | None = None
    ) -> int:
        """Register and send one request, in one step. Its outputs appear in :meth:`outputs`, or go to ``consumer``.

        It goes to ``rank``, or to the request's ``data_parallel_rank``, or else to one that the balancer chooses;
        returns the rank that has it.

        Raises:
            RequestRejected: there is no such rank; or the engine would not survive the request, or answer nonsense.
            EncodeError: a value cannot be encoded; nothing was sent and nothing is registered.
            OverloadedError: the engine reads too slowly; see :meth:`wait_room`.
            EngineDeadError: the engine died, or the client is closed.
            LocalProtocolError: the request id is alive already, or was aborted (use each id once).
        """
        self.usable_session().check_admitting()
        return self.put(request, consumer, rank=rank)

    def put(
        self, request: EngineCoreRequest, consumer: OutputConsumer | None = None, *, rank: int | None = None
    ) -> int:
        """:meth:`add`, for a request that was in flight before: it is taken while others are only being finished."""
        session = self.usable_session()
        connection = session.connection
        wanted, named = (request.data_parallel_rank, "data_parallel_rank") if rank is None else (rank, "rank")
        while True:
            chosen = choose_rank(session, request) if wanted is None else session.check_rank(wanted, named)
            if not session.send_budget.has_room(chosen) and chosen in connection.rota.serving:
                raise _overloaded(chosen, self._settings.max_unread_bytes)
            try:
                frames = connection.add(request, chosen, self._batch if consumer is None else consumer)
            except RequestRejected:
                if chosen in connection.rota.serving:
                    raise
                raise session.burials.death(chosen) from None  # that it has no adapters is no fault of the request's
            sent = False
            try:
                session.send(chosen, frames)
                sent = True
            except EngineDeadError:
                # Nothing was sent: another rank may have it, unless the caller wants this one.
                if wanted is not None or not connection.rota.serving:
                    raise
            finally:
                if not sent:
                    connection.requests.close(request.request_id)
            if sent:
                size_bytes = sum(memoryview(frame).nbytes for frame in frames)
                connection.requests.live[request.request_id].sent_bytes = session.send_budget.charge(chosen, size_bytes)
                return chosen

    def add_part(self, request: EngineCoreRequest, rank: int) -> None:
        """Send a further part of a request that was added as ``resumable``, or, without ``resumable``, that none
        follows. What becomes of the request's entry is the consumer's to say.

        Raises:
            RequestRejected, EncodeError: see :meth:`add`.
            EngineDeadError: the engine died, or the client is closed.
            LocalProtocolError: the request is not alive there.
        """
        session = self.usable_session()
        frames = session.connection.part(request, rank)
        session.send(rank, frames)
        session.send_budget.charge(rank, sum(memoryview(frame).nbytes for frame in frames))

    def tell(self, request: EngineCoreRequest) -> None:
        """Send a request that has no answer (``abort_immediately``), to its ``data_parallel_rank`` or to any.

        Raises: see :meth:`add`.
        """
        session = self.usable_session()
        wanted = request.data_parallel_rank
        rank = choose_rank(session, request) if wanted is None else session.check_rank(wanted, "data_parallel_rank")
        session.send(rank, session.connection.check(request, rank))

    async def wait_room(self) -> None:
        """Wait until an engine has room for a request; see ``max_unread_bytes``. Returns at once in ordinary times.

        Cancellation: safe.
        """
        await self.usable_session().send_budget.wait_room()

    def abort(self, request_ids: str | Iterable[str]) -> tuple[str, ...]:
        """Abort requests by wire id; the ids that were alive. Synchronous: it may stand in a ``finally``.

        No output follows: what the engine still sends is dropped, and counted in ``late_outputs``. An engine that goes
        on although it must have taken the abort is told once more. Never raises for a dead engine: there is nothing
        left to abort then.

        Raises:
            RequestRejected: an id is not a str; nothing has changed.
            WrongLoopError: called from another thread than the one that entered the client; nothing has changed.
        """
        session = self._session
        if session is None or session.is_released or not hasattr(session, "connection"):
            return ()
        session.check_thread()
        connection = session.connection
        ids = checked_ids(request_ids)
        doomed = tuple(request_id for request_id in dict.fromkeys(ids) if request_id in connection.requests.live)
        for rank, frames in connection.abort(doomed):
            # Unreachable: its connection is gone, and everything it ran with it; the supervisor says why.
            with suppress(PeerUnreachable):
                session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        session.on_room()
        return doomed

    def outputs(self) -> OutputBatches:
        """Iterate over the output batches, in the order in which the engine sent them: :meth:`receive_outputs`,
        repeated."""
        return OutputBatches(self.receive_outputs)

    async def receive_outputs(self) -> EngineCoreOutputs:
        """The next output batch; late outputs of aborted requests are left out. One task calls it at a time.

        Raises:
            EngineDeadError: after everything that was received before the end; again on every further call.

        Cancellation: loses nothing.
        """
        session = self.session
        if session.cause is None:
            session.check_thread()
        return await self._batch.receive(session, self.abort)

    # --------------------------------------------------------------------- state

    @property
    def state(self) -> ClientState:
        """Where the client is in its life."""
        return self.life.state

    def events(self) -> ClientEvents:
        """Follow the client's life: first how things stand, then every change of its state or of a rank's, until the
        block has been left. Before the block is entered, it waits for that. Any number may follow, each in a task of
        its own; one that is too slow gets a :class:`CurrentState` in place of what it has missed."""
        return ClientEvents(self._log, self.life.current, self._check_follower)

    def _check_follower(self) -> None:
        if self._context is not None and self._thread_id != threading.get_ident():
            raise WrongLoopError("follow a client in the event loop that entered it")

    async def wait_dead(self, rank: int | None = None) -> EngineDeadError:
        """Wait until the session ends, or until ``rank`` is lost, and return why.

        Cancellation: safe.
        """
        session = self.session
        if session.cause is None:
            session.check_thread()
        if rank is None:
            await session.ended.wait()
            assert session.cause is not None
            return session.cause.for_waiter()
        session.check_rank(rank)
        await session.burials.ended[rank].wait()
        return session.burials.deaths[rank].for_waiter()

    # ------------------------------------------------------------------ internals

    @property
    def session(self) -> Session:
        """The session of the present (or last) block; for :class:`EngineClient`.

        Raises:
            ClientClosedError: the client has not been entered.
        """
        if self._session is None:
            raise ClientClosedError("the client has not been entered; use it inside `async with`")
        return self._session

    def usable_session(self) -> Session:
        """:attr:`session`, if new calls can be made on it.

        Raises:
            EngineDeadError: the engine died, or the client is closed.
            WrongLoopError: called from another thread than the one that entered the client.
        """
        session = self.session
        session.check_usable()
        return session


def _overloaded(rank: int, limit_bytes: int) -> OverloadedError:
    return OverloadedError(
        f"engine {rank} has not read what was sent to it: max_unread_bytes={limit_bytes} are on their way; "
        "wait_room() tells when it has",
        reason="bytes",
    )
