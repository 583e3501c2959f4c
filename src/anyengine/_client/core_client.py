"""``EngineCoreClient``: engine-core requests and output batches, one level above the wire.

Owns the public low-level client (vLLM: ``AsyncMPClient``) and the sending of commands. Knows nothing of text:
:mod:`.client` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Literal, Self

import anyio

from anyengine._process.status import Status
from anyengine._protocol import Frames, OutputConsumer, UtilityReply
from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    engine_identity,
)
from anyengine.config import CommandEngine, EmbeddedEngine, EngineSettings, VLLMEngine
from anyengine.exceptions import ClientClosedError, EngineDeadError, OutputProcessingError

from .lifecycle import open_session
from .session import ClientState, Notification, Session, SessionSettings

__all__ = ["EngineCoreClient", "OutputBatches"]


class _Batch:
    """The consumer of every request of a low-level client: collects what belongs to live requests."""

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []

    def push(self, output: EngineCoreOutput) -> None:
        self.outputs.append(output)

    def fail(self, error: BaseException) -> None:
        """Nothing to do: whoever iterates the batches gets the error."""


class OutputBatches:
    """An asynchronous iterator over the output batches of a client. It never ends by itself; it raises what ended
    the client."""

    def __init__(self, core: EngineCoreClient) -> None:
        self._core = core

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineCoreOutputs:
        return await self._core.receive_outputs()


class EngineCoreClient:
    """One client of one engine core, in one task group.

    Use it as ``async with EngineCoreClient(...) as core:``. Construction touches no event loop. The output drain runs
    before the block's first statement; everything has ended before the statement after the block. Entering again starts
    afresh.

    Args:
        engine: what to start; the embedded engine with its default model if ``None``.
        startup_timeout_s: how long the engine may take to become ready.
        shutdown_grace_s: how long it may take to stop after SIGTERM, before SIGKILL. ``None``: 5 s, and 20 s for vLLM,
            which has workers to end.
        on_death: ``"report"`` leaves the block running when the engine dies (calls raise, :meth:`wait_dead` returns);
            ``"cancel"`` cancels the block after all waiters have been told, and raises the cause from it.
        on_progress: called with each start-up status of the engine.
        on_notification: called, in a task of the session, with each EEP notification and fault status.
    """

    def __init__(
        self,
        engine: EngineSettings | None = None,
        *,
        startup_timeout_s: float = 600.0,
        shutdown_grace_s: float | None = None,
        on_death: Literal["report", "cancel"] = "report",
        on_progress: Callable[[Status], None] | None = None,
        on_notification: Callable[[Notification], Awaitable[None]] | None = None,
    ) -> None:
        if on_death not in ("report", "cancel"):
            raise ValueError(f"on_death={on_death!r} must be 'report' or 'cancel'")
        self._settings = SessionSettings(
            engine=EmbeddedEngine() if engine is None else engine,
            startup_timeout_s=startup_timeout_s,
            shutdown_grace_s=_default_grace_s(engine) if shutdown_grace_s is None else shutdown_grace_s,
            on_death=on_death,
            on_progress=on_progress,
            on_notification=on_notification,
        )
        self._batch = _Batch()
        self._session: Session | None = None
        self._context: AbstractAsyncContextManager[Session] | None = None

    async def __aenter__(self) -> Self:
        """Start the engine and wait until it is ready.

        Raises:
            EngineStartupError: it did not become ready; the error has the child's own exception.

        Cancellation: the engine is gone before it propagates.
        """
        if self._context is not None:
            raise RuntimeError("this client is in use already; make another one for another block")
        self._context = context = open_session(self._settings)
        try:
            self._session = await context.__aenter__()
        except BaseException:
            self._context = None
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        context, self._context = self._context, None
        assert context is not None
        return await context.__aexit__(exc_type, exc, traceback)  # noqa: ASYNC102 - the session shields what must not be cut

    # ------------------------------------------------------------------ requests

    def add(self, request: EngineCoreRequest, consumer: OutputConsumer | None = None) -> None:
        """Register and send one request, in one step. Its outputs appear in :meth:`outputs`, or go to ``consumer``.

        Raises:
            EncodeError: a value cannot be encoded; nothing was sent and nothing is registered.
            RequestRejected: the engine would not survive the request, or answer nonsense; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
            LocalProtocolError: the request id is alive already, or was aborted (use each id once).
        """
        session = self.usable_session()
        frames = session.connection.add(request, 0, self._batch if consumer is None else consumer)
        try:
            self._send(session, 0, frames)
        except BaseException:
            session.connection.requests.close(request.request_id)
            raise

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests by wire id. Synchronous: it may stand in a ``finally``. Ids that are not alive are ignored.

        No output follows. Never raises for a dead engine: there is nothing left to abort then.

        Raises:
            RequestRejected: an id is not a str; nothing has changed.
            WrongLoopError: called from another thread than the one that entered the client; nothing has changed.
        """
        session = self._session
        if session is None or session.state is ClientState.CLOSED or not hasattr(session, "connection"):
            return
        session.check_thread()
        for rank, frames in session.connection.abort(request_ids):
            # Unreachable: its connection is gone, and everything it ran with it; the supervisor says why.
            with suppress(PeerUnreachable):
                session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])

    def outputs(self) -> OutputBatches:
        """Iterate over the output batches, in the order in which the engine sent them: :meth:`receive_outputs`,
        repeated."""
        return OutputBatches(self)

    async def receive_outputs(self) -> EngineCoreOutputs:
        """The next output batch; late outputs of aborted requests are left out. One task calls it at a time.

        Raises:
            EngineDeadError: after everything that was received before the end; again on every further call.

        Cancellation: loses nothing by a cancel scope; a native ``Task.cancel()`` may lose the one batch that was just
        being handed to the task.
        """
        session = self.session
        if session.cause is None:
            session.check_thread()
        try:
            item = await session.stream.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            assert session.cause is not None
            raise session.cause.for_waiter() from None
        if isinstance(item, EngineDeadError):
            raise item.for_waiter()
        assert not isinstance(item, UtilityReply)  # those are resolved as they arrive
        self._batch.outputs = []
        for entry, exc in session.connection.requests.dispatch(item.outputs):
            self.abort(entry.request_id)  # a consumer of the caller's own failed: rule 5
            error = OutputProcessingError(f"cannot take an output of request {entry.request_id!r}: {exc!r}")
            error.__cause__ = exc
            entry.consumer.fail(error)
        item.outputs = self._batch.outputs
        return item

    # ----------------------------------------------------------------- utilities

    async def utility(self, method: str, *args: Any, unchecked: bool = False) -> Any:
        """Call a named method of the engine, between two steps of its main loop, and return its result as plain data.

        It is a fence: the engine has taken every request and abort sent before, in order. Methods that would end the
        engine, or silence it, are refused, and so are those that its release does not have. ``unchecked`` sends any
        call: for engines with methods of their own, and for those who know what it does.

        Raises:
            UtilityRejected: the engine has no such method, or would not survive the call; nothing was sent.
            UtilityError: the engine refused, or the method failed.
            EncodeError: an argument cannot be encoded; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: the call is forgotten and its late reply dropped; the engine may still carry it out.
        """
        session = self.usable_session()
        done = anyio.Event()
        call, frames = session.connection.utility(method, args, 0, done.set, unchecked=unchecked)
        try:
            self._send(session, 0, frames)
            await done.wait()
        finally:
            session.connection.utilities.forget(call.call_id)
        if call.error is not None:
            raise call.error
        return call.value

    def utility_arity(self, method: str) -> int | None:
        """How many arguments ``method`` takes at most in the engine's release; ``None`` if it is not known there."""
        return self.session.connection.utility_arity(method, 0)

    # --------------------------------------------------------------------- state

    @property
    def state(self) -> ClientState:
        """Where the client is in its life."""
        return ClientState.CREATED if self._session is None else self._session.state

    @property
    def registrations(self) -> dict[int, EngineCoreReadyResponse | None]:
        """What each rank reported about itself when it became ready."""
        return dict(self.session.registrations)

    @property
    def model_dir(self) -> str | None:
        """The local directory with the model's tokenizer and configuration, if the engine told."""
        session = self.session
        engine = self._settings.engine
        configured = engine.model_dir if isinstance(engine, CommandEngine | VLLMEngine) else None
        return configured or session.engines[0].model_dir

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the session ends, and return why.

        Cancellation: safe.
        """
        session = self.session
        if session.cause is None:
            session.check_thread()
        await session.ended.wait()
        assert session.cause is not None
        return session.cause.for_waiter()

    def statistics(self) -> dict[str, int]:
        """Counters of this session: requests and calls in flight, outputs and replies that came too late, and so on."""
        session = self.session
        connection = session.connection
        return {
            "requests_in_flight": len(connection.requests),
            "utility_calls_in_flight": len(connection.utilities),
            "late_outputs": connection.requests.late_outputs,
            "late_utility_replies": connection.utilities.late_replies,
            "malformed_messages": connection.malformed_messages,
            "notification_failures": session.notification_failures,
        }

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

    def _send(self, session: Session, rank: int, frames: Frames) -> None:
        try:
            session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable as exc:
            # Its process may still be on its way out: what everyone will be told is told here already.
            raise session.engines[rank].death("its input connection is gone") from exc


def _default_grace_s(engine: EngineSettings | None) -> float:
    return 20.0 if isinstance(engine, VLLMEngine) else 5.0
