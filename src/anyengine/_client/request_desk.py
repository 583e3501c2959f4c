"""The requests of one session: sent here, fed here, aborted here.

Owns what happens between a request stream and the engine: registration and sending in one step, the output processor
that feeds the merge buffers in the order received, and everybody being told when the session ends. Knows no streams:
they come to it with a prompt and hold the :class:`RequestState` that it gives them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import anyio

from anyengine._protocol import UtilityReply
from anyengine._text import Detokenizer
from anyengine._wire import EngineCoreRequest, OutputBatch
from anyengine.exceptions import (
    ClientClosedError,
    ClientFailedError,
    EngineDeadError,
    OutputProcessingError,
)
from anyengine.params import PoolingParams, SamplingParams

from .burials import RankDeath
from .completion import Completion
from .core_client import EngineCoreClient
from .dropped import DroppedRequests
from .engine_limits import common_limits
from .fan_out import ChildParker, Completions, children_of
from .prompts import Embeddings, Prompt
from .readiness import EngineReadiness
from .refusals import in_users_words
from .request_builder import RequestBuilder, num_prompt_tokens
from .request_fields import RequestFields
from .request_state import PooledRequestState, RequestState
from .scores import ScoredRequestState, wants_scores
from .session import SessionItem
from .stopping import Stopper
from .wakeup import Parker, make_parker

__all__ = ["RequestDesk"]

_SLICE_S = 0.001  # how long the output processor works before it lets other tasks run


class RequestDesk:
    """See the module. Lifetime: one session. Owning tasks: the session's, which run :meth:`feed_streams` and
    :meth:`abort_dropped`."""

    def __init__(self, core: EngineCoreClient) -> None:
        self._core = core
        self._session = core.session
        self._builder: RequestBuilder | None = None
        self._readiness = EngineReadiness(core)
        self.dropped: DroppedRequests = DroppedRequests()

    def open(self, builder: RequestBuilder) -> None:
        """Take requests from now on, and make them with ``builder``."""
        self._builder = builder

    @property
    def builder(self) -> RequestBuilder:
        """What makes the requests.

        Raises:
            ClientClosedError: the client is not entirely entered yet.
        """
        if self._builder is None:
            raise ClientClosedError("the client has not been entered entirely; use it inside `async with`")
        return self._builder

    # ------------------------------------------------------------- used by streams

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | PoolingParams, label: str | None, fields: RequestFields
    ) -> Sequence[int] | Embeddings:
        """The prompt as it is sent; and everything that must be known of the engine, or loaded by it, before.

        Raises:
            RequestRejected: bad input, or an adapter that the engine cannot load; no request was sent.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: returns at once.
        """
        self._core.usable_session()
        builder = self.builder
        if builder.limits.tasks is None:
            await self._readiness.learn_tasks()
            builder.take_limits(common_limits(self._session))
        prepared = await builder.encode(prompt)
        adapter = fields.get("lora_request")
        if adapter is not None and not self._readiness.has_loaded(adapter):
            # All else is checked before anything is sent; by now the engine may be dead.
            self._core.usable_session()
            request = builder.build(prepared, params, label, fields)
            request.lora_request = None
            with in_users_words(request.external_req_id or ""):
                connection = self._session.connection
                connection.check(request, connection.rota.alive[0])  # it may be dying: loading will tell
            await self._readiness.load(adapter, builder.limits.max_loras)
        await self._core.wait_room()  # behind it there is no other await before the request is sent
        return prepared

    def forget_adapter(self, lora_id: int) -> None:
        """The engine is told to unload it."""
        self._readiness.forget(lora_id)

    def send(
        self,
        prompt: Sequence[int] | Embeddings,
        params: SamplingParams,
        label: str | None,
        fields: RequestFields,
    ) -> Completions:
        """Check, register and send one request, with all its completions. Synchronous: it is owned when this returns.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed; nothing is left in another.
        """
        builder = self.builder
        request = builder.build(prompt, params, label, fields)
        length, decode = num_prompt_tokens(request), builder.token_texts if params.detokenize else None
        parker, woken = make_parker(), deque[int]()
        completions: list[Completion] = []
        children = children_of(request, params.n)
        try:
            for index, child in enumerate(children):
                detokenizer = builder.detokenizer(request, params)
                waker = parker if len(children) == 1 else ChildParker(index, parker, woken)
                state = _make_state(child, waker, params, detokenizer, length)
                self._add(child, state)
                completions.append(Completion(index, state, params, detokenizer, length, decode))
        except BaseException:
            self.abort([completion.state for completion in completions])
            raise
        builder.note_sent(request)
        return Completions(completions, parker, woken)

    def send_pooling(
        self, prompt: Sequence[int] | Embeddings, params: PoolingParams, label: str | None, fields: RequestFields
    ) -> tuple[PooledRequestState, int]:
        """:meth:`send` for a request that generates nothing; where its result will be, and the length of its prompt.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
        """
        request = self.builder.build(prompt, params, label, fields)
        state = PooledRequestState(request.request_id, request.external_req_id or "", make_parker())
        self._add(request, state)
        return state, num_prompt_tokens(request)

    def _add(self, request: EngineCoreRequest, state: RequestState) -> None:
        with in_users_words(state.label):
            state.rank = self._core.add(request, state)

    def abort(self, states: Sequence[RequestState]) -> None:
        """Abort requests in the engine and give their consumers the final item. Synchronous."""
        self._core.abort([state.wire_id for state in states])

    def live(self) -> list[RequestState]:
        """The requests that have not ended."""
        consumers = [entry.consumer for entry in self._session.connection.requests.live.values()]
        return [state for state in consumers if isinstance(state, RequestState)]

    # -------------------------------------------------------------- session tasks

    async def feed_streams(self) -> None:
        """The output processor, and what it owes to those who wait when it ends."""
        session = self._session
        try:
            await session.own(self._process_outputs)
        finally:
            # It may have failed, or been cancelled before the block is left: who waits for outputs must hear of it.
            if isinstance(session.cause, ClientFailedError):
                self._tell_everyone(session.cause)
            elif session.cause is not None:
                self.close()

    async def abort_dropped(self) -> None:
        """Abort the requests whose streams were dropped; ends when the mailbox is closed."""
        with suppress(anyio.ClosedResourceError):
            while True:
                self.abort([state for state in await self.dropped.take() if not state.ended])

    async def _process_outputs(self) -> None:
        stream = self._session.stream
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

    def close(self) -> None:
        """The session ends: consumers get what has arrived and a final item or error, before anything is torn down.
        Synchronous, idempotent."""
        while True:
            try:
                self._take(self._session.stream.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
        self._session.close()
        assert self._session.cause is not None
        self._tell_everyone(self._session.cause)

    def _take(self, item: SessionItem) -> None:
        connection = self._session.connection
        if isinstance(item, OutputBatch):
            for entry, exc in connection.requests.dispatch(item.outputs):
                self._core.abort([entry.request_id])
                if exc is None:
                    continue
                assert isinstance(entry.consumer, RequestState)
                error = OutputProcessingError(
                    f"cannot take an output of request {entry.request_id!r}: {exc!r}", request_id=entry.consumer.label
                )
                error.__cause__ = exc
                entry.consumer.fail(error)
        elif isinstance(item, EngineDeadError):
            self._tell_everyone(item)
        elif isinstance(item, RankDeath):
            connection.requests.fail_all(item.error, item.rank)
            connection.utilities.fail_all(item.error, item.rank)
        else:
            assert isinstance(item, UtilityReply)
            connection.utilities.resolve(item.rank, item.output)

    def _tell_everyone(self, cause: EngineDeadError) -> None:
        session = self._session
        if isinstance(cause, ClientClosedError | ClientFailedError):  # the engine lives, and must not go on with them
            states = self.live()
            if isinstance(cause, ClientFailedError):
                for state in states:
                    state.fail(cause)
            self.abort(states)
        session.connection.requests.fail_all(cause)
        session.connection.utilities.fail_all(cause)
        session.told_everyone()


def _make_state(
    request: EngineCoreRequest,
    parker: Parker,
    params: SamplingParams,
    detokenizer: Detokenizer | None,
    num_prompt_tokens: int,
) -> RequestState:
    """Where the outputs of a request go: the plain one, unless it asks for more than tokens."""
    wire_id, label = request.request_id, request.external_req_id or ""
    if wants_scores(params):
        state: RequestState = ScoredRequestState(wire_id, label, parker, params, num_prompt_tokens)
    else:
        state = RequestState(wire_id, label, parker)
    if params.stream_interval is not None:
        state.interval = params.stream_interval
    if params.stop and detokenizer is not None:
        state.stopper = Stopper(params, detokenizer)
    return state
