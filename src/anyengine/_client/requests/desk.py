"""The requests of one session: sent here and aborted here.

Owns what happens between a request stream and the engine: admission, registration and sending in one step, the ends
that are asked for (aborts, deadlines, drains) and everybody being told when the session ends. Outputs come through
:mod:`.output_processor`. Knows no streams: they come to it with a prompt and hold the :class:`RequestState` that it
gives them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import anyio

from anyengine._client.core_client import EngineCoreClient
from anyengine._client.engines.engine_limits import common_limits
from anyengine._client.engines.fences import Patience
from anyengine._client.engines.readiness import EngineReadiness
from anyengine._client.inputs.prompts import Embeddings, Prompt, embeddings_bytes
from anyengine._client.inputs.request_builder import RequestBuilder
from anyengine._client.inputs.request_fields import RequestFields
from anyengine._client.inputs.tracing import current_trace_headers
from anyengine._client.session.wakeup import Parker, make_parker
from anyengine._protocol import num_prompt_tokens
from anyengine._wire import EngineCoreRequest
from anyengine.exceptions import (
    ClientClosedError,
    ClientFailedError,
    EngineDeadError,
    RequestTimeout,
)
from anyengine.limiters import Limiter
from anyengine.params import LoRARequest, PoolingParams, SamplingParams
from anyengine.policies import RetryPolicy

from .account import RequestAccount
from .admission import Admission, AdmissionSettings, Ticket
from .charges import Charge, Charges
from .completion import Completion
from .deadlines import Deadlines, Timeouts
from .dropped import DroppedRequests
from .facts import facts_of
from .fan_out import ChildParker, Completions, children_of
from .new_state import make_state
from .output_processor import OutputProcessor
from .refusals import in_users_words
from .resubmission import Resubmissions, state_of
from .session_consumer import SessionConsumer
from .state import PooledRequestState, RequestState
from .stopping import Stopper

__all__ = ["RequestDesk"]


class RequestDesk:
    """See the module. Lifetime: one session. Owning tasks: the session's, which run :meth:`feed_streams`,
    :meth:`abort_dropped` and the timer of :attr:`deadlines`."""

    def __init__(
        self,
        core: EngineCoreClient,
        admission: AdmissionSettings,
        retries: RetryPolicy | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        self.core = core
        self._session = core.session
        self._builder: RequestBuilder | None = None
        self._readiness = EngineReadiness(core)
        self._processor = OutputProcessor(core, self._tell_everyone)
        self.dropped: DroppedRequests = DroppedRequests()
        self.deadlines: Deadlines = Deadlines(self._expire, self._processor.caught_up)
        self.admission: Admission = Admission(self._session, admission)
        self.resubmissions: Resubmissions = Resubmissions(core, self.admission, retries)
        self.request_timeouts: int = 0
        self.account: RequestAccount = RequestAccount()
        self.charges: Charges = Charges(self.account, limiter)
        self.audience: set[Parker] = set()  # of those who wait without a request, and must hear of the session's end
        self._ends_awaited = 0
        self._ends = anyio.Event()
        self._session.on_room = self._look

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

    def ticket(self, prompt: Prompt, label: str | None, *, num_seqs: int = 1, nowait: bool = False) -> Ticket:
        """A ticket for a request with ``prompt``; whoever asks for it closes it."""
        size_bytes = len(prompt) if isinstance(prompt, str) else embeddings_bytes(prompt)
        return self.admission.ticket(label, num_seqs=num_seqs, size_bytes=size_bytes, nowait=nowait)

    async def prepare(
        self,
        ticket: Ticket,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        fields: RequestFields,
    ) -> Sequence[int] | Embeddings:
        """The prompt as it is sent; and everything that must be known of the engine, or loaded by it, before. Returns
        when the request may be sent at once, without another await; or when its ticket is aborted.

        Raises:
            RequestRejected: bad input, or an adapter that the engine cannot load; no request was sent.
            OverloadedError, EngineAsleepError: no request is taken now, and it does not wait.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: returns at once.
        """
        self.core.usable_session()
        builder = self.builder
        await self.admission.enter(ticket)
        if ticket.aborted:
            return ()
        if builder.limits.tasks is None:
            await self._readiness.learn_tasks()
            if isinstance(params, PoolingParams):
                self._readiness.check_asked()  # else the engine would be blamed for what it could not be asked
            builder.take_limits(common_limits(self._session))
        prepared = await builder.encode(prompt, params, fields.get("tokenization_kwargs"))
        adapter = cast("LoRARequest | None", fields.get("lora_request"))  # names are settled
        if adapter is not None and not self._readiness.has_loaded(adapter):
            # All else is checked before anything is sent; by now the engine may be dead.
            self.core.usable_session()
            request = builder.build(prepared, params, ticket.label, fields)
            request.lora_request = None
            with in_users_words(request.external_req_id or ""):
                connection = self._session.connection
                ranks = connection.rota.alive or connection.ranks
                connection.check(request, ranks[0])  # it may be dying: loading will tell
            await self._readiness.load(adapter, builder.limits.max_loras)
        length = prepared.tensor.shape[0] if isinstance(prepared, Embeddings) else _length(prepared)
        length *= ticket.num_seqs  # each completion waits with its own
        await self.admission.clear(ticket, length)
        while adapter is not None and self._lacks(ticket, adapter):
            # While it waited, a rank has come back from a restart, and has none.
            await self._readiness.load(adapter, builder.limits.max_loras)
            await self.admission.clear(ticket, length)
        return prepared

    def _lacks(self, ticket: Ticket, adapter: LoRARequest) -> bool:
        return not ticket.aborted and not self._readiness.is_everywhere(adapter)

    def check_usable(self) -> None:
        """Raise why nothing can be asked of the client any more, if so.

        Raises:
            EngineDeadError: the engine died, or the client is closed.
        """
        self.core.usable_session()

    @property
    def adapters(self) -> EngineReadiness:
        """Which adapters are loaded."""
        return self._readiness

    def settled(self, fields: RequestFields) -> RequestFields:
        """``fields`` with what is meant by an adapter's name, and with the trace context of the calling task where
        none is given.

        Raises:
            RequestRejected: no adapter of that name has been loaded.
        """
        changes: RequestFields = {}
        if isinstance(name := fields.get("lora_request"), str):
            changes["lora_request"] = self._readiness.by_name(name)
        if "trace_headers" not in fields and (headers := current_trace_headers()) is not None:
            changes["trace_headers"] = headers
        return {**fields, **changes} if changes else fields

    def send(
        self,
        prompt: Sequence[int] | Embeddings,
        params: SamplingParams,
        label: str | None,
        fields: RequestFields,
        timeouts: Timeouts | None = None,
        started_s: float = 0.0,
        charge: Charge | None = None,
    ) -> Completions:
        """Check, register and send one request, with all its completions. Synchronous: it is owned when this returns.
        (A prompt that was text has it as an attribute.) ``charge``: on which it goes; ``None``: one of its own.

        Raises:
            RequestRejected: bad input; nothing was sent.
            QuotaExceededError: the limiter refuses it; nothing was sent.
            EngineDeadError: the engine died, or the client is closed; no part of it is left in another.
        """
        request = self.builder.build(prompt, params, label, fields)
        timed = timeouts is not None and timeouts.needs_tokens_timed
        completions = self._completions(request, params, timed=timed)
        states = completions.states
        asked = facts_of(request, prompt, fields)
        account = charge or self.charges.open(request, fields, params.n)
        for state in states:
            state.asked, state.weights, state.account = asked, self._processor.weights, account
        try:
            for child, state in zip(children_of(request, params.n), states, strict=True):
                self._add(child, state, prompt)
        except BaseException:
            if charge is None:
                account.settle()  # first: what is aborted now has used nothing
            self.abort(states)
            raise
        self.builder.note_sent(request)
        if timeouts is not None:
            for state in states:
                self.deadlines.watch(state, timeouts, started_s)
        return completions

    def send_pooling(
        self, prompt: Sequence[int] | Embeddings, params: PoolingParams, label: str | None, fields: RequestFields
    ) -> tuple[PooledRequestState, int]:
        """:meth:`send` for a request that generates nothing: where its result will be, and the length of its prompt.

        Raises:
            RequestRejected, QuotaExceededError, EngineDeadError: see :meth:`send`.
        """
        request = self.builder.build(prompt, params, label, fields)
        state = PooledRequestState(
            request.request_id, request.external_req_id or "", make_parker(), clock=self._processor.clock
        )
        state.asked, state.account = facts_of(request, prompt, fields), self.charges.open(request, fields)
        try:
            self._add(request, state, prompt)
        except BaseException:
            state.account.settle()
            raise
        return state, num_prompt_tokens(request)

    def unsent(self, params: SamplingParams, label: str | None) -> Completions:
        """What becomes of a request whose end was asked for before it was sent."""
        label, wire_id = self.builder.next_ids(label)
        request = EngineCoreRequest(wire_id, None, external_req_id=label)
        completions = self._completions(request, params, timed=False)
        for state in completions.states:
            state.aborted()
        return completions

    def unsent_pooling(self, label: str | None) -> PooledRequestState:
        """:meth:`unsent` for a request that generates nothing."""
        label, wire_id = self.builder.next_ids(label)
        state = PooledRequestState(wire_id, label, make_parker())
        state.aborted()
        return state

    def completion(
        self,
        request: EngineCoreRequest,
        prompt: Sequence[int] | Embeddings,
        params: SamplingParams,
        fields: RequestFields,
        parker: Parker,
    ) -> Completion:
        """Where the one answer to ``request`` goes, which is sent by whoever calls, or its account is settled.

        Raises:
            QuotaExceededError: the limiter refuses it.
        """
        builder, length = self.builder, num_prompt_tokens(request)
        state = make_state(request, parker, params, length, self._processor.clock, timed=False)
        state.asked, state.weights = facts_of(request, prompt, fields), self._processor.weights
        decode = builder.token_texts if params.detokenize else None
        completion = Completion(0, state, params, builder.detokenizer(request, params), length, decode)
        state.account = self.charges.open(request, fields)
        return completion

    def _completions(self, request: EngineCoreRequest, params: SamplingParams, *, timed: bool) -> Completions:
        builder, parker, woken = self.builder, make_parker(), deque[int]()
        length, decode = num_prompt_tokens(request), builder.token_texts if params.detokenize else None
        found: list[Completion] = []
        for index, child in enumerate(children_of(request, params.n)):
            detokenizer = builder.detokenizer(request, params)
            waker = parker if params.n == 1 else ChildParker(index, parker, woken)
            state = make_state(child, waker, params, length, self._processor.clock, timed=timed)
            if (params.stop or params.stop_regex) and detokenizer is not None:
                state.stopper = Stopper(params, detokenizer)
            found.append(Completion(index, state, params, detokenizer, length, decode))
        return Completions(found, parker, woken)

    def _add(self, request: EngineCoreRequest, state: RequestState, prompt: object) -> None:
        with in_users_words(state.label):
            state.rank = self.resubmissions.send(request, state, prompt)

    def abort(self, states: Sequence[RequestState]) -> tuple[str, ...]:
        """Abort requests in the engine and give their consumers the final item; the wire ids of those that were alive.
        Synchronous."""
        return self.core.abort([state.wire_id for state in states]) + self.resubmissions.withdraw(states)

    def live(self) -> list[RequestState]:
        """The requests that have not ended."""
        consumers = [entry.consumer for entry in self._session.connection.requests.live.values()]
        return [*filter(None, map(state_of, consumers)), *self.resubmissions.waiting()]

    def expect_aborts(self) -> None:
        """The engines are about to be asked to end all requests: an abort is a normal end from now on."""
        for state in self.live():
            state.abort_expected = True
        for entry in self._session.connection.requests.live.values():
            if isinstance(entry.consumer, SessionConsumer):
                entry.consumer.expect_abort()

    async def wait_ended(self, states: Sequence[RequestState], patience: Patience) -> None:
        """Wait until all of ``states`` have ended.

        Raises:
            DrainTimeout: some have not in time; it names their ranks.

        Cancellation: safe.
        """
        self._ends_awaited += 1
        try:
            with patience.scope():
                while not all(state.ended for state in states):
                    await self._ends.wait()
        finally:
            self._ends_awaited -= 1
        if ranks := {state.rank for state in states if not state.ended}:
            raise patience.exhausted(ranks, "requests are still in flight; none is aborted")

    def _look(self) -> None:
        """Something has ended, or been read, or died: who waits for that looks again."""
        self.admission.look()
        if self._ends_awaited:
            self._ends.set()
            self._ends = anyio.Event()

    def _expire(self, expired: Sequence[tuple[RequestState, RequestTimeout]]) -> None:
        self.request_timeouts += len(expired)
        for state, error in expired:
            state.fail(error)
        self.abort([state for state, _ in expired])

    # -------------------------------------------------------------- session tasks

    async def feed_streams(self) -> None:
        """The output processor, and what it owes to those who wait when it ends."""
        session = self._session
        try:
            await session.own(self._processor.run)
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

    def close(self) -> None:
        """The session ends: consumers get what has arrived and a final item or error, before anything is torn down.
        Synchronous, idempotent."""
        self._processor.finish()
        self._session.close()
        assert self._session.cause is not None
        self._tell_everyone(self._session.cause)

    def _tell_everyone(self, cause: EngineDeadError) -> None:
        session = self._session
        if isinstance(cause, ClientClosedError | ClientFailedError):  # the engine lives, and must not go on with them
            states = self.live()
            if isinstance(cause, ClientFailedError):
                for state in states:
                    state.fail(cause)
            self.abort(states)
        self.resubmissions.end(cause)
        session.connection.requests.fail_all(cause)
        session.connection.utilities.fail_all(cause)
        for parker in tuple(self.audience):
            parker.wake()
        session.told_everyone()
        self._look()  # who waits for ends looked when the session ended, which was before these


def _length(prompt: object) -> int:
    """How many tokens it has, if it can be told: what it is made of is checked later."""
    return len(prompt) if isinstance(prompt, Sequence) else 0
