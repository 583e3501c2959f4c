"""KV cache events: what an engine's publisher is set to, and what it publishes.

Owns the config that a ready response carries, the events, and the message ``[topic, sequence number, payload]``; must
not know how it travels, nor what a consumer makes of it. Nothing is ever unpickled.
Mirrors vLLM 0.32.0 ``config/kv_events.py`` and ``distributed/kv_events.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from anyengine.exceptions import DecodeError

from .codec import BAD_BYTES, compile_decoder, decode_frame
from .constants import Frame
from .ready import EngineCoreReadyResponse

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "KVEvent",
    "KVEventMessage",
    "KVEventsConfig",
    "decode_kv_events",
    "read_kv_events_config",
]

BlockHash: TypeAlias = bytes | int
"""As the engine computes it; which of the two depends on its settings."""

_MESSAGE: Final = "KVEventBatch"
_SEQUENCE_BYTES: Final = 8


class KVEventsConfig(msgspec.Struct, frozen=True):
    """What an engine's publisher of KV cache events is set to, as it runs: ports are those of this rank.

    ``endpoint`` is its PUB socket's address as the publisher bound it ("tcp://*:5557"), or where it connects to, if
    there is no wildcard; ``replay_endpoint`` the ROUTER that sends again the last ``buffer_steps`` batches, if there is
    one. ``hwm`` and ``max_queue_size`` are batches, in ZeroMQ's queue and before it.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks of a request's tokens are cached now: ``token_ids`` fills them in order, ``block_size`` tokens each.

    ``parent_block_hash`` is the block before the first one, ``None`` at the start of a prompt. ``medium`` is where they
    are ("GPU", "CPU", "STORAGE"). ``extra_keys`` has, for each block, what else its hash depends on (adapter, cache
    salt, images), or ``None``. The rest says which group of layers it concerns, and who has caused it.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks are no longer cached in ``medium``."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """The cache was reset: nothing that was told before is cached any more."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
"""One change of a KV cache."""


class KVEventMessage(NamedTuple):
    """One message of a publisher: the events of one step. ``unread`` counts events of a kind, or in a form, that this
    client does not know."""

    topic: str
    sequence_number: int
    published_s: float
    data_parallel_rank: int | None
    events: tuple[KVEvent, ...]
    unread: int


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCH = compile_decoder(_Batch)
_EVENT: msgspec.msgpack.Decoder[KVEvent] = msgspec.msgpack.Decoder(KVEvent)
_ARRAY: msgspec.msgpack.Decoder[list[Any]] = msgspec.msgpack.Decoder(list[Any])
_KINDS: Final = {kind.__name__: kind.__struct_fields__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def read_kv_events_config(ready: EngineCoreReadyResponse) -> KVEventsConfig | None:
    """What ``ready`` says of the engine's publisher; ``None``: it has none, or its release does not say (up to 0.26).

    Raises:
        DecodeError: what it says makes no sense.
    """
    if ready.kv_events_config is None:
        return None
    try:
        return msgspec.convert(ready.kv_events_config, KVEventsConfig)
    except BAD_BYTES as exc:
        what = "kv_events_config"
        raise DecodeError(f"{what}={ready.kv_events_config!r:.300} makes no sense: {exc}", message_type=what) from exc


def decode_kv_events(frames: Sequence[Frame]) -> KVEventMessage:
    """Read ``[topic, sequence number (8 bytes, big-endian, signed), msgpack array [ts, events, rank]]``.

    An event that cannot be read is counted, and does not spoil the others.

    Raises:
        DecodeError: the frames are no such message.
    """
    if len(frames) != 3:
        raise DecodeError(f"{_MESSAGE} of {len(frames)} frames instead of 3", message_type=_MESSAGE)
    topic, number, payload = frames
    if len(number) != _SEQUENCE_BYTES or (sequence_number := int.from_bytes(number, "big", signed=True)) < 0:
        raise DecodeError(f"{_MESSAGE}: {bytes(number)!r:.80} is no sequence number", message_type=_MESSAGE)
    batch = decode_frame(_BATCH, payload, _MESSAGE)
    read = [_read_event(raw) for raw in batch.events]
    events = tuple(event for event in read if event is not None)
    text = bytes(topic).decode(errors="replace")
    return KVEventMessage(text, sequence_number, batch.ts, batch.data_parallel_rank, events, len(read) - len(events))


def _read_event(raw: msgspec.Raw) -> KVEvent | None:
    """Newer releases send maps with the tag as ``type``; older ones send arrays that begin with it."""
    try:
        if _is_map(memoryview(raw)[0]):
            return _EVENT.decode(raw)
        tag, *values = _ARRAY.decode(raw)
        named = dict(zip(_KINDS[tag], values, strict=False))  # further positions are of a later release
        return msgspec.convert({"type": tag, **named}, KVEvent)  # type: ignore[no-any-return]
    except (*BAD_BYTES, KeyError, TypeError):
        return None


def _is_map(marker: int) -> bool:
    return marker >> 4 == 0x8 or marker in (0xDE, 0xDF)
