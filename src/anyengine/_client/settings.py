"""What a session is told by its client, and where it can be in its life. Owns no behaviour."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from anyengine._process.status import Status
from anyengine._protocol import EEPNotification, FaultStatus
from anyengine.config import AttachedEngine, EngineSettings

__all__ = ["ClientState", "Notification", "SessionSettings"]

Notification: TypeAlias = EEPNotification | FaultStatus


class ClientState(enum.Enum):
    """Where a client is in its life."""

    CREATED = "created"
    STARTING = "starting"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"
    DEAD = "dead"


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session is told by its client."""

    engines: tuple[EngineSettings, ...]
    """One for each rank that is started; or one that is joined, with all its ranks."""
    startup_timeout_s: float
    shutdown_grace_s: float
    liveness_timeout_s: float | None
    max_unread_bytes: int
    on_death: Literal["report", "cancel"]
    on_progress: Callable[[Status], None] | None
    on_notification: Callable[[Notification], Awaitable[None]] | None

    def engine_of(self, rank: int) -> EngineSettings:
        """What was started as ``rank``; or what was joined, with all its ranks."""
        first = self.engines[0]
        return first if isinstance(first, AttachedEngine) else self.engines[rank]
