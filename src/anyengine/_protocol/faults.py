"""What is known of the faults of fault-tolerant engines: from what they say unasked, and from their answers.

Owns the last word of each rank. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from anyengine._wire import FaultToleranceResult

from .events import FaultStatus

__all__ = ["FaultBoard", "FaultToleranceStatus"]

_HEALTHY = "healthy"


class FaultToleranceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as it was last heard of.

    Attributes:
        status: ``"healthy"``; ``"unhealthy"``: its main loop has stopped at a fault, and it waits to be told what to
            do; ``"dead"``.
        fault_info: what the engine says of its fault (vLLM: the name of the exception's class).
        last_request_id: the request to handle a fault that has failed since the rank was last healthy, and
        error: why.
    """

    rank: int
    status: str = _HEALTHY
    fault_info: Any = None
    last_request_id: str | None = None
    error: str | None = None


class FaultBoard:
    """See the module. Lifetime: one session. A rank that nothing was heard of is healthy."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._known: dict[int, FaultToleranceStatus] = {}

    def status(self, rank: int) -> FaultToleranceStatus:
        """What is known of ``rank``."""
        return self._known.get(rank) or FaultToleranceStatus(rank=rank)

    def told(self, told: FaultStatus) -> None:
        """An engine has said how it is; one that is no rank of the session's is not listened to."""
        rank = told.rank
        if rank in self._ranks:
            status = FaultToleranceStatus(rank=rank, status=told.status, fault_info=told.fault_info)
            if told.status != _HEALTHY:
                known = self.status(rank)
                status = msgspec.structs.replace(status, last_request_id=known.last_request_id, error=known.error)
            self._known[rank] = status

    def answered(self, rank: int, result: FaultToleranceResult) -> None:
        """An engine has answered a request to handle its fault: with success it is healthy."""
        if result.success:
            self.forget(rank)
        else:
            error = result.reason or "it does not say why"
            known = self.status(rank)
            self._known[rank] = msgspec.structs.replace(known, last_request_id=result.request_id, error=error)

    def forget(self, rank: int) -> None:
        """The rank is as good as new."""
        self._known.pop(rank, None)
