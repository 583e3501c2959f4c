"""A publisher's messages in their order, and what is missing between them.

Owns the count of what never came. Pure: messages go in, batches come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from anyengine._wire import Frame, KVEvent, decode_kv_events

__all__ = ["KVEventBatch", "KVEventReader"]


class KVEventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What one step of an engine has changed in its KV cache.

    Attributes:
        rank: the client's rank that was asked for.
        sequence_number: counts the publisher's messages from 0. One that is not above the last one's: the publisher
            has begun anew, and what was known of its cache is void.
        missed: how many messages before this one never came, or could not be read, since the last one of this stream;
            what is known of the cache is incomplete then.
        published_s: seconds since the epoch, by the publisher's clock.
        data_parallel_rank: the rank as the publisher calls itself; ``None``: it does not say.
        events: the changes, in order.
        unread_events: how many events there were besides, of a kind that this client does not know.
        topic: what the message was published under.
    """

    rank: int
    sequence_number: int
    missed: int
    published_s: float
    data_parallel_rank: int | None
    events: tuple[KVEvent, ...]
    unread_events: int = 0
    topic: str = ""


class KVEventReader:
    """The messages of one rank's publisher. Lifetime: one stream."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last: int | None = None

    def read(self, frames: Sequence[Frame]) -> KVEventBatch:
        """The next message.

        Raises:
            DecodeError: it is none; it counts as missed.
        """
        message = decode_kv_events(frames)
        number, last = message.sequence_number, self._last
        self._last = number
        missed = 0  # what was published before the first one nobody has asked for
        if last is not None:
            missed = number - last - 1 if number > last else number
        return KVEventBatch(
            rank=self._rank,
            sequence_number=number,
            missed=missed,
            published_s=message.published_s,
            data_parallel_rank=message.data_parallel_rank,
            events=message.events,
            unread_events=message.unread,
            topic=message.topic,
        )
