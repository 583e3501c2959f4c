"""The client for threads: :class:`SyncEngineClient`, whose methods block.

    with SyncEngineClient() as client:
        for out in client.generate("The capital of France is"):
            print(out.text, end="", flush=True)

It is :class:`~anyengine.EngineClient` in an event loop of its own, in a thread that ends with the block.
"""

from __future__ import annotations

from .client import ClientOptions, SyncEngineClient
from .groups import SyncClientEvents, SyncInputSession, SyncKVEventStream, SyncRequestGroup
from .operations import SyncEngineOperations
from .stream_views import SyncParsedStream, SyncStreamView, SyncTextStream, SyncTokenStream
from .streams import SyncRequestStream

__all__ = [
    "ClientOptions",
    "SyncClientEvents",
    "SyncEngineClient",
    "SyncEngineOperations",
    "SyncInputSession",
    "SyncKVEventStream",
    "SyncParsedStream",
    "SyncRequestGroup",
    "SyncRequestStream",
    "SyncStreamView",
    "SyncTextStream",
    "SyncTokenStream",
]
