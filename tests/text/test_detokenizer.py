"""The pieces of a detokenizer are the one-shot decode, for every kind of tokenizer, every split and every id."""

from __future__ import annotations

from itertools import pairwise

import pytest
from built_tokenizers import BUILDERS, built, ids_of_bytes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anyengine._text import Tokenizer
from anyengine._text.detokenizer import ByteLevelDetokenizer, WindowDetokenizer

ALL = sorted(BUILDERS)
INVALID = [-1, -(2**40), 2**31, 2**32, 2**70, 10**6]


def expected_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """What ``output`` adds to ``prompt``, from two one-shot decodes."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    after = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    shared = 0
    while shared < min(len(before), len(after)) and before[shared] == after[shared]:
        shared += 1
    return after[shared:]


def pieces_of(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], cuts: list[int], skip: bool = True
) -> list[str]:
    """The pieces when ``output`` arrives in chunks that end at ``cuts``."""
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    edges = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    chunks = [output[start:end] for start, end in pairwise(edges)]
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Lists that hit bytes and special tokens often, and ids that are no token now and then."""
    anything = st.integers(0, tokenizer.vocab_size - 1)
    low = st.integers(0, min(tokenizer.vocab_size, 270) - 1)  # special tokens and the byte alphabet are trained first
    return st.lists(st.one_of(low, anything, st.sampled_from(INVALID)), max_size=40)


@pytest.mark.feature("O11")
@pytest.mark.case("K45")
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_one_shot_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = built(name)
    prompt = [token for token in data.draw(token_ids(tokenizer), label="prompt") if token >= 0]
    output = data.draw(token_ids(tokenizer), label="output")
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=40), label="cuts")
    pieces = pieces_of(tokenizer, prompt, output, cuts, skip)
    assert "".join(pieces) == expected_text(tokenizer, prompt, output, skip)


@pytest.mark.case("K45")
@pytest.mark.parametrize("name", ["byte_level", "byte_level_in_sequence", "byte_fallback"])
@settings(max_examples=150, deadline=None)
@given(
    data=st.binary(max_size=24),
    split=st.integers(0, 24),
    cuts=st.lists(st.integers(0, 24), max_size=24),
    end=st.sampled_from(["", "b"]),
)
@example(data="🦙".encode() * 2, split=2, cuts=list(range(24)), end="b")
@example(data=b"\xf0\x9f\xa6H", split=3, cuts=[], end="")
@example(data=b"\xf0\x9f\xa6", split=1, cuts=[1], end="")
@example(data=b"\xed\xa0", split=2, cuts=[], end="")
@example(data=b"\xed\xa0\xbf", split=1, cuts=[1], end="b")
@example(data=b"\xe2\x82\xac\xff\xe2\x82\xac", split=3, cuts=list(range(24)), end="b")
def test_arbitrary_bytes_split_between_prompt_and_output(
    name: str, data: bytes, split: int, cuts: list[int], end: str
) -> None:
    tokenizer = built(name)
    ids = tokenizer.encode("a", add_special_tokens=False) + ids_of_bytes(tokenizer, data)
    prompt, output = ids[: split + 1], ids[split + 1 :]
    output += tokenizer.encode(end, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, prompt, output, cuts)) == expected_text(tokenizer, prompt, output, True)


@pytest.mark.case("K45")
@pytest.mark.parametrize("name", ["byte_level", "byte_level_in_sequence", "byte_fallback"])
def test_every_split_of_a_real_text(name: str) -> None:
    """At every point between prompt and output, token by token: no U+FFFD ever, and nothing of the prompt."""
    tokenizer = built(name)
    ids = tokenizer.encode("The capital: 東京 🦙👩‍👩‍👧, is Москва!")
    whole = tokenizer.decode(ids)
    assert "�" not in whole
    for split in range(len(ids) + 1):
        pieces = pieces_of(tokenizer, ids[:split], ids[split:], list(range(len(ids))))
        text = "".join(pieces)
        assert "�" not in text
        assert whole.endswith(text)
        assert text == expected_text(tokenizer, ids[:split], ids[split:], True)


