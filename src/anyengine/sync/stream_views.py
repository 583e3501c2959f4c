"""A blocking stream as what most programs want of it: pieces of text, or tokens one by one.

Owns no request: a view takes from its stream, and leaving it is leaving the stream. What was taken is kept in the view,
not in a frame: it goes on after an exception, as its stream does. The twins of the asynchronous views.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from anyengine._text.output_parsers import OutputParser, ParsedDelta
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind

if TYPE_CHECKING:
    from .streams import SyncRequestStream

__all__ = ["SyncParsedStream", "SyncStreamView", "SyncTextStream", "SyncTokenStream"]

ItemT = TypeVar("ItemT")


class SyncStreamView(Generic[ItemT]):
    """An iterator and context manager over a stream of one completion. Leaving it is leaving the stream."""

    def __init__(self, stream: SyncRequestStream) -> None:
        self._stream = stream
        self._delta = stream.asynchronous.output_kind is OutputKind.DELTA
        self._seen = 0  # of the text or the tokens, in a stream whose items have everything so far

    def __enter__(self) -> Self:
        """Send the request: see :meth:`SyncRequestStream.__enter__`."""
        self._stream.__enter__()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close()

    def close(self) -> None:
        """See :meth:`SyncRequestStream.close`."""
        self._stream.close()

    def __iter__(self) -> Self:
        return self


class SyncTextStream(SyncStreamView[str]):
    """The pieces of a completion's text, none of them empty."""

    latest: RequestOutput | None = None
    """The item that the latest piece is of, or the last one."""

    def __next__(self) -> str:
        """The next piece.

        Raises: see :meth:`SyncRequestStream.__next__`.
        """
        while True:
            self.latest = item = next(self._stream)
            text = item.text
            if not self._delta:
                text, self._seen = text[self._seen :], len(text)
            if text:
                return text


class SyncTokenStream(SyncStreamView[int]):
    """The tokens of a completion, one by one."""

    def __init__(self, stream: SyncRequestStream) -> None:
        super().__init__(stream)
        self._tokens: deque[int] = deque()

    def __next__(self) -> int:
        """The next token.

        Raises: see :meth:`SyncRequestStream.__next__`; tokens that have been taken are not lost.
        """
        while not self._tokens:
            token_ids = next(self._stream).token_ids
            if not self._delta:
                token_ids, self._seen = token_ids[self._seen :], len(token_ids)
            self._tokens.extend(token_ids)
        return self._tokens.popleft()


class SyncParsedStream(SyncStreamView[ParsedDelta]):
    """A completion as a parser takes it apart, piece by piece; see :class:`ParsedStream`."""

    def __init__(self, texts: SyncTextStream, stream: SyncRequestStream, parser: OutputParser) -> None:
        super().__init__(stream)
        self._texts = texts
        self._parser = parser
        self._over = False

    @property
    def output(self) -> RequestOutput | None:
        """The last item of the stream that was taken."""
        return self._texts.latest

    def __next__(self) -> ParsedDelta:
        """The next piece, never an empty one.

        Raises: see :meth:`SyncRequestStream.__next__`.
        """
        while not self._over:
            try:
                delta = self._parser.push(next(self._texts))
            except StopIteration:
                self._over = True
                delta = self._parser.finish()
            if delta:
                return delta
        raise StopIteration
