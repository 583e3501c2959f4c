"""A panic of the Rust code is an ordinary error of the one who called."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from anyengine._text.panics import calling_rust


class PanicException(BaseException):
    pass


def test_a_panic_is_a_value_error() -> None:
    def panics() -> None:
        raise PanicException("index out of bounds")

    with pytest.raises(ValueError, match="panicked: index out of bounds"):
        calling_rust(panics)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, TypeError])
def test_everything_else_passes(error: type[BaseException]) -> None:
    def raises() -> None:
        raise error

    with pytest.raises(error):
        calling_rust(raises)


def test_results_pass() -> None:
    tokenizer: Any = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" "), "removed")
    assert calling_rust(tokenizer.encode, "a c a", add_special_tokens=False).ids == [0, 1, 0]
