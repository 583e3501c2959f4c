"""``RequestStream``: what a consumer iterates.

Owns one request's life as its consumer sees it: inert until first used, then a sequence of outputs with exactly one
final item or one error. Every way out of it is the same abort, exactly once. No scope and no task is open across an
item.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import anyio

from anyengine.exceptions import EngineError, OutputProcessingError, RequestError
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind, SamplingParams

from .fan_out import Completions
from .prompts import Embeddings, Prompt
from .request_desk import RequestDesk
from .request_fields import RequestFields

__all__ = ["RequestStream"]

ErrorT = TypeVar("ErrorT", bound=EngineError)


class RequestStream:
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
    ) -> None:
        self._find_desk = desk
        self._desk: RequestDesk | None = None  # of the session that the request was sent in
        self._prompt = prompt
        self._params = params
        self._fields = fields
        self._label = request_id
        self._completions: Completions | None = None
        self._gather = params.output_kind is OutputKind.FINAL_ONLY
        self._owned_by_block = False
        self._busy = False
        self._over = False
        self._error: EngineError | None = None

    @property
    def request_id(self) -> str | None:
        """The caller's label, or the one the client made; ``None`` before the request is sent."""
        return self._label

    @property
    def rank(self) -> int | None:
        """The rank that runs it, or its first completion; ``None`` before the request is sent."""
        return None if self._completions is None else self._completions.rank

    # ------------------------------------------------------------------- context

    async def __aenter__(self) -> Self:
        """Send the request, if it has not been sent.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
            ClosedResourceError: the stream was closed before.

        Cancellation: nothing is left in the engine.
        """
        await self.start()
        self._owned_by_block = True
        return self

    async def start(self) -> Completions:
        """Send the request, if it has not been sent; what :meth:`__aenter__` and the first item do. For the client.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
            ClosedResourceError: the stream was closed before.

        Cancellation: nothing is left in the engine.
        """
        prepared: Sequence[int] | Embeddings = ()
        desk = self._find_desk()
        if self._completions is None and not self._over:
            prepared = await desk.prepare(self._prompt, self._params, self._label, self._fields)
        if self._completions is None:  # looked at again, both: another task may have sent or closed it meanwhile
            if self._over:
                raise anyio.ClosedResourceError
            self._completions = desk.send(prepared, self._params, self._label, self._fields)
            self._desk = desk
            self._label = self._completions.label
            self._prompt, self._fields = (), {}  # sent: not ours to keep
        return self._completions

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
        self.abort()
        self._over = True  # last: in another thread the abort is refused, and the stream is what it was

    def abort(self) -> None:
        """Ask for the end: the request is aborted, and the stream yields its last item, with ``finish_reason="abort"``.

        Synchronous. Completions that have ended stay as they are; does nothing once all have.
        """
        if self._completions is not None and (running := self._completions.running()):
            assert self._desk is not None
            self._desk.abort(running)

    def __del__(self) -> None:
        completions = getattr(self, "_completions", None)
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
            RequestFailed: the engine ended the request with an error, or aborted it on its own account.
            EngineDeadError: the engine died, or the client is closed; again on every further call.
            BusyResourceError: another task is iterating.

        Cancellation: aborts the request, unless the stream was entered with ``async with``, whose end then does. An
        output leaves the stream only by being returned: none is lost.
        """
        if self._over:
            if self._error is not None:
                raise self._error.for_waiter()
            raise StopAsyncIteration
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
            if not self._owned_by_block:
                self.close_nowait()
                self._error = exc if isinstance(exc, EngineError) else None
            raise
        finally:
            self._busy = False
        return self._take(completions)

    def _take(self, completions: Completions) -> RequestOutput:
        failure = completions.failure(gather=self._gather)
        if failure is not None:
            self.close_nowait()  # one completion's trouble is that of all
            self._error = self._with_partial(failure, completions)
            raise self._error.for_waiter()
        try:
            output = completions.take(gather=self._gather)
        except Exception as exc:
            # Rule 5: trouble with this request's text is this request's error; it is aborted, the others go on.
            self.close_nowait()
            error = OutputProcessingError(
                f"cannot process the output of request {self._label!r}: {exc!r}", request_id=self._label
            )
            error.__cause__ = exc
            self._error = self._with_partial(error, completions)
            raise error from exc
        self._over = output.finished
        return output

    @staticmethod
    def _with_partial(error: ErrorT, completions: Completions) -> ErrorT:
        if isinstance(error, RequestError):
            error.partial = completions.snapshot()
        return error
