"""A publisher of KV cache events that speaks as vLLM's does, by hand; and the config that leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from anyengine._transport.zmq_socket import ZmqSocket

__all__ = ["REMOVED", "STORED", "Publisher", "kv_events_config", "kv_publisher"]

STORED = {
    "type": "BlockStored",
    "block_hashes": [b"\x01" * 32, 2],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, ["salt"]],
    "of_a_later_release": 1,
}
REMOVED = ["BlockRemoved", [b"\x01" * 32], "GPU"]
"""As an array, the way of older releases."""


class Publisher:
    """An XPUB: a PUB that can be asked who has subscribed."""

    def __init__(self, socket: ZmqSocket, port: int) -> None:
        self.socket = socket
        self.port = port

    async def subscribed(self) -> bytes:
        """Wait for a subscription, or its end: ``b"\\x01topic"``, ``b"\\x00topic"``."""
        [[word]] = await self.socket.drain(1)
        return bytes(word)

    def publish(self, number: int, *events: Any, rank: int | None = 0, topic: str = "") -> None:
        payload = msgspec.msgpack.encode([1700000000.5, events] + ([] if rank is None else [rank]))
        self.send(topic.encode(), number.to_bytes(8, "big"), payload)

    def send(self, *frames: bytes) -> None:
        self.socket.send_nowait(frames)


@contextmanager
def kv_publisher(*, connect_to: str | None = None, sndhwm: int = 1000) -> Iterator[Publisher]:
    """Listens on a free port, or connects."""
    context = zmq.Context()
    try:
        raw = context.socket(zmq.XPUB)
        raw.set(zmq.SNDHWM, sndhwm)
        raw.set(zmq.XPUB_VERBOSER, 1)  # tells of every subscriber, not of the first to a topic alone
        with ZmqSocket(raw) as socket:
            if connect_to is None:
                yield Publisher(socket, int(socket.bind("tcp://127.0.0.1:*").rpartition(":")[2]))
            else:
                socket.connect(connect_to)
                yield Publisher(socket, int(connect_to.rpartition(":")[2]))
    finally:
        context.destroy(linger=0)


def kv_events_config(endpoint: str, **changes: Any) -> dict[str, Any]:
    """What a ready response says of a publisher."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": endpoint,
        "replay_endpoint": None,
        "buffer_steps": 10_000,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": "",
    }
    return {**config, **changes}
