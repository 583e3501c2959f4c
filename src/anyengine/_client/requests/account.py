"""What the requests of a session add up to, by the rank that ran them.

Owns the sums of those that have ended; what is in flight is counted when somebody asks, so a token costs nothing here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from .state import RequestState

__all__ = ["Account", "RankTotals", "RequestAccount"]


class Account(Protocol):
    """What the end of a request is told to."""

    def close(self, state: RequestState) -> None:
        """``state`` has ended this moment, with all its tokens."""

    def settle(self) -> None:
        """Of those that were to be sent together, no more will be. Idempotent."""


class RankTotals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Of one rank, since the session began: requests by how they ended (a finish reason, or ``"failed"``), and tokens.
    A prompt counts from its first token, or its result, on."""

    ended: Mapping[str, int]
    prompt_tokens: int
    generation_tokens: int


@dataclass(slots=True)
class _Sums:
    ended: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def add(self, state: RequestState) -> None:
        self.generation_tokens += state.num_tokens
        if state.prompt_was_run:
            self.prompt_tokens += state.asked.num_prompt_tokens


class RequestAccount:
    """See the module. Invariant: each request is in it once, from its end on. Lifetime: one session."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Sums] = {}

    def close(self, state: RequestState) -> None:
        """``state`` has ended this moment, with all its tokens."""
        sums = self._ranks.setdefault(state.rank, _Sums())
        sums.add(state)
        sums.ended[state.finish_reason or "failed"] += 1

    def settle(self) -> None:
        """See :class:`Account`: these have nothing to do with each other."""

    def totals(self, ranks: Iterable[int], live: Iterable[RequestState]) -> dict[int, RankTotals]:
        """What it adds up to as of now, with the requests that are ``live``."""
        now: dict[int, _Sums] = {}
        for rank in ranks:
            past = self._ranks.get(rank) or _Sums()
            now[rank] = _Sums(past.ended.copy(), past.prompt_tokens, past.generation_tokens)
        for state in live:
            if state.rank in now and not state.ended:  # one whose prompt comes in parts may wait for the next
                now[state.rank].add(state)
        return {
            rank: RankTotals(
                ended=dict(sums.ended), prompt_tokens=sums.prompt_tokens, generation_tokens=sums.generation_tokens
            )
            for rank, sums in now.items()
        }
