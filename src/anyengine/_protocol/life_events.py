"""Where a client and its ranks can be in their lives, and what is said when that changes.

Owns the names of the states and the records of the changes; which change is possible is :mod:`.life`'s. The records are
frozen: any number of readers share one.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from anyengine.exceptions import EngineError

__all__ = ["ClientEvent", "ClientState", "CurrentState", "RankChanged", "RankState", "StateChanged"]


class ClientState(enum.Enum):
    """Where a client is in its life."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    """Some rank takes requests and runs them."""
    PAUSED = "paused"
    """Every rank that lives has confirmed that it is paused."""
    ASLEEP = "asleep"
    """Every rank that lives has confirmed that it sleeps."""
    RESTARTING = "restarting"
    """No rank lives, and one at least is being started again."""
    DEAD = "dead"
    CLOSING = "closing"
    CLOSED = "closed"


class RankState(enum.Enum):
    """Where one rank is in its life."""

    STARTING = "starting"
    READY = "ready"
    PAUSED = "paused"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    DEAD = "dead"


class ClientEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something has changed. ``state`` and ``ranks`` are how things stand behind it."""

    state: ClientState
    ranks: Mapping[int, RankState]

    @property
    def degraded(self) -> tuple[int, ...]:
        """The ranks that are lost, or being started again."""
        gone = (RankState.DEAD, RankState.RESTARTING)
        return tuple(rank for rank, state in self.ranks.items() if state in gone)


class CurrentState(ClientEvent, frozen=True, kw_only=True):
    """How things stand: what every reader gets first, and one that was too slow gets in place of what it has missed.

    ``cause`` is what the client died of, if it did; ``missed`` says how many events there were in between.
    """

    cause: EngineError | None = None
    missed: int = 0


class StateChanged(ClientEvent, frozen=True, kw_only=True):
    """The client was in ``former``, and is in ``state`` now; ``cause`` is why, where an error is."""

    former: ClientState
    cause: EngineError | None = None


class RankChanged(ClientEvent, frozen=True, kw_only=True):
    """Rank ``rank`` was in ``former``, and is in ``rank_state`` now.

    ``cause`` is why it is lost or started again. ``attempt`` counts the restarts of the present trouble, and
    ``delay_s`` is how long the next one is waited with, where it is started again.
    """

    rank: int
    former: RankState
    rank_state: RankState
    cause: EngineError | None = None
    attempt: int | None = None
    delay_s: float | None = None
