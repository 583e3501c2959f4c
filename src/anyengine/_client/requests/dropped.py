"""Requests whose stream was dropped without being closed, on their way from ``__del__`` to the session.

Owns the name. It may be filled by a collection in another thread, or in the middle of a multipart send: filling it
touches no socket and no registry.
"""

from __future__ import annotations

from anyengine._transport.mailbox import Mailbox

from .state import RequestState

__all__ = ["DroppedRequests"]


class DroppedRequests(Mailbox[RequestState]):
    """The mailbox. Owning task: the one that aborts what is in it. Lifetime: one session."""
