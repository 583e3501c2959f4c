"""``RequestStream``: what a consumer iterates.

Owns one request's life as its consumer sees it: inert until first used, then a sequence of outputs with exactly one
final item or one error. Every way out of it is the same abort, exactly once. No scope and no task is open across an
item.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self

import anyio

from anyengine._client.inputs.prompts import Embeddings, Prompt
from anyengine._client.inputs.request_fields import RequestFields
from anyengine._client.session.session import Session
from anyengine._client.session.wakeup import EndBell
from anyengine.exceptions import EngineDeadError, EngineError, OutputProcessingError, RequestError
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind, SamplingParams

from .admission import Ticket
from .charges import Charge
from .completion import Completion
from .deadlines import Timeouts
from .desk import RequestDesk
from .fan_out import Completions
from .stream_views import StreamViews

__all__ = ["RequestStream"]


class RequestStream(StreamViews):
    """The outputs of one request: an asynchronous iterator, and an asynchronous context manager.

    Nothing happens until it is entered, or iterated for the first time: then it is tokenized, checked, registered and
    sent. Use ``async with client.generate(...) as stream`` where leaving must abort promptly whatever happens; a plain
    ``async for`` aborts on cancellation at once, and after ``break`` when the stream is dropped. One task iterates at a
    time.
    """

    def __init__(
        self,
        desk: Callable[[], RequestDesk],
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None,
        fields: RequestFields,
        *,
        limits_s: Mapping[str, float | None] = MappingProxyType({}),
        nowait: bool = False,
        on_end: Callable[[], None] | None = None,
        charge: Charge | None = None,
    ) -> None:
        self._find_desk = desk
        self._desk: RequestDesk | None = None  # of the session that the request was sent in
        self._session: Session | None = None
        self._prompt = prompt
        self._params = params
        self._fields = fields
        self._limits_s, self._nowait = limits_s, nowait
        self._on_end, self._charge = on_end, charge
        self._label = request_id
        self._ticket: Ticket | None = None
        self._abort_asked = False
        self._completions: Completions | None = None
        self._gather = params.output_kind is OutputKind.FINAL_ONLY
        self._one: Completion | None = None  # the only one, while its items are taken as they come
        self._owned_by_block = self._busy = self._over = False
        self._error: EngineError | None = None

    @property
    def request_id(self) -> str | None:
        """The caller's label, or the one the client made; ``None`` before the request is sent."""
        return self._label

    @property
    def rank(self) -> int | None:
        """The rank that runs it, or its first completion; ``None`` before the request is sent."""
        return None if self._completions is None else self._completions.states[0].rank

    @property
    def attempts(self) -> int:
        """How often the request, or its first completion, has been sent: more than once after a retry or a replay."""
        return 0 if self._completions is None else self._completions.states[0].attempts

    @property
    def wire_id(self) -> str | None:
        """Its own id on the wire, or its first completion's; a retry or a replay changes it; ``None``: not sent yet."""
        return None if self._completions is None else self._completions.states[0].wire_id

    @property
    def wire_ids(self) -> tuple[str, ...]:
        """:attr:`wire_id` of each of its completions; none before the request is sent."""
        return () if self._completions is None else tuple(state.wire_id for state in self._completions.states)

    @property
    def is_over(self) -> bool:
        """Whether its last output or its error was delivered, or it was closed: nothing of it will be in flight."""
        return self._over

    @property
    def output_kind(self) -> OutputKind:
        """What each of its items holds."""
        return self._params.output_kind

    @property
    def lag(self) -> int:
        """How many tokens have arrived and have not been taken: they wait in one merged piece."""
        return 0 if self._completions is None else self._completions.lag

    # ------------------------------------------------------------------- context

    async def __aenter__(self) -> Self:
        """Send the request, if it has not been sent.

        Raises: see :meth:`start`.

        Cancellation: nothing is left in the engine.
        """
        await self.start()
        self._owned_by_block = True
        return self

    async def start(self) -> Completions:
        """Send the request, if it has not been sent; what :meth:`__aenter__` and the first item do. For the client.

        Raises:
            RequestRejected: bad input; nothing was sent.
            OverloadedError: an admission limit is reached, or a quota; nothing was sent.
            EngineAsleepError: the engine is paused or asleep; nothing was sent.
            RequestTimeout: one of its time limits passed before it could be sent.
            EngineDeadError: the engine died, or the client is closed.
            ClosedResourceError: the stream was closed before.

        Cancellation: nothing is left in the engine.
        """
        if (sent := self._sent_or_closed()) is not None:
            return sent
        desk = self._find_desk()
        num_seqs = self._params.n
        self._ticket = ticket = desk.ticket(self._prompt, self._label, num_seqs=num_seqs, nowait=self._nowait)
        try:
            self._fields = desk.settled(self._fields)
            timeouts = Timeouts.of(**self._limits_s) if self._limits_s else None
            started_s = 0.0
            if timeouts is None:
                prepared = await desk.prepare(ticket, self._prompt, self._params, self._fields)
            else:
                started_s = anyio.current_time()
                prepared = await self._prepare_in_time(desk, ticket, timeouts, started_s)
            if (sent := self._sent_or_closed()) is not None:  # by another task, meanwhile
                return sent
            aborted = self._abort_asked or ticket.aborted
            return self._send(desk, prepared, timeouts, started_s, aborted=aborted)
        finally:
            self._ticket = None
            ticket.close()

    def _sent_or_closed(self) -> Completions | None:
        if self._completions is None and self._over:
            raise anyio.ClosedResourceError
        return self._completions

    async def _prepare_in_time(
        self, desk: RequestDesk, ticket: Ticket, timeouts: Timeouts, started_s: float
    ) -> Sequence[int] | Embeddings:
        limit_s, name = timeouts.before_sending_s()
        with anyio.CancelScope(deadline=started_s + limit_s):
            return await desk.prepare(ticket, self._prompt, self._params, self._fields)
        desk.request_timeouts += 1
        raise timeouts.expired(name, self._label, sent=False)

    def _send(
        self,
        desk: RequestDesk,
        prepared: Sequence[int] | Embeddings,
        timeouts: Timeouts | None,
        started_s: float,
        *,
        aborted: bool,
    ) -> Completions:
        if aborted:
            completions = desk.unsent(self._params, self._label)
        else:
            asked = (prepared, self._params, self._label, self._fields)
            completions = desk.send(*asked, timeouts, started_s, self._charge)
        self._completions = completions
        self._desk, self._session = desk, desk.core.session
        self._label = completions.states[0].label
        self._set_gathering(self._gather)
        if self._on_end is not None:
            for state in completions.states:
                state.parker = EndBell(completions, self._on_end)
            if completions.ended:
                self._on_end()
        self._prompt, self._fields = (), {}  # sent: not ours to keep
        return completions

    def _set_gathering(self, gather: bool) -> None:
        self._gather, self._one = gather, None
        if self._completions is not None and not gather:
            self._one, self._park = self._completions.only, self._completions.parker.park

    async def final(self) -> RequestOutput:
        """Everything that the request gives, once it has ended: of all its completions, and whatever was taken before.

        Raises: see :meth:`__anext__`; ``ClosedResourceError``: the stream was closed before its end.

        Cancellation: see :meth:`__anext__`.
        """
        if not self._over:
            if self._busy:  # whoever iterates gets what it has asked for
                raise anyio.BusyResourceError("iterating over")
            gathered = self._gather
            self._set_gathering(True)
            try:
                return await anext(self)
            except BaseException:
                self._set_gathering(gathered)
                raise
        if self._error is not None:
            raise self._own(self._error)
        if self._completions is None or not self._completions.all_taken:
            raise anyio.ClosedResourceError
        return self._completions.snapshot()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close_nowait()

    async def aclose(self) -> None:
        """Leave the stream: abort the request if it is still running. Idempotent.

        Cancellation: the abort is sent in any case.
        """
        self.close_nowait()
        await anyio.lowlevel.checkpoint()

    def close_nowait(self) -> None:
        """:meth:`aclose` without a checkpoint. Synchronous: it may stand in a ``finally``."""
        if self._completions is not None:
            self._abort_running(self._completions)
        elif self._ticket is not None:
            self._ticket.abort()
        self._over = True  # last: in another thread the abort is refused, and the stream is what it was

    def abort(self) -> None:
        """Ask for the end: the request is aborted, and the stream yields its last item, with ``finish_reason="abort"``
        and everything that has arrived. One that has not been sent never will be.

        Synchronous. Completions that have ended stay as they are; does nothing once all have.
        """
        if self._completions is None:
            self._abort_asked = True
            if self._ticket is not None:
                self._ticket.abort()
        else:
            self._abort_running(self._completions)

    def _abort_running(self, completions: Completions) -> None:
        if running := completions.running():
            assert self._desk is not None
            self._desk.abort(running)

    def disown(self) -> None:
        """Somebody else sees to its end."""
        self._over = True

    def __del__(self) -> None:
        completions: Completions | None = getattr(self, "_completions", None)
        if completions is not None and not self._over and (running := completions.running()):
            # A collection can run in another thread or in the middle of a send: only leave a note for the session.
            assert self._desk is not None
            for state in running:
                self._desk.dropped.put(state)
            warnings.warn(
                f"request stream {self._label!r} was dropped before it had ended; its request is aborted. "
                "Iterate it to its end, or use it as `async with client.generate(...) as stream`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ----------------------------------------------------------------- iteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output, with everything that has arrived since the last one. Does not yield to other tasks if there
        is one.

        Raises:
            StopAsyncIteration: the final output was delivered, or the stream was closed.
            RequestRejected: bad input; nothing was sent.
            OverloadedError, EngineAsleepError: no request is taken now; nothing was sent.
            RequestTimeout: one of its time limits passed; what had arrived was delivered before, and is in ``partial``.
            RequestFailed: the engine ended the request with an error, or aborted it on its own account.
            EngineDeadError: the engine died, or the client is closed; again on every further call.
            BusyResourceError: another task is iterating.
            WrongLoopError: in another thread than the client's, unless the item of an only answer is ready.

        Cancellation: aborts the request, unless the stream was entered with ``async with``, whose end then does. An
        output leaves the stream only by being returned: none is lost.
        """
        # The hot loop, the middle of a stream with one completion: what :meth:`_next` does, in fewer calls.
        one = self._one
        if one is None or self._over or self._busy:
            return await self._next()
        state = one.state
        if not state.readable:
            self._busy = True
            try:
                while not state.readable:
                    await self._park()
            except BaseException as exc:
                self.give_up(exc)
                raise
            finally:
                self._busy = False
        if state.error is not None:
            assert self._completions is not None
            return self._take(self._completions)
        try:
            output = one.take()
        except Exception as exc:
            raise self._spoilt(exc) from exc
        if output.finish_reason is not None:
            self._over = True
        return output

    async def _next(self) -> RequestOutput:
        """The next output of any stream, in any state."""
        if self._over:
            if self._error is not None:
                raise self._own(self._error)
            raise StopAsyncIteration
        if self._session is not None and self._session.cause is None:
            self._session.check_thread()
        if self._busy:
            raise anyio.BusyResourceError("iterating over")
        self._busy = True
        try:
            completions = self._completions
            if completions is None:
                completions = await self.start()
            while not completions.ready(gather=self._gather):
                await completions.parker.park()
        except anyio.ClosedResourceError:
            raise StopAsyncIteration from None  # closed by another task while the prompt was being tokenized
        except BaseException as exc:
            self.give_up(exc)
            raise
        finally:
            self._busy = False
        return self._take(completions)

    def give_up(self, exc: BaseException) -> None:
        """Its consumer waits no more, because of ``exc``: what iterating does. For the client."""
        if not self._owned_by_block:
            self.close_nowait()
            self._error = exc if isinstance(exc, EngineError) else None

    def _take(self, completions: Completions) -> RequestOutput:
        """Empty the merge buffer. Synchronous, so nothing can be lost between the buffer and the caller."""
        failure = completions.failure(gather=self._gather)
        if failure is not None:
            self.close_nowait()  # one completion's trouble is that of all
            self._error = failure
            raise self._own(failure)
        try:
            output = completions.take(gather=self._gather)
        except Exception as exc:
            raise self._spoilt(exc) from exc
        self._over = output.finished
        return output

    def _spoilt(self, exc: Exception) -> OutputProcessingError:
        """Rule 5: trouble with this request's text is this request's error; it is aborted, the others go on."""
        self.close_nowait()
        what = f"cannot process the output of request {self._label!r}: {exc!r}"
        error = OutputProcessingError(what, request_id=self._label)
        error.__cause__ = exc
        self._error = error
        assert self._completions is not None
        error.partial = self._completions.snapshot()
        return error

    def _own(self, error: EngineError) -> EngineError:
        """A copy of ``error`` for the consumer, which may be everybody's: what is known of this request is in it."""
        own = error.for_waiter()
        if isinstance(own, RequestError | EngineDeadError):
            own.request_id = self._label
            own.partial = None if self._completions is None else self._completions.snapshot()
        return own
