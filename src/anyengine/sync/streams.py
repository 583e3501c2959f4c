"""What a thread iterates of one request, over the asynchronous stream.

Owns the blocking side of iteration, and every way out of it. How an item crosses is :mod:`.crossing`'s.
"""

from __future__ import annotations

from threading import Lock
from types import TracebackType
from typing import Self

import anyio

from anyengine._client.requests.stream import RequestStream
from anyengine._text.output_parsers import OutputParser
from anyengine.exceptions import EngineError
from anyengine.outputs import RequestOutput

from .client_thread import ClientThread
from .crossing import Crossing
from .stream_views import SyncParsedStream, SyncTextStream, SyncTokenStream

__all__ = ["SyncRequestStream"]


class SyncRequestStream:
    """The outputs of one request: an iterator, and a context manager. One thread iterates at a time, whichever it is.

    Nothing happens until it is entered, or iterated for the first time. Leaving it aborts the request: the end of its
    ``with`` block, :meth:`close`, an exception of a signal handler (Ctrl-C) while it waits, or the last reference to it
    (after ``break``, say). Each item holds everything that has arrived since the one before.
    """

    _started = False
    _over = False  # nothing is in flight any more

    def __init__(self, thread: ClientThread, stream: RequestStream, *, started: bool = False) -> None:
        self._thread = thread
        self._stream = stream
        self._started = started
        self._crossing: Crossing | None = None
        self._pump_ended = False  # and was heard of
        self._finished = False  # its last item was given
        self._owned_by_block = False
        self._turn = Lock()

    @property
    def request_id(self) -> str | None:
        """See :attr:`RequestStream.request_id`."""
        return self._stream.request_id

    @property
    def wire_ids(self) -> tuple[str, ...]:
        """See :attr:`RequestStream.wire_ids`."""
        return self._stream.wire_ids

    @property
    def rank(self) -> int | None:
        """See :attr:`RequestStream.rank`."""
        return self._stream.rank

    @property
    def attempts(self) -> int:
        """See :attr:`RequestStream.attempts`."""
        return self._stream.attempts

    @property
    def lag(self) -> int:
        """See :attr:`RequestStream.lag`."""
        return self._stream.lag

    @property
    def asynchronous(self) -> RequestStream:
        """The stream itself, for functions that :meth:`SyncEngineClient.run` runs in the client's loop."""
        return self._stream

    # ------------------------------------------------------------------- context

    def __enter__(self) -> Self:
        """Send the request, if it has not been sent.

        Raises: see :meth:`RequestStream.__aenter__`.
        """
        self._started = True
        try:
            self._thread.call(self._stream.start)
        except BaseException:
            self._abandon()
            raise
        self._owned_by_block = True
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the stream: if the request is still running, its abort has been sent when this returns. Idempotent."""
        if self._thread.is_foreign:
            return
        if not self._started:
            self._stream.close_nowait()  # the loop does not know it
        elif not self._over or self._thread.has_ended:
            self._thread.call_last(self._stream.close_nowait)
            if self._crossing is not None:
                self._crossing.pump.cancel()
        self._over = True

    def _abandon(self) -> None:
        """:meth:`close` without waiting; safe at any moment."""
        if self._started and not self._over:
            self._over = True
            self._thread.post(self._stream.close_nowait)
            if self._crossing is not None:
                self._crossing.pump.cancel()

    def __del__(self) -> None:
        self._abandon()

    def abort(self) -> None:
        """Ask for the end: see :meth:`RequestStream.abort`."""

        if not self._over:
            self._thread.call_now(self._stream.abort)

    # ----------------------------------------------------------------- iteration

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        """The next output.

        Raises: see :meth:`RequestStream.__anext__`, with ``StopIteration`` at the end.
        """
        if not self._turn.acquire(blocking=False):
            raise anyio.BusyResourceError("iterating over")
        try:
            output = self._next()
        except BaseException as exc:
            if isinstance(exc, EngineError | StopIteration):
                self._over = self._stream.is_over  # not where it is the caller who was refused
            elif not self._owned_by_block:
                self._abandon()
            raise
        finally:
            self._turn.release()
        if output.finished:
            self._over = self._finished = True
        return output

    def _next(self) -> RequestOutput:
        if self._finished:
            raise StopIteration
        thread, crossing = self._thread, self._crossing
        if crossing is None and not (self._started and thread.has_ended):
            thread.check_caller()
            self._started = True
            crossing = self._crossing = Crossing(thread, self._stream)
        if crossing is not None and not self._pump_ended:
            thread.check_place()
            output = crossing.take()
            if output is not None:
                return output
            self._pump_ended = True
            self._hear_of_the_end(crossing)
        try:
            return self._thread.ask(self._stream.__anext__)  # what is left of it: the end, or the error once more
        except StopAsyncIteration:
            raise StopIteration from None

    def _hear_of_the_end(self, crossing: Crossing) -> None:
        if crossing.pump.cancelled():  # it was closed, by another thread
            return
        error = crossing.pump.exception()
        if crossing.was_cut or self._thread.has_ended:
            self._thread.wait_ended()  # the stream may have more to say, and says it when nobody else touches it
        elif error is not None:
            raise error

    def final(self) -> RequestOutput:
        """Everything that the request gives, once it has ended; see :meth:`RequestStream.final`.

        Raises: see :meth:`RequestStream.final`.
        """
        if self._crossing is not None:
            for _ in self:
                pass
        self._started = True
        try:
            output = self._thread.ask(self._stream.final)
        except EngineError:
            self._over = self._stream.is_over
            raise
        except BaseException:
            if not self._owned_by_block:
                self._abandon()
            raise
        self._over = True
        return output

    def text_stream(self) -> SyncTextStream:
        """The stream as pieces of text, none of them empty.

        Raises:
            ValueError: the request has several completions, whose texts would be mixed.
        """
        self._stream.text_stream()  # asks whether there can be one
        return SyncTextStream(self)

    def token_stream(self) -> SyncTokenStream:
        """The stream as single tokens.

        Raises:
            ValueError: the request has several completions, whose tokens would be mixed.
        """
        self._stream.token_stream()
        return SyncTokenStream(self)

    def parsed(self, parser: OutputParser) -> SyncParsedStream:
        """The stream as ``parser`` takes it apart; see :meth:`RequestStream.parsed`.

        Raises:
            ValueError: see :meth:`RequestStream.parsed`.
        """
        return SyncParsedStream(self.text_stream(), self, parser)
