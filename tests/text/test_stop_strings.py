"""Stop strings against a naive search in the whole decoded text, for every framing of the tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from built_tokenizers import built, ids_of_bytes
from hypothesis import assume, example, given
from hypothesis import strategies as st

from anyengine._text import Tokenizer
from anyengine._text.stop_strings import StopText

TOKENIZERS = ["byte_level", "byte_fallback", "byte_level_in_sequence", "unigram_metaspace"]
LETTERS = "ab🦙é "


@dataclass
class Result:
    """What a consumer has in the end, and what it had after each frame."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    matched: str | None = None
    seen: list[tuple[str, int, int]] = field(default_factory=list)  # text so far, ids so far, held ids


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The certain text of ``ids`` if the output ended there, save for an unfinished character."""
    detokenizer = tokenizer.detokenizer([])
    return detokenizer.push(ids) + detokenizer.peek()


def naive(tokenizer: Tokenizer, ids: list[int], stop: list[str], include: bool, min_tokens: int) -> Result:
    """Decode every prefix of the output from scratch; the first one with a match, ended behind the first tokens, ends
    it."""
    first = [decoded(tokenizer, ids[:count]) for count in range(min_tokens + 1)]
    floor = max(len(text) for text in first if "\ufffd" not in text)  # what was complete by then, spoilt later or not
    for count in range(min_tokens + 1, len(ids) + 1):
        text = decoded(tokenizer, ids[:count])
        ends = {
            (begin + len(one), index): (begin, one)
            for index, one in enumerate(stop)
            for begin in range(len(text))
            if text.startswith(one, begin) and begin + len(one) > floor
        }
        if ends:
            begin, one = ends[min(ends)]
            return Result(text[: begin + len(one) if include else begin], ids[:count], one)
    detokenizer = tokenizer.detokenizer([])
    return Result(detokenizer.push(ids) + detokenizer.finish(), ids)


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], stop: list[str], **rules: Any) -> Result:
    """As a client does it, frame by frame."""
    stopper = StopText(tokenizer.detokenizer([]), stop, **rules)
    result = Result()
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for start, end in pairwise(edges):
        frame = ids[start:end]
        kept = stopper.push(frame)
        result.ids += frame[:kept]
        if stopper.matched is not None:
            break
        result.text += stopper.take(finished=False)
        result.seen.append((result.text, len(result.ids), stopper.num_held_tokens))
    stopper.finish()
    result.text += stopper.take(finished=True)
    result.matched = stopper.matched
    return result


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[int], list[str]]:
    name = draw(st.sampled_from(TOKENIZERS))
    tokenizer = built(name)
    text = draw(st.text(LETTERS, max_size=24))
    if name != "unigram_metaspace" and draw(st.booleans()):
        ids = ids_of_bytes(tokenizer, text.encode())
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    noise = draw(st.lists(st.tuples(st.integers(0, len(ids)), st.integers(0, 259)), max_size=2))
    for position, token in noise:  # special tokens, stray bytes
        ids.insert(position, token)
    stop = draw(st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3))
    return name, ids, stop


@pytest.mark.feature("R07", "R09")
@pytest.mark.case("K46", "K48")
@given(cases(), st.lists(st.integers(0, 90), max_size=12), st.booleans(), st.integers(0, 5))
@example(("byte_level", [*range(4, 20)], ["x"]), [], False, 3)
def test_equal_to_a_search_in_the_whole_text(
    case: tuple[str, list[int], list[str]], cuts: list[int], include: bool, min_tokens: int
) -> None:
    name, ids, stop = case
    tokenizer = built(name)
    found = streamed(tokenizer, ids, cuts, stop, include=include, min_tokens=min_tokens)
    expected = naive(tokenizer, ids, stop, include, min_tokens)
    assume("\ufffd" not in expected.text)  # bytes that became text and were spoilt later: what was seen has changed
    assert (found.text, found.ids, found.matched) == (expected.text, expected.ids, expected.matched)
    for text, num_ids, num_held in found.seen:
        assert expected.text.startswith(text) or not include
        # What has been declared as not held is in the text, and the text is of no more than the ids.
        assert text.startswith(decoded(tokenizer, ids[: num_ids - num_held]))
        assert decoded(tokenizer, ids[:num_ids]).startswith(text)


def test_what_is_held_back_is_one_character_less_than_the_longest() -> None:
    tokenizer = built("byte_level")
    stopper = StopText(tokenizer.detokenizer([]), ["abcd", "xy"])
    given_text = []
    for token in ids_of_bytes(tokenizer, b"hello abc."):
        stopper.push([token])
        given_text.append(stopper.take(finished=False))
    assert given_text == ["", "", "", "h", "e", "l", "l", "o", " ", "a"]
    assert stopper.num_held_tokens == 3
    stopper.finish()
    assert stopper.take(finished=True) == "bc."
    assert stopper.num_held_tokens == 0


def test_a_run_of_byte_tokens_counts_as_if_it_ended() -> None:
    """Nobody waits for the token after the character that was to stop the output."""
    tokenizer = built("byte_fallback")
    stopper = StopText(tokenizer.detokenizer([]), ["🦙"])
    ids = ids_of_bytes(tokenizer, "é🦙€".encode())
    assert [stopper.push([token]) for token in ids[:5]] == [1] * 5
    assert stopper.matched is None
    assert stopper.push(ids[5:]) == 1
    assert stopper.matched == "🦙"
    assert stopper.take(finished=True) == "é"


def test_the_token_that_ended_it_adds_no_text_and_counts() -> None:
    tokenizer = built("byte_level")
    stopper = StopText(tokenizer.detokenizer([]), ["zz"])
    ids = ids_of_bytes(tokenizer, b"abz")
    assert stopper.push(ids, last_is_silent=True) == 3
    stopper.finish()
    assert stopper.take(finished=True) == "ab"
    assert stopper.matched is None


@pytest.mark.parametrize("length", [10, 10_000])
def test_what_is_kept_does_not_grow(length: int) -> None:
    tokenizer = built("byte_level")
    stopper = StopText(tokenizer.detokenizer([]), ["abcdefgh"])
    for token in ids_of_bytes(tokenizer, b"x" * length):
        stopper.push([token])
        stopper.take(finished=False)
    assert len(stopper._text) < 16 and len(stopper._ends) < 16


@pytest.mark.feature("R07")
@pytest.mark.parametrize(("stop", "taken"), [(". ", 6), ("👩", 6), (". 👩", 6), ("x", 7)])
def test_a_run_of_bytes_that_begins_within_min_tokens(stop: str, taken: int) -> None:
    """What was complete within the first four tokens does not count, although the run that it is in went on; what is
    complete behind them does."""
    tokenizer = built("byte_fallback")
    ids = ids_of_bytes(tokenizer, ". 👩".encode())
    assert len(ids) == 6
    text = StopText(tokenizer.detokenizer(()), [stop], min_tokens=4)
    kept = text.push([*ids, *ids_of_bytes(tokenizer, b"x")])
    assert (kept, text.matched) == ((taken, stop) if stop != ". " else (7, None))
