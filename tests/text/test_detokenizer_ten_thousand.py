"""10,000 random id sequences on each of four tokenizers: the default model's, and three that were built to be nasty."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from built_tokenizers import built
from test_detokenizer import INVALID, expected_text

from anyengine._text import Tokenizer
from anyengine.engine.models import resolve_model

SEQUENCES = 10_000
NASTY = ["byte_level", "byte_fallback", "word_piece"]  # ... bytes of bytes, runs of bytes, many added tokens


def check_sequences(tokenizer: Tokenizer, seed: int) -> None:
    """Random prompts, outputs and chunks, token by token or several at once, with ids that are no token among them."""
    rng = random.Random(seed)
    with_replacement = 0
    for number in range(SEQUENCES):
        top = tokenizer.vocab_size if number % 2 else min(tokenizer.vocab_size, 270)  # bytes and special tokens are low
        ids = [rng.randrange(top) if rng.random() < 0.97 else rng.choice(INVALID) for _ in range(rng.randrange(1, 24))]
        split = rng.randrange(len(ids))
        prompt, output = [token for token in ids[:split] if token >= 0], ids[split:]
        skip = rng.random() < 0.5
        detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
        pieces, start = [], 0
        while start < len(output):
            end = start + rng.choice([1, 1, 1, 2, 5])
            pieces.append(detokenizer.push(output[start:end]))
            start = end
        pieces.append(detokenizer.finish())
        text = "".join(pieces)
        assert text == expected_text(tokenizer, prompt, output, skip), (prompt, output, skip)
        with_replacement += "\ufffd" in text
    assert with_replacement or "Byte" not in "".join(tokenizer._decoder_types)  # they were nasty


@pytest.mark.feature("O11")
@pytest.mark.case("K45")
@pytest.mark.parametrize("name", NASTY)
def test_built_tokenizers(name: str) -> None:
    check_sequences(built(name), seed=1)


@pytest.mark.feature("O11")
@pytest.mark.case("K45")
@pytest.mark.model
def test_the_default_models_tokenizer() -> None:
    model = resolve_model("smollm2-135m", lambda _status: None)
    check_sequences(Tokenizer.from_directory(Path(model.model_dir)), seed=2)
