"""Admission: what is refused before anything is sent, and what the refusal says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._protocol import EngineLimits, check_prompt, check_token_ids, output_budget
from anyengine.exceptions import RequestRejected

LIMITS = EngineLimits(max_model_len=8, vocab_size=100)
ARRAY = np.array([1, 2, 3])
TEXT_OR_IDS = "give a str, or a sequence of ints"
PLAIN_INTS = "give plain ints (for an array: .tolist())"
OWN_TOKENIZER = "use the tokenizer of the model that the engine serves"


def generator() -> Iterator[int]:
    yield 1


BAD_PROMPTS: dict[str, tuple[Any, Any, str, str]] = {
    # name: prompt, .value, part of the message, part of the remedy
    "empty": ([], [], "the prompt is empty", "at least one token"),
    "empty tuple": ((), [], "the prompt is empty", "at least one token"),
    "text given as ids": ("Paris", "Paris", "prompt='Paris' is neither text nor", TEXT_OR_IDS),
    "bytes": (b"Paris", b"Paris", "prompt=b'Paris'", TEXT_OR_IDS),
    "None": (None, None, "prompt=None", TEXT_OR_IDS),
    "a number": (7, 7, "prompt=7", TEXT_OR_IDS),
    "a set, which has no order": ({1, 2}, {1, 2}, "prompt={1, 2}", TEXT_OR_IDS),
    "a mapping": ({1: 2}, {1: 2}, "prompt={1: 2}", TEXT_OR_IDS),
    "long text": ("x" * 1000, "x" * 1000, "prompt='xxx", TEXT_OR_IDS),
    "bool": ([1, True], True, "prompt[1]=True is a bool", PLAIN_INTS),
    "float": ([1, 2.0], 2.0, "prompt[1]=2.0 is a float", PLAIN_INTS),
    "str": (["1"], "1", "prompt[0]='1' is a str", PLAIN_INTS),
    "None inside": ([1, 2, None], None, "prompt[2]=None is a NoneType", PLAIN_INTS),
    "a batch": ([[1, 2]], [1, 2], "prompt[0]=[1, 2] is a list", PLAIN_INTS),
    "numpy ints": ([1, np.int64(2)], np.int64(2), "is an int64, not an int", PLAIN_INTS),
    "numpy array": (ARRAY, np.int64(1), "is an int64, not an int", PLAIN_INTS),
    "negative": ([5, -3, 7], -3, "token id -3 is outside the vocabulary (0 to 99)", OWN_TOKENIZER),
    "too large": ([5, 100, 7], 100, "token id 100 is outside the vocabulary (0 to 99)", OWN_TOKENIZER),
    "beyond 64 bits": ([1 << 70], 1 << 70, f"token id {1 << 70}", OWN_TOKENIZER),
    "as long as the model": (
        [1] * 8,
        8,
        "the prompt has 8 tokens; the engine's max_model_len is 8",
        "at most 7 tokens",
    ),
    "longer": ([1] * 50, 50, "the prompt has 50 tokens", "larger max_model_len"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_parameter_value_and_remedy(name: str) -> None:
    prompt, value, message, remedy = BAD_PROMPTS[name]
    with pytest.raises(RequestRejected) as caught:
        check_prompt(prompt, LIMITS, request_id="label")
    error = caught.value
    assert isinstance(error, ValueError)
    assert error.parameter == "prompt"
    assert error.value == value
    assert type(error.value) is type(value)
    assert message in str(error)
    assert len(str(error)) < 250  # a long value is shortened in the text
    assert error.remedy is not None
    assert remedy in error.remedy
    assert error.request_id == "label"


@pytest.mark.parametrize(
    "prompt",
    [[0], [99], [1] * 7, (1, 2), range(3), generator()],
    ids=["least", "most", "longest", "tuple", "range", "generator"],
)
def test_a_good_prompt_passes(prompt: Any) -> None:
    checked = check_prompt(prompt, LIMITS)
    assert type(checked) is list
    assert all(type(token_id) is int for token_id in checked)


def test_the_result_is_a_private_copy() -> None:
    prompt = [1, 2, 3]
    checked = check_prompt(prompt, LIMITS)
    prompt[0] = 99
    prompt.append(4)
    assert checked == [1, 2, 3]
    checked.append(5)
    assert prompt == [99, 2, 3, 4]


def test_without_a_known_vocabulary_only_the_sign_is_checked() -> None:
    unknown = EngineLimits(max_model_len=8)
    assert check_prompt([1 << 40], unknown) == [1 << 40]
    with pytest.raises(RequestRejected, match=r"token id -1 .* \(unknown\)"):
        check_prompt([-1], unknown)


def test_token_ids_of_another_parameter_are_named_after_it() -> None:
    check_token_ids([], 10, parameter="stop_token_ids")
    with pytest.raises(RequestRejected, match="stop_token_ids: token id 10") as caught:
        check_token_ids([3, 10], 10, parameter="stop_token_ids")
    assert (caught.value.parameter, caught.value.value) == ("stop_token_ids", 10)


@pytest.mark.parametrize("spoilt", [None, True, -1, 1 << 20], ids=["good", "a bool", "negative", "too large"])
def test_a_million_token_ids_are_checked_in_no_time(spoilt: Any) -> None:
    prompt = [7] * 1_000_000
    if spoilt is not None:
        prompt[-1] = spoilt
    limits = EngineLimits(max_model_len=2_000_000, vocab_size=50_000)
    start_s = time.thread_time()  # this thread's own CPU time: other work on the machine does not count
    if spoilt is None:
        assert check_prompt(prompt, limits) == prompt
    else:
        with pytest.raises(RequestRejected):
            check_prompt(prompt, limits)
    assert time.thread_time() - start_s < 0.5


# ------------------------------------------------------------------------------------------------------- output budget


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "budget"),
    [(None, 0, 5), (None, 5, 5), (2, 0, 2), (2, 2, 2), (5, 0, 5), (6, 0, 5), (1000, 5, 5)],
)
def test_the_budget_is_what_was_asked_or_what_is_left(max_tokens: int | None, min_tokens: int, budget: int) -> None:
    assert output_budget(3, max_tokens, min_tokens, LIMITS) == budget


@pytest.mark.parametrize(("max_tokens", "min_tokens"), [(None, 6), (2, 3), (1000, 6)])
def test_min_tokens_that_cannot_be_reached(max_tokens: int | None, min_tokens: int) -> None:
    with pytest.raises(RequestRejected) as caught:
        output_budget(3, max_tokens, min_tokens, LIMITS, request_id="label")
    error = caught.value
    assert (error.parameter, error.value, error.request_id) == ("min_tokens", min_tokens, "label")
    assert f"max_tokens={max_tokens}, max_model_len=8, prompt of 3" in str(error)
    assert error.remedy == "lower min_tokens, raise max_tokens, or shorten the prompt"


@given(st.lists(st.integers(-2, 12), max_size=12), st.integers(2, 10), st.integers(1, 10) | st.none())
def test_what_passes_is_what_an_engine_can_run(ids: list[int], max_model_len: int, vocab_size: int | None) -> None:
    limits = EngineLimits(max_model_len, vocab_size)
    good = 0 < len(ids) < max_model_len and all(0 <= token_id < (vocab_size or 1 << 63) for token_id in ids)
    if good:
        assert check_prompt(ids, limits) == ids
        assert 1 <= output_budget(len(ids), None, 0, limits) == max_model_len - len(ids)
    else:
        with pytest.raises(RequestRejected):
            check_prompt(ids, limits)
