"""What a consumer of a request stream receives.

Owns the public output records. They share no mutable state with each other or with the client: every list was made for
the one object that holds it.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

__all__ = ["FinishReason", "RequestOutput"]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "repetition"] | str
"""``"stop"`` (an end-of-sequence token, a stop id or a stop string), ``"length"``, ``"abort"``, ``"error"``,
``"repetition"``; an engine newer than this client may send another, which reads ``"unknown:<n>"``."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One item of a request stream.

    With ``output_kind=DELTA`` (the default) ``text`` and ``token_ids`` hold what is new since the item before; with
    ``CUMULATIVE`` and ``FINAL_ONLY`` everything so far. Exactly one item of a stream, its last, has a
    ``finish_reason``.

    Attributes:
        request_id: the caller's label, or the one the client made.
        text: detokenized output; never half a character. Empty when detokenizing is off.
        token_ids: output token ids. They run ahead of ``text`` where a character is not complete yet.
        stop_reason: the stop id or stop string that ended it; ``None`` at the end-of-sequence token.
        num_prompt_tokens, num_output_tokens: totals so far, in tokens.
        num_cached_tokens: prompt tokens whose keys and values came from a cache.
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether this is the stream's last item."""
        return self.finish_reason is not None
