"""``EngineClient``: text or token ids in, a stream of outputs out.

Owns the public client: what a prompt becomes before it is sent, and the output processor that feeds the request
streams. Sits on :class:`~anyengine._client.core_client.EngineCoreClient`, which owns the session.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from types import TracebackType
from typing import Literal, Self

import anyio

from anyengine._process.status import Status
from anyengine._protocol import UtilityReply
from anyengine._text import Detokenizer, Tokenizer
from anyengine._wire import EngineCoreOutputs
from anyengine.config import CommandEngine, EmbeddedEngine
from anyengine.exceptions import ClientClosedError, EngineDeadError, OutputProcessingError, UtilityError
from anyengine.params import SamplingParams

from .core_client import EngineCoreClient
from .dropped import DroppedRequests
from .request_builder import RequestBuilder
from .request_state import RequestState
from .request_stream import RequestStream
from .session import ClientState, Notification, SessionItem
from .wakeup import make_parker

__all__ = ["EngineClient"]

_SLICE_S = 0.001  # how long the output processor works before it lets other tasks run


class EngineClient:
    """A client of one engine core, in one task group.

    Use it as ``async with EngineClient(...) as client:``, under trio or asyncio. Construction touches no event loop.
    When the block ends, the engine process, every task and every file of the client are gone. Entering again starts
    afresh.

    Args:
        model: what the embedded engine serves: an alias, a local directory, a GGUF file or a Hub id. ``None``: the
        default
            model, SmolLM2-135M-Instruct.
        engine: a fully described engine instead of ``model``.
        startup_timeout_s, shutdown_grace_s, on_death, on_progress, on_notification: see :class:`EngineCoreClient`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EmbeddedEngine | CommandEngine | None = None,
        startup_timeout_s: float = 600.0,
        shutdown_grace_s: float = 5.0,
        on_death: Literal["report", "cancel"] = "report",
        on_progress: Callable[[Status], None] | None = None,
        on_notification: Callable[[Notification], Awaitable[None]] | None = None,
    ) -> None:
        if model is not None and engine is not None:
            raise ValueError(f"give model={model!r} or engine={engine!r}, not both: an engine names its own model")
        if engine is None:
            engine = EmbeddedEngine() if model is None else EmbeddedEngine(model=model)
        self._core = EngineCoreClient(
            engine,
            startup_timeout_s=startup_timeout_s,
            shutdown_grace_s=shutdown_grace_s,
            on_death=on_death,
            on_progress=on_progress,
            on_notification=on_notification,
        )
        self._context: AbstractAsyncContextManager[None] | None = None
        self._dropped: DroppedRequests
        self._builder: RequestBuilder

    async def __aenter__(self) -> Self:
        """Start the engine, wait until it is ready, load its tokenizer.

        Raises:
            EngineStartupError: the engine did not become ready; the error has the child's own exception.

        Cancellation: the engine is gone before it propagates.
        """
        if self._context is not None:
            raise RuntimeError("this client is in use already; make another one for another block")
        self._context = context = self._open()
        try:
            await context.__aenter__()
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

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        async with self._core:
            session = self._core.session
            session.in_order = True
            self._dropped = DroppedRequests()
            try:
                session.tasks.start_soon(session.own, self._process_outputs)
                session.tasks.start_soon(session.own, self._abort_dropped)
                self._builder = await RequestBuilder.load(
                    self._core.model_dir, self._core.registrations.values(), wire_id_prefix=secrets.token_hex(4)
                )
                yield
            finally:
                self._end_requests()
                self._dropped.close()

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """A request stream for ``prompt``: text, or token ids. Inert: nothing is checked or sent before it is used.

        ``request_id`` is a label, echoed in every output; several live requests may share it. Lower ``priority`` runs
        first.
        """
        return RequestStream(self, prompt, sampling_params or SamplingParams(), request_id, priority)

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestStream:
        """:meth:`generate`, and send the request before returning.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: nothing is left in the engine.
        """
        stream = self.generate(prompt, sampling_params, request_id=request_id, priority=priority)
        await stream._submit()
        return stream

    async def abort(self, request_id: str | Iterable[str]) -> int:
        """Abort every live request with one of these labels; how many there were.

        Their streams yield their last item, with ``finish_reason="abort"``, at once; this call returns when the engine
        has confirmed that it holds none of them (a utility call behind the aborts is the fence).

        Raises:
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: the aborts have been sent; only the confirmation is not awaited.
        """
        labels = {request_id} if isinstance(request_id, str) else set(request_id)
        session = self._core.usable_session()
        live = [entry.consumer for entry in session.connection.requests.live.values()]
        states = [state for state in live if isinstance(state, RequestState) and state.label in labels]
        if states:
            self._abort_states(states)
            with suppress(UtilityError):  # a refusal is an answer, and any answer is a fence
                await self._core.utility("is_sleeping")
        return len(states)

    # ----------------------------------------------------------------- utilities

    @property
    def core(self) -> EngineCoreClient:
        """The low-level client: utility calls, death, statistics. Its output batches are consumed here."""
        return self._core

    @property
    def state(self) -> ClientState:
        """Where the client is in its life."""
        return self._core.state

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestRejected: the engine serves a model without one.
        """
        return self._builder.tokenizer

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the client ends, and return why.

        Cancellation: safe.
        """
        return await self._core.wait_dead()

    def statistics(self) -> dict[str, int]:
        """Counters of this session; see :meth:`EngineCoreClient.statistics`."""
        return self._core.statistics()

    # ------------------------------------------------------------ used by streams

    async def _submit(
        self, prompt: str | Sequence[int], params: SamplingParams, label: str | None, priority: int
    ) -> tuple[RequestState, Detokenizer | None, int]:
        """Check, register and send one request. After the tokenizing there is no await: it is owned from then on."""
        self._core.usable_session()
        prompt_ids = await self._builder.encode(prompt)
        request, detokenizer = self._builder.build(prompt_ids, params, label, priority)
        assert request.external_req_id is not None and request.prompt_token_ids is not None
        state = RequestState(request.request_id, request.external_req_id, make_parker())
        self._core.add(request, state)
        return state, detokenizer, len(request.prompt_token_ids)

    def _abort_states(self, states: Sequence[RequestState]) -> None:
        """Abort requests in the engine and give their consumers the final item. Synchronous."""
        self._core.abort([state.wire_id for state in states])
        for state in states:
            state.finish_aborted()

    # -------------------------------------------------------------- session tasks

    async def _process_outputs(self) -> None:
        """The output processor: feeds the request streams, in the order received."""
        stream = self._core.session.stream
        while True:
            try:
                item = await stream.receive()
            except anyio.EndOfStream:
                return
            slice_end_s = time.perf_counter() + _SLICE_S
            while True:
                self._take(item)
                if time.perf_counter() > slice_end_s:
                    break
                try:
                    item = stream.receive_nowait()
                except (anyio.WouldBlock, anyio.EndOfStream):
                    break

    def _take(self, item: SessionItem) -> None:
        connection = self._core.session.connection
        if isinstance(item, EngineCoreOutputs):
            for entry, exc in connection.requests.dispatch(item.outputs):
                self._core.abort([entry.request_id])
                error = OutputProcessingError(f"cannot take an output of request {entry.request_id!r}: {exc!r}")
                error.__cause__ = exc
                entry.consumer.fail(error)
        elif isinstance(item, EngineDeadError):
            self._tell_everyone(item)
        else:
            assert isinstance(item, UtilityReply)
            connection.utilities.resolve(item.rank, item.output)

    def _tell_everyone(self, cause: EngineDeadError) -> None:
        session = self._core.session
        session.connection.requests.fail_all(cause)
        session.connection.utilities.fail_all(cause)
        session.told_everyone()

    async def _abort_dropped(self) -> None:
        with suppress(anyio.ClosedResourceError):
            while True:
                self._abort_states([state for state in await self._dropped.take() if not state.ended])

    def _end_requests(self) -> None:
        """The block is being left: consumers get what has arrived and a final item or error, before anything is torn
        down."""
        session = self._core.session
        while True:
            try:
                self._take(session.stream.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
        live = [entry.consumer for entry in session.connection.requests.live.values()]
        self._abort_states([state for state in live if isinstance(state, RequestState)])
        session.end(ClientClosedError("the client was closed"))
        assert session.cause is not None
        self._tell_everyone(session.cause)
