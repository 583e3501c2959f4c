"""The texts of single tokens, as lists of log-probabilities show them."""

from __future__ import annotations

import built_tokenizers
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from anyengine._text import ModelFacts, Tokenizer


def texts_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_texts(token, ids[max(0, i - 4) : i]) for i, token in enumerate(ids)]


def bytes_only() -> Tokenizer:
    """Every byte is a token: none reaches from one character into another."""
    backend = Backend(models.BPE({piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, ModelFacts(directory="built"))


@pytest.mark.feature("O12")
@pytest.mark.parametrize("text", ["Zażółć 🦙🚀 x", "plain words", "東京都 and 👩‍👩‍👧"])
def test_the_texts_of_all_tokens_are_the_text(text: str) -> None:
    """A token that is a part of a character is empty; the one that completes it has all of it."""
    tokenizer = bytes_only()
    texts = texts_of(tokenizer, tokenizer.encode(text))
    assert "".join(texts) == text
    assert len(texts) == len(text.encode())


def test_an_emoji_of_four_tokens() -> None:
    tokenizer = Tokenizer(built_tokenizers.byte_fallback(), ModelFacts(directory="built"))
    ids = [
        token
        for token in tokenizer.encode("🤖", add_special_tokens=False)
        if "<0x" in tokenizer._backend.id_to_token(token)
    ]
    assert len(ids) == 4
    assert texts_of(tokenizer, ids) == ["", "", "", "🤖"]


def test_alternatives_are_read_after_what_was_said() -> None:
    tokenizer = Tokenizer(built_tokenizers.byte_level(), ModelFacts(directory="built"))
    first, second = tokenizer._backend.token_to_id("Ã"), tokenizer._backend.token_to_id("¼")  # the bytes of ü
    assert tokenizer.token_texts(second, [first]) == "ü"
    assert tokenizer.token_texts(second, [second]) == ""
    assert tokenizer.token_texts(tokenizer.encode("x")[0], [first]) == "x"


def test_a_space_that_decoding_strips_is_kept() -> None:
    """SentencePiece-like tokenizers: a piece with a marker begins with a space, wherever it stands."""
    backend = Backend(models.WordLevel({"▁a": 0, "a": 1, "▁▁b": 2, "<unk>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, ModelFacts(directory="built"))
    assert [tokenizer.token_texts(token, []) for token in (0, 1, 2)] == [" a", "a", "  b"]
