"""What a thread iterates besides request streams: groups, input sessions, events; each over its asynchronous twin.

One crossing of threads for each item, which is a whole answer, or rare. Owns the ways out.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self

import anyio

from anyengine._client.engines.kv_events import KVEventStream
from anyengine._client.inputs.prompts import Prompt
from anyengine._client.requests.input_session import InputSession, StreamingInput
from anyengine._client.requests.many import Answer, RequestGroup
from anyengine._client.session.events import ClientEvents
from anyengine._protocol import ClientEvent, KVEventBatch
from anyengine.exceptions import ClientClosedError
from anyengine.outputs import RequestOutput
from anyengine.params import SamplingParams

from .client_thread import ClientThread

__all__ = ["SyncClientEvents", "SyncInputSession", "SyncKVEventStream", "SyncRequestGroup"]


class SyncRequestGroup(Generic[Answer]):
    """Pairs of a prompt's index and its output: an iterator, and a context manager. See :class:`RequestGroup`.

    One crossing of threads for each answer. Leaving it aborts what has not ended, as for :class:`SyncRequestStream`.
    """

    _over = True

    def __init__(self, thread: ClientThread, group: RequestGroup[Answer]) -> None:
        self._thread = thread
        self._group = group
        self._started = False

    @property
    def num_in_flight(self) -> int:
        """How many of its requests have been sent and have not ended."""
        return self._group.num_in_flight

    def __enter__(self) -> Self:
        """Send the first requests, if that was not done.

        Raises: see :meth:`RequestGroup.__aenter__`.
        """
        self._started, self._over = True, False
        self._thread.call(self._group.__aenter__)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group: the aborts of what has not ended have been sent when this returns. Idempotent."""
        if self._thread.is_foreign:
            return
        if self._over:
            self._group.close_nowait()
        else:
            self._thread.call_last(self._group.close_nowait)
        self._over = True

    def __del__(self) -> None:
        if not self._over:
            self._thread.post(self._group.close_nowait)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, Answer]:
        """The next pair.

        Raises: see :meth:`RequestGroup.__anext__`, with ``StopIteration`` at the end.
        """
        if not self._started:
            self._thread.check_caller()
        self._started, self._over = True, False
        try:
            return self._thread.ask(self._group.__anext__)
        except StopAsyncIteration:
            self._over = True
            raise StopIteration from None


class SyncClientEvents:
    """An iterator over what happens to a client; see :class:`ClientEvents`."""

    def __init__(self, thread: ClientThread, events: ClientEvents) -> None:
        self._thread = thread
        self._events = events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ClientEvent:
        """The next event.

        Raises: see :meth:`ClientEvents.__anext__`, with ``StopIteration`` at the end.
        """
        try:
            if self._thread.has_ended:
                return self._events.next_nowait()
            return self._thread.call(self._events.__anext__)
        except (StopAsyncIteration, anyio.WouldBlock):  # nothing more will happen
            raise StopIteration from None


class SyncKVEventStream:
    """An iterator over the changes of a rank's KV cache, and a context manager; see :class:`KVEventStream`."""

    def __init__(self, thread: ClientThread, stream: KVEventStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def rank(self) -> int:
        """See :attr:`KVEventStream.rank`."""
        return self._stream.rank

    @property
    def malformed_messages(self) -> int:
        """See :attr:`KVEventStream.malformed_messages`."""
        return self._stream.malformed_messages

    def __enter__(self) -> Self:
        """Subscribe, if that was not done.

        Raises: see :meth:`KVEventStream.__aenter__`.
        """
        self._thread.call(self._stream.__aenter__)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the subscription. Idempotent."""
        if not self._thread.is_foreign:
            self._thread.call_last(self._stream.close_nowait)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> KVEventBatch:
        """The next batch; it waits until there is one. An exception of a signal handler ends the wait.

        Raises: see :meth:`KVEventStream.__anext__`, with ``StopIteration`` where it was closed.
        """
        try:
            return self._thread.ask(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None


class SyncInputSession:
    """A request whose prompt comes in parts: see :class:`InputSession`. One thread may send while another iterates."""

    _over = False

    def __init__(self, thread: ClientThread, session: InputSession) -> None:
        self._thread = thread
        self._session = session

    @property
    def request_id(self) -> str | None:
        """See :attr:`InputSession.request_id`."""
        return self._session.request_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave: the abort of what the engine still has has been sent when this returns. Idempotent."""
        if not (self._over or self._thread.has_ended or self._thread.is_foreign):
            with suppress(ClientClosedError):  # the loop has ended, and all requests with it
                self._thread.call_now(self._session.close_nowait)
        self._over = True

    def __del__(self) -> None:
        if not self._over:
            self._thread.post(self._session.close_nowait)

    def send(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Send a part of the prompt; returns when it is sent.

        Raises: see :meth:`InputSession.send`.
        """
        self._thread.call(lambda: self._session.send(prompt, sampling_params))

    def feed(self, parts: Iterable[Prompt | StreamingInput]) -> None:
        """Send each of ``parts``, then :meth:`end`.

        Raises: see :meth:`InputSession.send`.
        """
        for part in parts:
            one = part if isinstance(part, StreamingInput) else StreamingInput(part)
            self.send(one.prompt, one.sampling_params)
        self.end()

    def end(self) -> None:
        """No part follows: see :meth:`InputSession.end`."""
        self._thread.call_now(self._session.end)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        """The next output.

        Raises: see :meth:`InputSession.__anext__`, with ``StopIteration`` at the end.
        """
        try:
            return self._thread.ask(self._session.__anext__)
        except StopAsyncIteration:
            self._over = True
            raise StopIteration from None
