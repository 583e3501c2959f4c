"""The requests of one session: sent here, fed here, aborted here.

Owns what happens between a request stream and the engine: registration and sending in one step, the output processor
that feeds the merge buffers in the order received, and everybody being told when the session ends. Knows no streams:
they come to it with a prompt and hold the :class:`RequestState` that it gives them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import anyio

from anyengine._protocol import UtilityReply
from anyengine._text import Detokenizer
from anyengine._wire import OutputBatch
from anyengine.exceptions import (
    ClientClosedError,
    ClientFailedError,
    EngineDeadError,
    OutputProcessingError,
)
from anyengine.outputs import TokenDecoder
from anyengine.params import PoolingParams, SamplingParams

from .burials import RankDeath
from .core_client import EngineCoreClient
from .dropped import DroppedRequests
from .engine_limits import common_limits
from .prompts import Embeddings, Prompt
from .readiness import EngineReadiness
from .refusals import in_users_words
from .request_builder import RequestBuilder, num_prompt_tokens
from .request_fields import RequestFields
from .request_state import PooledRequestState, RequestState
from .scores import ScoredRequestState, wants_scores
from .session import SessionItem
from .wakeup import make_parker

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
        session = self._core.usable_session()
        builder = self.builder
        if not session.connection.rota.serving:
            await self._core.wait_room()
        if builder.limits.tasks is None:
            await self._readiness.learn_tasks()
            builder.take_limits(common_limits(self._session))
        prepared = await builder.encode(prompt)
        adapter = fields.get("lora_request")
        if adapter is not None and not self._readiness.has_loaded(adapter):
            # All else is checked before anything is sent; by now the engine may be dead.
            self._core.usable_session()
            request, _ = builder.build(prepared, params, label, fields)
            request.lora_request = None
            with in_users_words(request.external_req_id or ""):
                connection = self._session.connection
                ranks = connection.rota.alive or connection.ranks
                connection.check(request, ranks[0])  # it may be dying: loading will tell
            await self._readiness.load(adapter, builder.limits.max_loras)
        await self._core.wait_room()  # behind it there is no other await before the request is sent
        return prepared

    def check_usable(self) -> None:
        """Raise why nothing can be asked of the client any more, if so.

        Raises:
            EngineDeadError: the engine died, or the client is closed.
        """
        self._core.usable_session()

    def forget_adapter(self, lora_id: int) -> None:
        """The engine is told to unload it."""
        self._readiness.forget(lora_id)

    def send(
        self,
        prompt: Sequence[int] | Embeddings,
        params: SamplingParams | PoolingParams,
        label: str | None,
        fields: RequestFields,
    ) -> tuple[RequestState, Detokenizer | None, int]:
        """Check, register and send one request. Synchronous: it is owned when this returns.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
        """
        request, detokenizer = self.builder.build(prompt, params, label, fields)
        assert request.external_req_id is not None
        length = num_prompt_tokens(request)
        state = _make_state(request.request_id, request.external_req_id, params, length)
        with in_users_words(state.label):
            state.rank = self._core.add(request, state)
        self.builder.note_sent(request)
        return state, detokenizer, length

    def token_texts(self) -> TokenDecoder | None:
        """What tells the texts of single tokens, if the model has a tokenizer."""
        return self.builder.token_texts

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
        feed = self._session.feed
        while True:
            try:
                item = await feed.receive()
            except anyio.EndOfStream:
                return
            slice_end_s = time.perf_counter() + _SLICE_S
            while True:
                self._take(item)
                if time.perf_counter() > slice_end_s:
                    break
                try:
                    item = feed.receive_nowait()
                except (anyio.WouldBlock, anyio.EndOfStream):
                    break

    def close(self) -> None:
        """The session ends: consumers get what has arrived and a final item or error, before anything is torn down.
        Synchronous, idempotent."""
        while True:
            try:
                self._take(self._session.feed.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream):
                break
        self._session.close()
        assert self._session.cause is not None
        self._tell_everyone(self._session.cause)

    def _take(self, item: SessionItem) -> None:
        connection = self._session.connection
        if isinstance(item, OutputBatch):
            for entry, exc in connection.requests.dispatch(item.outputs):
                self._core.abort([entry.request_id])
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
    wire_id: str, label: str, params: SamplingParams | PoolingParams, num_prompt_tokens: int
) -> RequestState:
    """Where the outputs of a request with ``params`` go: the plain one, unless it asks for more than tokens."""
    if isinstance(params, PoolingParams):
        return PooledRequestState(wire_id, label, make_parker())
    if wants_scores(params):
        return ScoredRequestState(wire_id, label, make_parker(), params, num_prompt_tokens)
    return RequestState(wire_id, label, make_parker())
