"""``InputSession``: a conversation with the engine in one request, whose prompt is sent in parts.

Owns the sending of the parts and the iteration over what is answered to them. Each part continues the text so far, with
the answers to those before, so nothing is computed twice. There is no task behind it.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import AsyncIterable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import msgspec

from anyengine._client.inputs.prompts import Embeddings, Prompt
from anyengine._client.inputs.request_fields import RequestFields
from anyengine._client.session.wakeup import Parker, make_parker
from anyengine._rules import reject
from anyengine._wire import EngineCoreRequest
from anyengine.exceptions import EngineError, OutputProcessingError, RequestError
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind, SamplingParams

from .completion import Completion
from .desk import RequestDesk
from .session_consumer import SessionConsumer
from .state import RequestState

__all__ = ["InputSession", "StreamingInput"]


class StreamingInput(msgspec.Struct, frozen=True):
    """A part of a prompt, with parameters of its own where they differ from the session's."""

    prompt: Prompt
    sampling_params: SamplingParams | None = None


class InputSession:
    """Send with :meth:`send` (or :meth:`feed`), iterate over the outputs, use it as ``async with``: leaving aborts what
    has not ended.

    Each part is answered on its own: its items end with one that has a ``finish_reason``, and ``finished`` is true in
    the last item of all, if :meth:`end` was called before it was taken. A part that is sent before the former one has
    been answered waits in the engine. One task sends and one iterates.
    """

    def __init__(
        self, desk: Callable[[], RequestDesk], params: SamplingParams, label: str | None, fields: RequestFields
    ) -> None:
        _check(params)
        self._find_desk = desk
        self._desk: RequestDesk | None = None
        self._params, self._label, self._fields = params, label, fields
        self._consumer: SessionConsumer | None = None
        self._first: EngineCoreRequest | None = None
        self._rank = 0
        self._answers: deque[Completion] = deque()
        self._num_tokens = 0
        self._sending = anyio.Lock()
        self._parker: Parker | None = None  # made at the first use, in the client's loop
        self._closed = False
        self._busy = False

    @property
    def request_id(self) -> str | None:
        """The caller's label, or the one the client made; ``None`` before the first part is sent."""
        return self._label

    @property
    def wire_id(self) -> str | None:
        """Its id on the wire, the same for all parts; ``None`` before the first part is sent."""
        return None if self._first is None else self._first.request_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close_nowait()

    def close_nowait(self) -> None:
        """Leave: abort what the engine still has. Synchronous, idempotent."""
        self._closed = True
        self._abort()
        self._wake()

    def _abort(self) -> None:
        if self._first is not None and self._consumer is not None and not self._consumer.over:
            assert self._desk is not None
            self._desk.core.abort(self._first.request_id)

    def _wake(self) -> None:
        if self._parker is not None:
            self._parker.wake()

    def __del__(self) -> None:
        first, consumer = getattr(self, "_first", None), getattr(self, "_consumer", None)
        if first is not None and consumer is not None and not (self._closed or consumer.over):
            # A collection can run in another thread or in the middle of a send: only leave a note for the session.
            assert self._desk is not None and self._parker is not None
            self._desk.dropped.put(RequestState(first.request_id, self._label or "", self._parker))
            warnings.warn(
                f"the input session {self._label!r} was dropped before it had ended; it is aborted. Use it as "
                "`async with client.input_session(...) as session`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ---------------------------------------------------------------------- sending

    async def send(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Send a part of the prompt; returns when it is sent.

        Raises:
            RequestRejected: bad input, or more than the model's length; nothing was sent.
            OverloadedError, EngineAsleepError: no request is taken now; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
            ClosedResourceError: the session has ended.

        Cancellation: the part is not sent; the session goes on.
        """
        params = sampling_params or self._params
        _check(params)
        async with self._sending:
            self._check_open()
            desk = self._desk or self._find_desk()
            ticket = desk.ticket(prompt, self._label, num_seqs=0 if self._first is not None else 1)
            try:
                if self._first is None:
                    self._fields = desk.settled(self._fields)
                prepared = await desk.prepare(ticket, prompt, params, self._fields)
                self._check_open()
                if ticket.aborted:
                    raise anyio.ClosedResourceError
                self._put(desk, prepared, params)
            finally:
                ticket.close()

    async def feed(self, parts: AsyncIterable[Prompt | StreamingInput]) -> None:
        """Send each of ``parts`` as it comes, then :meth:`end`. What ``parts`` raises is raised as it is.

        Raises, Cancellation: see :meth:`send`.
        """
        async for part in parts:
            one = part if isinstance(part, StreamingInput) else StreamingInput(part)
            await self.send(one.prompt, one.sampling_params)
        self.end()

    def end(self) -> None:
        """No part follows: the session ends with the answer to the last one. Synchronous, idempotent.

        Raises:
            EngineDeadError: the engine died, or the client is closed.
        """
        consumer = self._consumer
        if consumer is None or self._first is None:
            self._closed = True
            self._wake()
        elif not (consumer.closing or consumer.over):
            assert self._desk is not None
            last = msgspec.structs.replace(self._first, prompt_token_ids=[0], mm_features=None, resumable=False)
            self._desk.core.add_part(last, self._rank)
            consumer.close()

    def _check_open(self) -> None:
        consumer = self._consumer
        if consumer is not None and consumer.error is not None:
            raise self._own(consumer.error)
        if self._closed or (consumer is not None and (consumer.closing or consumer.over)):
            raise anyio.ClosedResourceError

    def _put(self, desk: RequestDesk, prompt: Sequence[int] | Embeddings, params: SamplingParams) -> None:
        if isinstance(prompt, Embeddings):
            reject("prompt", "embeddings", "cannot be a part of a prompt", "give text or token ids")
        request = desk.builder.build(prompt, params, self._label, self._fields)
        room = desk.builder.limits.max_model_len - self._num_tokens - sum(one.state.num_tokens for one in self._answers)
        if len(prompt) >= room:
            reject("prompt", len(prompt), f"tokens are too many: the session has room for {room - 1}", "end it")
        request.resumable = True
        if self._first is None or self._consumer is None:
            parker = self._make_parker()
            answer = desk.completion(request, prompt, params, self._fields, parker)  # or nothing has happened
            self._desk, self._first, self._label = desk, request, request.external_req_id
            requests = desk.core.session.connection.requests
            keep_open, forget = (
                partial(requests.keep_open, request.request_id),
                partial(requests.close, request.request_id),
            )
            self._consumer = consumer = SessionConsumer(parker, keep_open, forget)  # does not know this object
            try:
                self._rank = desk.core.add(request, consumer)
            except BaseException:
                self._first = self._consumer = None
                _settle(answer)
                raise
            keep_open(True)
        else:
            consumer = self._consumer
            request.request_id = self._first.request_id
            answer = desk.completion(request, prompt, params, self._fields, consumer.parker)
            try:
                desk.core.add_part(request, self._rank)
            except BaseException:
                _settle(answer)
                raise
        answer.state.rank = self._rank
        self._num_tokens += len(prompt)
        consumer.add(answer.state)
        self._answers.append(answer)
        self._wake()  # who iterates may be waiting for a first part

    def _make_parker(self) -> Parker:
        if self._parker is None:
            self._parker = make_parker()
        return self._parker

    # -------------------------------------------------------------------- iteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, of the oldest part that has not been answered to its end.

        Raises:
            StopAsyncIteration: the session has ended, or was left.
            RequestFailed: the engine ended it with an error.
            OutputProcessingError: its text cannot be made; the session is aborted.
            EngineDeadError: the engine died, or the client is closed.
            BusyResourceError: another task is iterating.

        Cancellation: loses nothing; the session goes on.
        """
        if self._busy:
            raise anyio.BusyResourceError("iterating over")
        self._busy = True
        try:
            while (answer := self._ready()) is None:
                await self._wait()
        finally:
            self._busy = False
        return self._take(answer)

    def _ready(self) -> Completion | None:
        """The answer that has something to take, if one has."""
        consumer = self._consumer
        if self._answers:
            state = self._answers[0].state
            return self._answers[0] if state.ended or state.readable else None
        if consumer is not None and consumer.error is not None:
            raise self._own(consumer.error)
        if self._closed or (consumer is not None and consumer.over):
            raise StopAsyncIteration
        return None

    async def _wait(self) -> None:
        if self._consumer is not None:
            await self._consumer.parker.park()
            return
        desk = self._find_desk()  # no request is in flight that could bring the news of the client's end
        desk.check_usable()
        parker = self._make_parker()
        desk.audience.add(parker)
        try:
            await parker.park()
        finally:
            desk.audience.discard(parker)

    def _take(self, answer: Completion) -> RequestOutput:
        state, consumer = answer.state, self._consumer
        assert consumer is not None
        if state.error is not None and not state.token_ids:
            consumer.error = consumer.error or state.error
            self._answers.clear()
            raise self._own(state.error)
        is_last = consumer.over and len(self._answers) == 1
        try:
            output = answer.take(0 if is_last else 1)
        except Exception as exc:
            raise self._spoilt(answer, exc) from exc
        if answer.over:
            self._answers.popleft()
            self._num_tokens += output.num_output_tokens
        return output

    def _spoilt(self, answer: Completion, exc: Exception) -> OutputProcessingError:
        """Rule 5: trouble with this session's text is this session's error; it is aborted, the others go on."""
        assert self._consumer is not None
        self._abort()
        what = f"cannot process the output of input session {self._label!r}: {exc!r}"
        error = OutputProcessingError(what, request_id=self._label)
        error.__cause__ = exc
        error.partial = answer.snapshot()
        self._consumer.error = error
        self._answers.clear()
        return error

    def _own(self, error: EngineError) -> EngineError:
        own = error.for_waiter()
        if isinstance(own, RequestError):
            own.request_id = self._label
        return own


def _settle(answer: Completion) -> None:
    """It was not sent."""
    assert answer.state.account is not None
    answer.state.account.settle()


def _check(params: SamplingParams) -> None:
    """Refuse what an engine cannot do with a prompt in parts.

    Raises:
        RequestRejected: there is something.
    """
    if params.n > 1:
        reject("n", params.n, "is not possible where the prompt comes in parts", "use n=1")
    if params.stop_regex:
        reject("stop_regex", params.stop_regex, "is not possible where the prompt comes in parts", "use stop_token_ids")
    if params.stop:
        reject("stop", params.stop, "is not possible where the prompt comes in parts", "use stop_token_ids")
    if params.output_kind is OutputKind.FINAL_ONLY:
        reject("output_kind", params.output_kind, "has no end to wait for", "use DELTA or CUMULATIVE")
