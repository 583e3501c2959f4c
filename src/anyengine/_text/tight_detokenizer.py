"""``spaces_between_special_tokens=False``: added tokens that follow each other, without the spaces of a decoder.

Owns that rule, which is vLLM 0.32.0's for fast tokenizers: an added token right after an added token of the same output
is its own content and nothing else. Knows no decoder.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anyengine._text.detokenizer import Detokenizer

__all__ = ["TightDetokenizer"]


class TightDetokenizer:
    """A :class:`Detokenizer` around another one. ``added`` maps the ids of added tokens to their content."""

    __slots__ = ("_added", "_after_added", "_inner")

    def __init__(self, inner: Detokenizer, added: Mapping[int, str]) -> None:
        self._inner = inner
        self._added = added
        self._after_added = False

    @property
    def holding(self) -> bool:
        return self._inner.holding

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def peek(self) -> str:
        return self._inner.peek()

    def finish(self) -> str:
        return self._inner.finish()

    def _push_one(self, token_id: int) -> str:
        text = self._inner.push((token_id,))
        content = self._added.get(token_id)
        if content is not None and self._after_added:
            text = content
        self._after_added = content is not None
        return text
