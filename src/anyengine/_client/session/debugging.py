"""What a session holds at a moment, by name: for debugging, and for the check that it holds nothing in the end.

Owns the listing. Nothing here changes anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from anyengine.exceptions import ClientFailedError

if TYPE_CHECKING:
    from anyengine._protocol import PendingCall
    from anyengine._protocol.requests import RequestEntry

    from .session import Session

__all__ = ["DebugSnapshot", "leak_error", "take_snapshot"]


class DebugSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a client holds."""

    state: str
    tasks: dict[str, int]
    """The client's own tasks that run, by name, and how many of each."""
    requests: tuple[str, ...]
    """Those in flight: label, rank and the id on the wire."""
    utility_calls: tuple[str, ...]
    """Those that wait for their reply: method, rank and call id."""
    unread_bytes: int
    """Sent, and not known to have been read."""
    queued_items: int
    """Received, and not handed to whoever waits for it."""


def take_snapshot(session: Session) -> DebugSnapshot:
    """What ``session`` holds now."""
    connection = session.connection if session.is_connected else None
    return DebugSnapshot(
        state=session.life.state.value,
        tasks=+session.running_tasks,
        requests=tuple(map(_request_name, connection.requests.live.values())) if connection else (),
        utility_calls=tuple(map(_call_name, connection.utilities.pending.values())) if connection else (),
        unread_bytes=session.send_budget.unread_bytes if connection else 0,
        queued_items=len(session.feed),
    )


def leak_error(session: Session) -> ClientFailedError | None:
    """The error that names what an ended session still holds; ``None``: nothing."""
    held = take_snapshot(session)
    left = [
        *(f"request {name}" for name in held.requests),
        *(f"utility call {name}" for name in held.utility_calls),
        *(f"task {name}" for name in held.tasks),
    ]
    return ClientFailedError(f"the client has ended and still holds: {'; '.join(left)}") if left else None


def _call_name(call: PendingCall) -> str:
    return f"{call.method} on rank {call.rank} ({call.call_id})"


def _request_name(entry: RequestEntry) -> str:
    label = getattr(entry.consumer, "label", "-")  # a low-level client's requests have none
    return f"{label!r} on rank {entry.rank} ({entry.request_id})"
