"""Which front ends are there, and which have gone for good.

Owns the deadlines of an engine that no process watches over: it must notice by its own sockets that nobody is left to
serve. No protocol message says that a front end leaves. Knows neither sockets nor clocks: events and times come in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FrontEndWatch", "FrontEndsGone"]


@dataclass(slots=True, frozen=True)
class FrontEndsGone:
    """The front ends of ``client_indices`` did not come back in time; ``all_gone``: there is no other one."""

    client_indices: tuple[int, ...]
    all_gone: bool


class FrontEndWatch:
    """Connected, lost since, or gone: one state for each client. Owned by the input thread.

    A front end that was never connected has ``first_contact_s``: a server may start its workers, which bind the
    sockets, after the engines. One that was connected has ``grace_s`` to come back.
    """

    def __init__(self, num_clients: int, *, grace_s: float, first_contact_s: float, now_s: float) -> None:
        self._grace_s = grace_s
        self._deadlines_s: dict[int, float] = dict.fromkeys(range(num_clients), now_s + first_contact_s)  # absent ones
        self._gone: set[int] = set()
        self._num_clients = num_clients

    def connected(self, client_index: int) -> None:
        """It is there, again or for the first time."""
        self._deadlines_s.pop(client_index, None)
        self._gone.discard(client_index)

    def disconnected(self, client_index: int, now_s: float) -> None:
        """Its connection broke. Attempts to reconnect that fail may be reported as often as they happen."""
        if client_index not in self._gone:
            self._deadlines_s.setdefault(client_index, now_s + self._grace_s)

    def timeout_s(self, now_s: float) -> float | None:
        """How long :meth:`expire` has nothing to say; ``None``: until the next event."""
        return max(0.0, min(self._deadlines_s.values()) - now_s) if self._deadlines_s else None

    def expire(self, now_s: float) -> FrontEndsGone | None:
        """Those whose time is over. Each is reported once, unless it comes back."""
        expired = _expired(self._deadlines_s.items(), now_s)
        if not expired:
            return None
        for client_index in expired:
            del self._deadlines_s[client_index]
        self._gone.update(expired)
        return FrontEndsGone(expired, all_gone=len(self._gone) == self._num_clients)


def _expired(deadlines_s: Iterable[tuple[int, float]], now_s: float) -> tuple[int, ...]:
    return tuple(client_index for client_index, deadline_s in deadlines_s if deadline_s <= now_s)
