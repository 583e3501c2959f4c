"""What a chat model's output is made of: reasoning, content, tool calls. Incremental: text in, pieces out.

Owns the interface of a parser, the ways of tagging that most models have, and how two parsers are put together. Pure;
knows no request. However the text is cut, the pieces joined are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from .tool_calls import CallScanner, JsonCallScanner

__all__ = [
    "ChatParser",
    "HermesToolParser",
    "JsonToolParser",
    "OutputParser",
    "ParsedDelta",
    "ParsedOutput",
    "ThinkParser",
    "ToolCall",
    "ToolCallDelta",
    "parse_output",
]


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool: its name, and its arguments as the JSON text that the model wrote."""

    name: str
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of call number ``index``: its ``name``, with which it begins, or more of its ``arguments``."""

    index: int
    name: str | None = None
    arguments: str = ""


class ParsedDelta(msgspec.Struct, frozen=True):
    """What a piece of text has added."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class ParsedOutput(msgspec.Struct, frozen=True):
    """A whole output."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @classmethod
    def of(cls, deltas: Sequence[ParsedDelta]) -> ParsedOutput:
        """All of ``deltas`` together."""
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        for piece in (piece for delta in deltas for piece in delta.tool_calls):
            names[piece.index] = names.get(piece.index, "") + (piece.name or "")
            arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
        return cls(
            "".join(delta.reasoning for delta in deltas),
            "".join(delta.content for delta in deltas),
            tuple(ToolCall(name, arguments[index]) for index, name in sorted(names.items())),
        )


class OutputParser(Protocol):
    """What every parser is. One for each completion; it must not fail, whatever a model writes."""

    def push(self, text: str) -> ParsedDelta:
        """What ``text``, which follows all text before, adds for certain."""

    def finish(self) -> ParsedDelta:
        """What remains, since no text follows."""


def parse_output(parser: OutputParser, text: str) -> ParsedOutput:
    """What ``parser``, which is new, makes of a whole output."""
    return ParsedOutput.of([parser.push(text), parser.finish()])


class _Tags:
    """Finds the first of some tags in text that comes in pieces. What may be the beginning of one is held back."""

    def __init__(self) -> None:
        self.held = ""

    def split(self, tags: Sequence[str]) -> tuple[str, str | None]:
        """The text before the first tag, and the tag; what is behind it stays. Without a tag: what belongs to none."""
        found = [(at, tag) for tag in tags if (at := self.held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            before, self.held = self.held[:at], self.held[at + len(tag) :]
            return before, tag
        keep = max((_overlap(self.held, tag) for tag in tags), default=0)
        cut = len(self.held) - keep
        before, self.held = self.held[:cut], self.held[cut:]
        return before, None

    def rest(self) -> str:
        """What was held back."""
        rest, self.held = self.held, ""
        return rest


def _overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` begin ``tag``."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)


class ThinkParser:
    """Reasoning between two tags, content around it: ``<think>...</think>`` as Qwen 3 and DeepSeek write it.

    ``begins_inside``: the prompt has ended with the opening tag, as in the chat templates of DeepSeek R1; one that the
    model writes all the same is dropped.
    """

    def __init__(self, start: str = "<think>", end: str = "</think>", *, begins_inside: bool = False) -> None:
        self._start, self._end = start, end
        self._inside = begins_inside
        self._tags = _Tags()

    def push(self, text: str) -> ParsedDelta:
        """See :class:`OutputParser`."""
        self._tags.held += text
        reasoning, content = "", ""
        while True:
            before, tag = self._tags.split((self._start, self._end) if self._inside else (self._start,))
            if self._inside:
                reasoning += before
            else:
                content += before
            if tag is None:
                return ParsedDelta(reasoning, content)
            self._inside = tag == self._start

    def finish(self) -> ParsedDelta:
        """See :class:`OutputParser`."""
        rest = self._tags.rest()
        return ParsedDelta(reasoning=rest) if self._inside else ParsedDelta(content=rest)


class HermesToolParser:
    """Calls as JSON objects between two tags, ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes
    and Qwen write them; content around them. What is no such object is content, tags included."""

    def __init__(self, start: str = "<tool_call>", end: str = "</tool_call>") -> None:
        self._start, self._end = start, end
        self._tags = _Tags()
        self._call: CallScanner | None = None
        self._num_calls = 0

    def push(self, text: str) -> ParsedDelta:
        """See :class:`OutputParser`."""
        self._tags.held += text
        content, pieces = "", list[ToolCallDelta]()
        while True:
            if self._call is None:
                before, tag = self._tags.split((self._start,))
                content += before
                if tag is None:
                    return ParsedDelta(content=content, tool_calls=tuple(pieces))
                self._call = CallScanner()
            elif self._call.takes_more():
                self._tags.held = self._call.push(self._tags.held)
                pieces += self._pieces(self._call)
                if self._call.takes_more():
                    return ParsedDelta(content=content, tool_calls=tuple(pieces))
                if self._call.is_broken and not self._call.was_named:
                    content += self._start + self._call.raw
                    self._call = None
            else:
                _, tag = self._tags.split((self._end,))  # what stands between the object and the tag is dropped
                if tag is None:
                    return ParsedDelta(content=content, tool_calls=tuple(pieces))
                self._num_calls += self._call.was_named
                self._call = None

    def finish(self) -> ParsedDelta:
        """See :class:`OutputParser`."""
        call, self._call = self._call, None
        if call is None:
            return ParsedDelta(content=self._tags.rest())
        if call.was_named:
            return ParsedDelta()
        return ParsedDelta(content=self._start + call.raw + self._tags.rest())

    def _pieces(self, call: CallScanner) -> list[ToolCallDelta]:
        return [ToolCallDelta(self._num_calls, name, arguments) for name, arguments in call.take()]


class JsonToolParser:
    """Calls as the whole output: one JSON object with ``name`` and ``arguments`` (or ``parameters``), or an array of
    them, as Llama 3 and others write them. An output that begins otherwise is content, and so is one without a name."""

    def __init__(self) -> None:
        self._scanner: JsonCallScanner | None = JsonCallScanner()

    def push(self, text: str) -> ParsedDelta:
        """See :class:`OutputParser`."""
        scanner = self._scanner
        if scanner is None:
            return ParsedDelta(content=text)
        rest = scanner.push(text)
        pieces = tuple(ToolCallDelta(index, name, arguments) for index, name, arguments in scanner.take())
        content = ""
        if scanner.is_broken:  # content from here on, and from the beginning if there was no call
            content = rest if scanner.num_calls else scanner.raw + rest
            self._scanner = None
        return ParsedDelta(content=content, tool_calls=pieces)

    def finish(self) -> ParsedDelta:
        """See :class:`OutputParser`."""
        scanner, self._scanner = self._scanner, None
        if scanner is None or scanner.num_calls:
            return ParsedDelta()
        return ParsedDelta(content=scanner.raw)


class ChatParser:
    """One parser behind the other: the content of the first is the text of the second."""

    def __init__(self, reasoning: OutputParser, tools: OutputParser) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> ParsedDelta:
        """See :class:`OutputParser`."""
        first = self._reasoning.push(text)
        second = self._tools.push(first.content)
        return ParsedDelta(first.reasoning, second.content, second.tool_calls)

    def finish(self) -> ParsedDelta:
        """See :class:`OutputParser`."""
        first = self._reasoning.finish()
        last, end = self._tools.push(first.content), self._tools.finish()
        return ParsedDelta(first.reasoning, last.content + end.content, last.tool_calls + end.tool_calls)
