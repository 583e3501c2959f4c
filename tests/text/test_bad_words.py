"""Bad words as token sequences: the rule is vLLM's, written out here a second time, word by word."""

from __future__ import annotations

import built_tokenizers
import pytest

from anyengine import RequestRejected
from anyengine._text import ModelFacts, Tokenizer, tokenize_bad_words

BUILDERS = [built_tokenizers.byte_level, built_tokenizers.byte_fallback]


@pytest.fixture(params=BUILDERS, ids=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(request.param(), ModelFacts(directory="built"))


def expected(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    sequences = []
    for word in words:
        for prefix in ("", " "):
            ids = tokenizer._backend.encode(prefix + word.lstrip(), add_special_tokens=False).ids
            if not prefix or (ids and ids[0] != sequences[-1][0] and len(ids) == len(sequences[-1])):
                sequences.append(ids)
    return sequences


@pytest.mark.feature("R26")
def test_with_and_without_a_space_before(tokenizer: Tokenizer) -> None:
    words = ["The", "quick", " fox", "ü", "dog", "is"]
    assert tokenize_bad_words(tokenizer, words) == expected(tokenizer, words)
    assert tokenize_bad_words(tokenizer, ["fox", "fox"]) == expected(tokenizer, ["fox"])  # said once


def test_refused(tokenizer: Tokenizer) -> None:
    for words, hint in (([" "], "has no tokens"), ([f"w{n}" for n in range(129)], "128 are possible")):
        with pytest.raises(RequestRejected, match=hint) as caught:
            tokenize_bad_words(tokenizer, words)
        assert (caught.value.parameter, bool(caught.value.remedy)) == ("bad_words", True)
    tokenizer.vocab_size = 1
    with pytest.raises(RequestRejected, match="unknown to the model"):
        tokenize_bad_words(tokenizer, ["fox"])
