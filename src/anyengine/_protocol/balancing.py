"""Which rank gets a request that names none.

Owns the strategies, and which of them a topology asks for. A strategy is told what is known of each rank that takes
work, and answers with one of them; it must not wait. Pure.

Mirrors vLLM 0.32.0 ``v1/engine/core_client.py`` (``DPLBAsyncMPClient``) for one client without a coordinator: what it
has in flight is the load, waiting behind a full cache weighs more, ties take turns.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from anyengine._wire import EngineCoreRequest

__all__ = ["Balancer", "LeastLoaded", "OnlyRank", "RankLoad", "SessionAffinity", "balancer_for", "rank_of_key"]

_FULL_CACHE: Final = 0.5  # of the KV cache: above it, what waits will wait for blocks
_WAIT_WEIGHT: Final = 6.0


class RankLoad(NamedTuple):
    """What is known of one rank. ``num_in_flight`` counts this client's requests, and is exact; the others are what the
    rank said last: how many of them wait to be scheduled, and the fraction of its KV cache that is in use."""

    num_in_flight: int
    num_waiting: int = 0
    kv_cache_usage: float = 0.0


@runtime_checkable
class Balancer(Protocol):
    """A strategy; one object serves one client."""

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, RankLoad]) -> int:
        """The rank that gets ``request``: a key of ``loads``, which has one at least. Called in the event loop, for
        each request that names no rank, and again when one is sent anew."""


class OnlyRank:
    """There is no choice."""

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, RankLoad]) -> int:
        """See :class:`Balancer`."""
        return next(iter(loads))


class LeastLoaded:
    """The rank with the fewest requests in flight; those that wait at a rank whose KV cache is more than half full
    count several times. Ranks that are equal take turns."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, RankLoad]) -> int:
        """See :class:`Balancer`."""
        ranks = list(loads)
        start = self._turn % len(ranks)
        self._turn += 1
        return min(ranks[start:] + ranks[:start], key=lambda rank: _score(loads[rank]))


class SessionAffinity:
    """Requests of one ``session_id`` go to one rank, while it takes work: its prefix cache has what came before. When
    it dies, or has no room for another request, the session moves, and stays where it went.

    ``otherwise`` chooses for the first request of a session, and for those without one. The sessions used last are
    remembered, ``max_sessions`` of them.
    """

    def __init__(self, otherwise: Balancer | None = None, *, max_sessions: int = 100_000) -> None:
        if type(max_sessions) is not int or max_sessions < 1:
            raise ValueError(f"max_sessions={max_sessions!r} must be an int of at least 1")
        if otherwise is not None and (isinstance(otherwise, type) or not isinstance(otherwise, Balancer)):
            raise ValueError(f"otherwise={otherwise!r} must be an object with choose(request, loads), or None")
        self._otherwise: Balancer = LeastLoaded() if otherwise is None else otherwise
        self._max_sessions = max_sessions
        self._ranks: OrderedDict[str, int] = OrderedDict()

    def choose(self, request: EngineCoreRequest, loads: Mapping[int, RankLoad]) -> int:
        """See :class:`Balancer`."""
        session_id = request.session_id
        if session_id is None:
            return self._otherwise.choose(request, loads)
        rank = self._ranks.get(session_id)
        if rank is None or rank not in loads:
            rank = self._ranks[session_id] = self._otherwise.choose(request, loads)
        self._ranks.move_to_end(session_id)
        if len(self._ranks) > self._max_sessions:
            self._ranks.popitem(last=False)
        return rank


def rank_of_key(key: str, ranks: Sequence[int], serving: Collection[int]) -> int:
    """The rank that keeps what ``key`` names (a late-interaction query's embeddings, in vLLM): the same for all
    clients, as long as it is one of ``serving``, and else the next one that is."""
    home = zlib.crc32(key.encode()) % len(ranks)
    return next(rank for rank in (*ranks[home:], *ranks[:home]) if rank in serving)


def balancer_for(num_ranks: int) -> Balancer:
    """The strategy for so many independent ranks behind one client."""
    return OnlyRank() if num_ranks == 1 else LeastLoaded()


def _score(load: RankLoad) -> float:
    return load.num_in_flight + load.num_waiting * _WAIT_WEIGHT * max(0.0, load.kv_cache_usage - _FULL_CACHE)
