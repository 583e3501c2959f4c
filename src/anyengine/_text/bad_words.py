"""Words that must not appear, as the token sequences that an engine forbids.

Owns the rule by which a word becomes sequences; it is vLLM 0.32.0's (``SamplingParams.update_from_tokenizer``). Knows
no wire and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from anyengine._text.tokenizer import Tokenizer

__all__ = ["tokenize_bad_words"]

_MAX_SEQUENCES: Final = 128  # vLLM's VLLM_MAX_NUM_BAD_WORDS


def tokenize_bad_words(tokenizer: Tokenizer, bad_words: Sequence[str]) -> list[list[int]]:
    """The sequences for ``bad_words``: each word at the start of a text, and after a space where that is one more token
    of its own.

    Raises:
        RequestRejected: a word has no tokens, or tokens outside the vocabulary; or there are too many sequences.
    """
    sequences: list[list[int]] = []
    for word in dict.fromkeys(bad_words):
        bare = word.lstrip()
        alone = tokenizer.encode(bare, add_special_tokens=False)
        if not alone:
            _refuse(bad_words, f"{word!r} has no tokens", "leave it out")
        sequences.append(alone)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
        if spaced and spaced[0] != alone[0] and len(spaced) == len(alone):
            sequences.append(spaced)
    if len(sequences) > _MAX_SEQUENCES:
        _refuse(bad_words, f"they are {len(sequences)} token sequences", f"use fewer: {_MAX_SEQUENCES} are possible")
    if any(token_id >= tokenizer.vocab_size for sequence in sequences for token_id in sequence):
        remedy = f"use words of the model's vocabulary of {tokenizer.vocab_size} tokens"
        _refuse(bad_words, "a token of theirs is unknown to the model", remedy)
    return sequences


def _refuse(bad_words: Sequence[str], problem: str, remedy: str) -> NoReturn:
    raise RequestRejected(
        f"bad_words={bad_words!r:.200}: {problem}; {remedy}", parameter="bad_words", value=bad_words, remedy=remedy
    )
