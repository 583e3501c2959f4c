"""Regular expressions as stop strings, against a naive search with ``re`` in every beginning of the decoded text."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from time import thread_time
from typing import Any

import pytest
from built_tokenizers import built, ids_of_bytes
from hypothesis import assume, example, given
from hypothesis import strategies as st

from anyengine._text import PatternText, StopText, Tokenizer, compile_pattern
from anyengine.exceptions import RequestRejected
from anyengine.params import SamplingParams

pytestmark = pytest.mark.feature("R35")


def no_time() -> float:
    """A clock that stands still: searches may take as long as they like."""
    return 0.0


TOKENIZERS = ["byte_level", "byte_fallback", "byte_level_in_sequence", "unigram_metaspace"]
LETTERS = "abé🦙 \n"

atoms = st.sampled_from(["a", "b", "é", "🦙", " ", r"\n", ".", "[ab]", "[^a]", r"\w", r"\s", r"\W", "(?s:.)", "(?i:A)"])
repeats = st.sampled_from(["", "", "", "+", "*", "?", "+?", "*?", "??", "{2}", "{1,2}", "{,2}", "++", "?+"])
repeated = st.builds("{}{}".format, atoms, repeats)
groups = st.builds("{}{}".format, st.lists(repeated, max_size=2).map("".join).map("(?:{})".format), repeats)
alternatives = st.lists(repeated, min_size=2, max_size=3).map("|".join)
forms = st.sampled_from(
    ["(?:{})", "(?>{})", r"({})\1", "(?:{})(?P<x>a)?(?(x)b|a)", "(?<=a)(?:{})", "(?:{})(?<!a)b", "(?<![é ])(?:{})"]
)
starts = st.sampled_from(["", "", "", r"\b", r"\B", "^", "(?m:^)", r"(?<=\n)", "(?<!ab)"])
parts = st.one_of(repeated, groups, st.builds(str.format, forms, alternatives))
patterns = st.builds("{}{}".format, starts, st.lists(parts, min_size=1, max_size=3).map("".join))


def is_possible(pattern: str) -> bool:
    try:
        SamplingParams(stop_regex=pattern)
    except RequestRejected:
        return False
    return True


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer([])
    return detokenizer.push(ids) + detokenizer.peek()


def first_match(text: str, stop: list[str], patterns: list[str], floor: int) -> tuple[int, int, str] | None:
    """Where the output ends because of its text: the end, the begin and the name of the match."""
    rules = [(re.compile(re.escape(one)), one) for one in stop] + [(re.compile(one), one) for one in patterns]
    for end in range(floor + 1, len(text) + 1):
        for compiled, name in rules:
            for begin in range(end):
                if compiled.fullmatch(text, begin, end):
                    return end, begin, name
    return None


Found = tuple[str, list[int], str | None]


def naive(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], patterns: list[str], include: bool, min_tokens: int
) -> Found:
    first = [decoded(tokenizer, ids[:count]) for count in range(min_tokens + 1)]
    floor = max(len(text) for text in first if "\ufffd" not in text)
    for count in range(min_tokens + 1, len(ids) + 1):
        text = decoded(tokenizer, ids[:count])
        if (found := first_match(text, stop, patterns, floor)) is not None:
            end, begin, name = found
            return text[: end if include else begin], ids[:count], name
    detokenizer = tokenizer.detokenizer([])
    return detokenizer.push(ids) + detokenizer.finish(), ids, None


def streamed(text: StopText, ids: list[int], cuts: list[int]) -> tuple[Found, list[tuple[str, int, int]]]:
    """As a client does it, frame by frame; and what it had after each: text, ids, held ids."""
    pieces, taken, seen = [], 0, []
    for start, end in pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        taken += text.push(ids[start:end])
        if text.matched is not None:
            break
        pieces.append(text.take(finished=False))
        seen.append(("".join(pieces), taken, text.num_held_tokens))
    text.finish()
    pieces.append(text.take(finished=True))
    return ("".join(pieces), ids[:taken], text.matched), seen


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[int]]:
    name = draw(st.sampled_from(TOKENIZERS))
    tokenizer = built(name)
    text = draw(st.text(LETTERS, max_size=20))
    if name != "unigram_metaspace" and draw(st.booleans()):
        return name, ids_of_bytes(tokenizer, text.encode())
    return name, tokenizer.encode(text, add_special_tokens=False)


some_cuts = st.lists(st.integers(0, 80), max_size=12)


@given(
    outputs(),
    some_cuts,
    st.lists(patterns.filter(is_possible), min_size=1, max_size=2),
    st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=1),
    st.booleans(),
    st.integers(0, 4),
)
@example(("byte_level", [*range(4, 20)]), [], [r"\w+"], [], False, 3)
def test_equal_to_a_search_in_the_whole_text(
    output: tuple[str, list[int]], cuts: list[int], some: list[str], stop: list[str], include: bool, min_tokens: int
) -> None:
    """The deltas joined are the text up to the match, however it comes; what was given is never taken back."""
    name, ids = output
    tokenizer = built(name)
    assume(all("\ufffd" not in decoded(tokenizer, ids[:count]) for count in range(len(ids) + 1)))  # broken characters
    text = PatternText(tokenizer.detokenizer([]), stop, some, clock=no_time, include=include, min_tokens=min_tokens)
    found, seen = streamed(text, ids, cuts)
    expected = naive(tokenizer, ids, stop, some, include, min_tokens)
    assert found == expected
    for given_text, num_ids, num_held in seen:
        assert expected[0].startswith(given_text)
        assert given_text.startswith(decoded(tokenizer, ids[: num_ids - num_held]))
        assert decoded(tokenizer, ids[:num_ids]).startswith(given_text)


@given(outputs(), some_cuts, st.lists(st.text(LETTERS + "{}[]^$.\\", min_size=1, max_size=3), min_size=1, max_size=3),
       st.booleans(), st.integers(0, 4))  # fmt: skip
def test_an_escaped_text_is_a_stop_string(
    output: tuple[str, list[int]], cuts: list[int], stop: list[str], include: bool, min_tokens: int
) -> None:
    tokenizer = built(output[0])
    rules: dict[str, Any] = {"include": include, "min_tokens": min_tokens}
    escaped = [re.escape(s) for s in stop]
    text = PatternText(tokenizer.detokenizer([]), [], escaped, clock=no_time, **rules)
    found, _ = streamed(text, output[1], cuts)
    expected, _ = streamed(StopText(tokenizer.detokenizer([]), stop, **rules), output[1], cuts)
    matched = None if expected[2] is None else re.escape(expected[2])
    assert found == (expected[0], expected[1], matched)


def given_out(stop: list[str], some: list[str], data: str, **rules: Any) -> tuple[list[str], str | None]:
    """What each byte token gives, and the rest; and what matched."""
    tokenizer = built("byte_level")
    text = PatternText(tokenizer.detokenizer([]), stop, some, clock=no_time, **rules)
    pieces = []
    for token in ids_of_bytes(tokenizer, data.encode()):
        text.push([token])
        if text.matched is not None:
            break
        pieces.append(text.take(finished=False))
    text.finish()
    return [*pieces, text.take(finished=True)], text.matched


def test_only_what_may_become_a_match_is_held_back() -> None:
    given_text, matched = given_out([], [r"\n\n+Q[0-9]*:"], "a b\nc\n\nQ1x.")
    assert given_text == ["a", " ", "b", "", "\nc", "", "", "", "", "\n\nQ1x", ".", ""]
    assert matched is None
    assert given_out([], [r"Q[0-9]+:"], "aQ12:b") == (["a", "", "", "", ""], "Q[0-9]+:")
    assert given_out([], [r"Q[0-9]+:"], "aQ12:b", include=True) == (["a", "Q", "1", "2", ":"], "Q[0-9]+:")


@pytest.mark.parametrize(
    ("pattern", "text", "left", "kept"),
    [
        ("a+", "baaa", "b", "ba"),  # ends with the first character that it can end with
        ("a+?", "baaa", "b", "ba"),
        ("a.*b", "xaybzb", "x", "xayb"),  # greedy or not
        (r"\w+\.", "hello you.", "hello ", "hello you."),  # begins where it can begin first
        ("b|ab", "ab", "", "ab"),
        (r"(?<=\.) END", "a END. END", "a END.", "a END. END"),
        (r"(?m)^END", "xEND\nEND", "xEND\n", "xEND\nEND"),
        (r"^END", "x\nEND", "x\nEND", "x\nEND"),
        (r"\bEND", "xEND END", "xEND ", "xEND END"),
        (".+?(?<!a)b", "za b", "", "za b"),  # a lazy repeat may take more than what stands there
        ("(?x) E N D  # the end", "an END", "an ", "an END"),
        ("x{e<=1}", "yx{e<=1}", "y", "yx{e<=1}"),  # fuzzy, to the package that searches
        ("[[:alpha:]]x", "ax:]x", "ax", "ax:]x"),  # a POSIX class, to the same
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")  # the last one's, of re
def test_where_a_match_is(pattern: str, text: str, left: str, kept: str) -> None:
    matched = None if left == text else pattern
    for include, expected in ((False, left), (True, kept)):
        pieces, found = given_out([], [pattern], text, include=include)
        assert ("".join(pieces), found) == (expected, matched)


def test_the_earliest_of_all_wins_and_a_string_at_a_tie() -> None:
    assert given_out(["cd"], ["b.", "abc"], "abcd") == (["", "", "a"], "b.")
    assert given_out(["bc"], ["b."], "abcd")[1] == "bc"
    assert given_out(["cd"], ["d"], "abcd")[1] == "cd"
    assert given_out(["ab"], ["b."], "abcd")[1] == "ab"


def test_an_atomic_match_does_not_depend_on_the_tokens() -> None:
    """The pattern matches `h`, and nothing in `he`: the output ends there, although one token brings both."""
    tokenizer = built("byte_level")
    (token,) = tokenizer.encode("he", add_special_tokens=False)
    for ids in ([token], ids_of_bytes(tokenizer, b"he")):
        text = PatternText(tokenizer.detokenizer([]), [], ["(?>he|h)(?<=h)"], clock=no_time)
        assert (text.push(ids), text.matched, text.take(finished=True)) == (1, "(?>he|h)(?<=h)", "")


@pytest.mark.parametrize("length", [100, 10_000])
def test_what_is_kept_does_not_grow(length: int) -> None:
    tokenizer = built("byte_level")
    text = PatternText(tokenizer.detokenizer([]), [], [r"(?<=abcd)\n+Q"], clock=no_time)
    for token in ids_of_bytes(tokenizer, b"x" * length):
        text.push([token])
        text.take(finished=False)
    assert len(text._text) < 16 and len(text._ends) < 16


@pytest.mark.parametrize("clock", [thread_time, no_time])
def test_a_pattern_that_takes_too_long_is_named(clock: Callable[[], float]) -> None:
    tokenizer = built("byte_level")
    text = PatternText(tokenizer.detokenizer([]), [], ["(a|aa|aaa)+b"], clock=clock)
    with pytest.raises(ValueError, match=r"\(a\|aa\|aaa\)\+b' takes more than 2 ms for each token .* \d+ characters"):
        text.push(ids_of_bytes(tokenizer, b"a" * 200))


@pytest.mark.parametrize(
    ("num_patterns", "search_ms", "num_tokens"),
    [(1, 0.9, None), (1, 1.1, 239), (2, 0.45, None), (2, 2.0, 8), (16, 1.0, 1)],
)
def test_all_searches_of_an_output_share_its_time(num_patterns: int, search_ms: float, num_tokens: int | None) -> None:
    """Two searches for each pattern and token: 2 ms are always allowed, and 50 once."""
    ticks = itertools.count()

    def clock() -> float:  # begin and end of each search
        return (next(ticks) + 1) // 2 * search_ms / 1000

    tokenizer = built("byte_level")
    patterns = [f"x{number}" for number in range(num_patterns)]
    text = PatternText(tokenizer.detokenizer([]), [], patterns, clock=clock)
    (letter,) = ids_of_bytes(tokenizer, b"a")
    if num_tokens is None:
        text.push([letter] * 1000)
        return
    text.push([letter] * (num_tokens - 1))
    with pytest.raises(ValueError, match="takes more than 2 ms for each token"):
        text.push([letter] * 3)


@pytest.mark.parametrize(
    ("patterns", "words"), [(["a"] * 17, "at most 16"), (["a" * 1001], "1001 characters: use at most 1000")]
)
def test_how_many_and_how_long(patterns: list[str], words: str) -> None:
    SamplingParams(stop_regex=["a" * 1000] * 16)
    with pytest.raises(RequestRejected, match=words):
        SamplingParams(stop_regex=patterns)


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "regex", None)
    with pytest.raises(RequestRejected, match="needs the package regex") as refused:
        compile_pattern("a pattern of this test only")
    assert (refused.value.parameter, refused.value.remedy) == (
        "stop_regex",
        'pip install "anyengine[text]", or use stop',
    )
