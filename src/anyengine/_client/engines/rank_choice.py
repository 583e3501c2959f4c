"""Which rank gets a request that names none: what is known of the ranks, put before the client's balancer.

Owns the list of those that can have it. How one of them is chosen is :mod:`anyengine._protocol.balancing`'s.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from anyengine._protocol import RankLoad, rank_of_key
from anyengine._wire import EngineCoreRequest
from anyengine.exceptions import LocalProtocolError

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["choose_rank", "home_rank"]


def choose_rank(session: Session, request: EngineCoreRequest) -> int:
    """The rank for ``request``, of those that have room, if any has; of those that die, if no other is left. What
    compares documents with a query goes where the query is kept, which nobody else may decide.

    Raises:
        EngineDeadError: all are dead.
        LocalProtocolError: the balancer failed, or chose a rank that it was not offered.
    """
    rota, budget = session.connection.rota, session.send_budget
    if (home := home_rank(session, request)) is not None:
        return home
    ranks = [rank for rank in rota.serving if budget.has_room(rank)] or rota.alive
    if not ranks:
        raise session.down()
    loads = {rank: _load(session, rank) for rank in ranks}
    name = type(session.balancer).__name__
    try:
        chosen = index(session.balancer.choose(request, loads))
    except Exception as exc:
        raise LocalProtocolError(f"the balancer, a {name}, failed to choose a rank: {exc!r}") from exc
    if chosen not in loads:
        raise LocalProtocolError(
            f"the balancer, a {name}, chose rank {chosen}, which was not among those offered: {sorted(loads)}"
        )
    return chosen


def home_rank(session: Session, request: EngineCoreRequest) -> int | None:
    """The only rank that can have ``request``, since what it needs is kept there; ``None``: any."""
    # The request has not been checked: any of this may be anything.
    late = getattr(request.pooling_params, "late_interaction_params", None)
    key, serving = getattr(late, "query_key", None), session.connection.rota.serving
    return rank_of_key(key, session.ranks, serving) if isinstance(key, str) and serving else None


def _load(session: Session, rank: int) -> RankLoad:
    num_in_flight = session.connection.requests.num_live[rank]
    statistics = session.liveness.last_statistics.get(rank)
    if statistics is None:
        return RankLoad(num_in_flight)
    # What was said last may have been overtaken: no more can wait than are in flight.
    waiting = min(num_in_flight, statistics.num_waiting_reqs + statistics.num_skipped_waiting_reqs)
    return RankLoad(num_in_flight, waiting, statistics.kv_cache_usage)
