"""A request stream as what most programs want of it: pieces of text, or tokens one by one.

Owns no request: a view takes from its stream, and leaving it is leaving the stream.
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar, cast

from anyengine._text.output_parsers import OutputParser, ParsedDelta
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from .stream import RequestStream

__all__ = ["ParsedStream", "StreamView", "StreamViews", "TextStream", "TokenStream"]

ItemT = TypeVar("ItemT", str, int)


class StreamView(Generic[ItemT]):
    """An asynchronous iterator and context manager over a stream of one completion. Made by the stream."""

    def __init__(self, stream: RequestStream, output_kind: OutputKind) -> None:
        self._stream = stream
        self._delta = output_kind is OutputKind.DELTA
        self._seen = 0  # of the text or the tokens, in a stream whose items have everything so far

    async def __aenter__(self) -> Self:
        """Send the request: see :meth:`RequestStream.__aenter__`."""
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stream.close_nowait()

    async def aclose(self) -> None:
        """Leave the stream: abort the request if it is still running. Idempotent.

        Cancellation: the abort is sent in any case.
        """
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self


class TextStream(StreamView[str]):
    """The pieces of a completion's text, none of them empty."""

    latest: RequestOutput | None = None
    """The item that the latest piece is of, or the last one."""

    async def __anext__(self) -> str:
        """The next piece.

        Raises, Cancellation: see :meth:`RequestStream.__anext__`.
        """
        while True:
            self.latest = item = await anext(self._stream)
            text = item.text
            if not self._delta:
                text, self._seen = text[self._seen :], len(text)
            if text:
                return text


class ParsedStream:
    """A completion as a parser takes it apart: reasoning, content and tool calls, piece by piece. ``output`` is the
    last item of the stream, once it has been taken, with its ``finish_reason``."""

    def __init__(self, texts: TextStream, parser: OutputParser) -> None:
        self._texts = texts
        self._parser = parser
        self._over = False

    @property
    def output(self) -> RequestOutput | None:
        """The last item of the stream that was taken."""
        return self._texts.latest

    async def __aenter__(self) -> Self:
        """Send the request: see :meth:`RequestStream.__aenter__`."""
        await self._texts.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._texts.__aexit__(exc_type, exc, traceback)  # noqa: ASYNC102 - waits for nothing

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ParsedDelta:
        """The next piece, never an empty one.

        Raises, Cancellation: see :meth:`RequestStream.__anext__`.
        """
        while not self._over:
            try:
                delta = self._parser.push(await anext(self._texts))
            except StopAsyncIteration:
                self._over = True
                delta = self._parser.finish()
            if delta:
                return delta
        raise StopAsyncIteration


class TokenStream(StreamView[int]):
    """The tokens of a completion, one by one."""

    def __init__(self, stream: RequestStream, output_kind: OutputKind) -> None:
        super().__init__(stream, output_kind)
        self._tokens: deque[int] = deque()

    async def __anext__(self) -> int:
        """The next token.

        Raises, Cancellation: see :meth:`RequestStream.__anext__`; tokens that have been taken are not lost.
        """
        while not self._tokens:
            token_ids = (await anext(self._stream)).token_ids
            if not self._delta:
                token_ids, self._seen = token_ids[self._seen :], len(token_ids)
            self._tokens.extend(token_ids)
        return self._tokens.popleft()


class StreamViews:
    """Part of :class:`RequestStream`."""

    __slots__ = ()
    _params: SamplingParams

    def _as_stream(self) -> RequestStream:
        return cast("RequestStream", self)

    def text_stream(self) -> TextStream:
        """The stream as pieces of text, none of them empty.

        Raises:
            ValueError: the request has several completions, whose texts would be mixed.
        """
        self._check_single()
        return TextStream(self._as_stream(), self._params.output_kind)

    def parsed(self, parser: OutputParser) -> ParsedStream:
        """The stream as ``parser`` takes its text apart: reasoning, content, tool calls; see :func:`output_parser`.

        Tags that the tokenizer calls special are only in the text with ``skip_special_tokens=False``.

        Raises:
            ValueError: the request has several completions, whose texts would be mixed.
        """
        return ParsedStream(self.text_stream(), parser)

    def token_stream(self) -> TokenStream:
        """The stream as single tokens.

        Raises:
            ValueError: the request has several completions, whose tokens would be mixed.
        """
        self._check_single()
        return TokenStream(self._as_stream(), self._params.output_kind)

    def _check_single(self) -> None:
        if self._params.n != 1:
            raise ValueError(f"n={self._params.n}: iterate over the stream itself, whose items say which they are of")