@pytest.mark.parametrize("name", ALL)
def test_text_without_a_prompt_is_the_decode_of_the_output_alone(name: str) -> None:
    tokenizer = built(name)
    ids = tokenizer.encode("the paris is.", add_special_tokens=False) * 8
    assert "".join(pieces_of(tokenizer, [], ids, list(range(len(ids))))) == tokenizer.decode(ids)


def test_text_is_given_as_soon_as_it_is_certain() -> None:
    """A whole character is given at once, a cut one with its last byte."""
    for name in ("byte_level", "byte_level_in_sequence"):
        tokenizer = built(name)
        detokenizer = tokenizer.detokenizer([])
        given_after_each = [detokenizer.push([token]) for token in ids_of_bytes(tokenizer, "aé🦙".encode())]
        assert given_after_each == ["a", "", "é", "", "", "", "🦙"]
        assert detokenizer.finish() == ""


def test_a_run_of_byte_tokens_is_given_when_it_ends() -> None:
    """A later byte of the run could still spoil all of it."""
    tokenizer = built("byte_fallback")
    detokenizer = tokenizer.detokenizer([])
    assert [detokenizer.push([token]) for token in ids_of_bytes(tokenizer, "🦙€".encode())] == [""] * 7
    assert detokenizer.push(tokenizer._backend.encode("a", add_special_tokens=False).ids) == "🦙€ a"


def test_the_space_after_a_prompt_is_kept() -> None:
    """SentencePiece strips the first space of a text; an output is not the beginning of one."""
    tokenizer = built("byte_fallback")
    prompt = tokenizer.encode("the capital")
    output = tokenizer.encode("of the", add_special_tokens=False)
    assert tokenizer.decode(output) == "of the"
    assert "".join(pieces_of(tokenizer, prompt, output, [1, 2])) == " of the"


@pytest.mark.parametrize("name", ALL)
def test_special_tokens_are_skipped_or_kept(name: str) -> None:
    tokenizer = built(name)
    end = tokenizer._backend.token_to_id("<|im_end|>")
    assert "".join(pieces_of(tokenizer, [], [end], [], skip=True)) == ""
    assert "".join(pieces_of(tokenizer, [], [end], [], skip=False)) == "<|im_end|>"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("invalid", INVALID)
def test_an_id_that_is_no_token_adds_nothing(name: str, invalid: int) -> None:
    tokenizer = built(name)
    ids = tokenizer.encode("the paris", add_special_tokens=False)
    with_invalid = [token for pair in ids for token in (invalid, pair, invalid)]
    assert "".join(pieces_of(tokenizer, [], with_invalid, [1, 2, 3])) == tokenizer.decode(ids)


def test_ids_that_are_no_token_are_not_remembered() -> None:
    """The vocabulary views are shared by all requests and live as long as the client."""
    for name in ("byte_level", "byte_fallback"):
        tokenizer = built(name)
        tokenizer.detokenizer([]).push(range(10**6, 10**6 + 1000))
        assert len(tokenizer._vocabularies[True]) <= tokenizer.vocab_size


def test_the_table_serves_byte_level_decoders_only() -> None:
    for name in ALL:
        kind = ByteLevelDetokenizer if name == "byte_level" else WindowDetokenizer
        assert type(built(name).detokenizer([])) is kind


@pytest.mark.parametrize("name", ALL)
def test_the_window_stays_small(name: str) -> None:
    """The cost of a token does not grow with the length of its output."""
    tokenizer = built(name)
    detokenizer = tokenizer.detokenizer([])
    if isinstance(detokenizer, WindowDetokenizer):
        for token in tokenizer.encode("the paris is. " * 50, add_special_tokens=False):
            detokenizer.push([token])
            assert len(detokenizer._window) <= WindowDetokenizer._LIMIT
