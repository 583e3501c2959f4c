"""The text of single tokens, for lists of log-probabilities.

Owns the repair of tokens that are a part of a character: such a token is the empty text, and the one that completes the
character has all of it, as far as the tokens before it tell. The rules are those of vLLM 0.32.0
(``v1/engine/logprobs.py``, ``tokenizers/detokenizer_utils.py``), so that texts compare equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["TokenTexts"]

_REPLACEMENT = "\ufffd"


class TokenTexts:
    """Token id and context -> text. Shared by all requests of a tokenizer.

    ``backend`` is the ``tokenizers`` object, ``decode`` turns ids into text, special tokens included.
    """

    def __init__(self, backend: Any, decode: Callable[[Sequence[int]], str]) -> None:
        self._backend = backend
        self._decode = decode
        self._marker = _space_marker(backend.pre_tokenizer)
        self._known: dict[int, str] = {}  # never more entries than the vocabulary

    def __call__(self, token_id: int, preceding: Sequence[int]) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._alone(token_id)
            if text:
                self._known[token_id] = text
        return self._completed(token_id, preceding) if text.endswith(_REPLACEMENT) else text

    def _alone(self, token_id: int) -> str:
        text = self._decode([token_id])
        if self._marker is None:
            return text
        # A decoder strips the space that a word begins with at the start of a text.
        piece: str = self._backend.id_to_token(token_id) or ""
        markers = len(piece) - len(piece.lstrip(self._marker))
        spaces = len(text) - len(text.lstrip(" "))
        return " " * (markers - spaces) + text

    def _completed(self, token_id: int, preceding: Sequence[int]) -> str:
        for count in range(1, len(preceding) + 1):
            context = list(preceding[-count:])
            whole = self._decode([*context, token_id])
            if whole.endswith(_REPLACEMENT):
                continue
            while context and self._decode(context[-1:]).endswith(_REPLACEMENT):
                context.pop()  # its bytes had no text of their own: they are this token's
            before = self._decode(context) if context else ""
            shared = next((i for i, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), None)
            return whole[min(len(before), len(whole)) if shared is None else shared :]
        return ""


def _space_marker(pre_tokenizer: Any) -> str | None:
    """What stands for a space in the pieces of SentencePiece-like tokenizers, if this is one."""
    if pre_tokenizer is None:
        return None
    # The pickle state of a pre-tokenizer is its JSON, the only view of what is inside a Sequence.
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state.get("pretokenizers", []) if state.get("type") == "Sequence" else [state]
    return next((step.get("replacement", "▁") for step in steps if step.get("type") == "Metaspace"), None)
