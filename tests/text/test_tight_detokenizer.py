"""Added tokens that follow each other, without the spaces that a decoder puts between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from built_tokenizers import BUILDERS, built
from hypothesis import given
from hypothesis import strategies as st

from anyengine._text import Tokenizer

SPACED = ["no_decoder", "word_piece"]


def joined(tokenizer: Tokenizer, ids: list[int], **options: bool) -> str:
    detokenizer = tokenizer.detokenizer([], **options)
    return "".join([detokenizer.push([token]) for token in ids]) + detokenizer.finish()


@pytest.mark.feature("R19")
@pytest.mark.parametrize("name", SPACED)
def test_pairs_of_added_tokens(name: str) -> None:
    tokenizer = built(name)
    start, end = (tokenizer._backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    word = tokenizer.encode("the", add_special_tokens=False)
    ids = [start, end, start, *word, end, start]
    spaced = joined(tokenizer, ids, skip_special_tokens=False)
    tight = joined(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert spaced.startswith("<|im_start|> <|im_end|> <|im_start|> ")
    assert tight.startswith("<|im_start|><|im_end|><|im_start|> ")  # the space before a word stays
    assert tight.endswith(" <|im_end|><|im_start|>")
    hidden = joined(tokenizer, ids, spaces_between_special_tokens=False)
    assert hidden == joined(tokenizer, ids)  # nothing to be tight about


@pytest.mark.parametrize("name", sorted(BUILDERS))
@given(data=st.data())
def test_only_spaces_between_added_tokens_go(name: str, data: st.DataObject) -> None:
    """Against a decode of each run of added tokens by itself."""
    tokenizer = built(name)
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size - 1), max_size=20))
    tight = joined(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    spaced = joined(tokenizer, ids, skip_special_tokens=False)
    assert tight.replace(" ", "") == spaced.replace(" ", "")
    added = tokenizer._backend.get_added_tokens_decoder()
    if not any(first in added and second in added for first, second in pairwise(ids)):
        assert tight == spaced
