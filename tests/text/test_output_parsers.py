"""Reasoning and tool calls: cut at every character, the pieces are those of the whole; and nothing fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._text.output_parsers import (
    ChatParser,
    HermesToolParser,
    JsonToolParser,
    OutputParser,
    ParsedDelta,
    ParsedOutput,
    ThinkParser,
    ToolCall,
    parse_output,
)

WEATHER = '{"name": "weather", "arguments": {"city": "Z\\"ü}rich", "days": [1, {"a": "]"}]}}'
ARGUMENTS = '{"city": "Z\\"ü}rich", "days": [1, {"a": "]"}]}'


def both() -> OutputParser:
    return ChatParser(ThinkParser(), HermesToolParser())


CASES: list[tuple[str, Callable[[], OutputParser], str, ParsedOutput]] = [
    ("no tags", ThinkParser, "a < b <thin", ParsedOutput(content="a < b <thin")),
    ("reasoning", ThinkParser, "<think>hm </thin</think>so", ParsedOutput("hm </thin", "so")),
    ("around it", ThinkParser, "a<think>b</think>c<think>d</think>", ParsedOutput("bd", "ac")),
    ("cut short", ThinkParser, "<think>hm </thi", ParsedOutput("hm </thi")),
    ("begun in the prompt", lambda: ThinkParser(begins_inside=True), "hm</think>so", ParsedOutput("hm", "so")),
    ("and again", lambda: ThinkParser(begins_inside=True), "<think>hm</think>so", ParsedOutput("hm", "so")),
    ("other tags", lambda: ThinkParser("[T]", "[/T]"), "[T]hm[/T]so", ParsedOutput("hm", "so")),
    (
        "hermes",
        HermesToolParser,
        f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>ok",
        ParsedOutput("", "Let me see.\nok", (ToolCall("weather", ARGUMENTS),)),
    ),
    (
        "two calls",
        HermesToolParser,
        f'<tool_call>{WEATHER}</tool_call><tool_call>{{"arguments":{{}},"x":[1],"name":"b"}}</tool_call>',
        ParsedOutput("", "", (ToolCall("weather", ARGUMENTS), ToolCall("b", "{}"))),
    ),
    ("no object", HermesToolParser, "<tool_call>five</tool_call>", ParsedOutput("", "<tool_call>five</tool_call>")),
    (
        "no name",
        HermesToolParser,
        '<tool_call>{"arguments": {}}</tool_call>',
        ParsedOutput("", '<tool_call>{"arguments": {}}</tool_call>'),
    ),
    (
        "cut in the arguments",
        HermesToolParser,
        '<tool_call>{"name": "a", "arguments": {"x": "y',
        ParsedOutput("", "", (ToolCall("a", '{"x": "y'),)),
    ),
    ("cut in the name", HermesToolParser, '<tool_call>{"name": "a', ParsedOutput("", '<tool_call>{"name": "a')),
    (
        "scalar",
        HermesToolParser,
        '<tool_call>{"name":"a","arguments":5 }</tool_call>',
        ParsedOutput("", "", (ToolCall("a", "5"),)),
    ),
    (
        "text",
        HermesToolParser,
        '<tool_call>{"name":"a","arguments":"{\\"b\\"}"}</tool_call>',
        ParsedOutput("", "", (ToolCall("a", '"{\\"b\\"}"'),)),
    ),
    ("json", JsonToolParser, f" {WEATHER} ", ParsedOutput("", "", (ToolCall("weather", ARGUMENTS),))),
    (
        "json array",
        JsonToolParser,
        f'[{WEATHER}, {{"name": "b", "parameters": {{"p": 1}}}}]',
        ParsedOutput("", "", (ToolCall("weather", ARGUMENTS), ToolCall("b", '{"p": 1}'))),
    ),
    ("json, but none", JsonToolParser, '{"answer": 42}', ParsedOutput("", '{"answer": 42}')),
    ("no json", JsonToolParser, "The answer is {}.", ParsedOutput("", "The answer is {}.")),
    ("cut json", JsonToolParser, '{"na', ParsedOutput("", '{"na')),
    (
        "both",
        both,
        f"<think>I need <tool_call> here</think>\n<tool_call>{WEATHER}</tool_call>",
        ParsedOutput("I need <tool_call> here", "\n", (ToolCall("weather", ARGUMENTS),)),
    ),
]  # fmt: skip


def in_pieces(parser: OutputParser, pieces: list[str]) -> ParsedOutput:
    deltas = [parser.push(piece) for piece in pieces] + [parser.finish()]
    assert all(isinstance(delta, ParsedDelta) for delta in deltas)
    return ParsedOutput.of(deltas)


@pytest.mark.feature("R52")
@pytest.mark.parametrize(("name", "make", "text", "expected"), CASES, ids=[case[0] for case in CASES])
def test_cut_at_every_character(name: str, make: Callable[[], OutputParser], text: str, expected: ParsedOutput) -> None:
    assert parse_output(make(), text) == expected
    assert in_pieces(make(), list(text)) == expected
    for cut in range(len(text) + 1):
        assert in_pieces(make(), [text[:cut], text[cut:]]) == expected


@pytest.mark.feature("R52")
def test_a_call_is_given_as_it_comes() -> None:
    """The name as soon as it is there, then the arguments piece by piece; content up to what may be a tag."""
    parser = HermesToolParser()
    assert parser.push("so <too") == ParsedDelta(content="so ")
    assert parser.push("l_call>") == ParsedDelta()
    (begun,) = parser.push('{"name": "a", "argum').tool_calls
    assert (begun.index, begun.name, begun.arguments) == (0, "a", "")
    (more,) = parser.push('ents": {"x"').tool_calls
    assert (more.index, more.name, more.arguments) == (0, None, '{"x"')
    assert ThinkParser().push("<think>well") == ParsedDelta(reasoning="well")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.feature("R52")
@given(
    st.lists(st.tuples(st.text(), st.dictionaries(st.text(), JSON, max_size=4), st.booleans()), max_size=3), st.data()
)
def test_any_calls_come_back(calls: list[tuple[str, dict[str, Any], bool]], data: st.DataObject) -> None:
    """Whatever json writes, in any order of keys and cut anywhere, json reads the same from what comes out."""
    written = ""
    for name, arguments, late in calls:
        item = {"arguments": arguments, "name": name} if late else {"name": name, "arguments": arguments}
        written += f"<tool_call>\n{json.dumps(item, ensure_ascii=late, indent=late or None)}\n</tool_call>\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)), max_size=6)))
    pieces = [written[start:end] for start, end in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    found = in_pieces(HermesToolParser(), pieces)
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == [
        (name, arguments) for name, arguments, _ in calls
    ]
    assert found.content == "\n" * len(calls)


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "<", "{", "}", "[", "]", '"', "\\", ",", ":", "name",
     '"name"', '"arguments"', "x", " ", "\n", '{"name": "a"', WEATHER]
)  # fmt: skip


@pytest.mark.feature("R52")
@pytest.mark.parametrize("make", [ThinkParser, HermesToolParser, JsonToolParser, both])
@given(fragments=st.lists(FRAGMENTS, max_size=12), data=st.data())
def test_nothing_fails_and_nothing_depends_on_the_cuts(
    make: Callable[[], OutputParser], fragments: list[str], data: st.DataObject
) -> None:
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert in_pieces(make(), pieces) == in_pieces(make(), list(text)) == parse_output(make(), text)


def test_a_character_costs_the_same_however_long_the_text_is() -> None:
    """Ten times the text, in calls of Python and in time of the processor: about ten times the work."""

    def cost_s(num_pieces: int) -> float:
        parser = JsonToolParser()
        began_s = time.process_time()
        parser.push('{"result": "')
        for _ in range(num_pieces):
            parser.push("a" * 100)
        parser.finish()
        return time.process_time() - began_s

    few, many = min(cost_s(200) for _ in range(3)), min(cost_s(2000) for _ in range(3))
    assert many < 30 * few  # 100 times, were each piece to copy what came before it
