"""Messages of KV cache events: whatever a publisher sends is read, or is a ``DecodeError``; it never hurts."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._wire import AllBlocksCleared, BlockRemoved, BlockStored, KVEventMessage, decode_kv_events
from anyengine.exceptions import DecodeError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("type"), inner),
    max_leaves=8,
)
TAGGED = st.builds(
    lambda tag, rest: [tag, *rest],
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    st.lists(PLAIN),
)


def message(*events: Any, tail: tuple[Any, ...] = (0,)) -> list[bytes]:
    return [b"", bytes(8), msgspec.msgpack.encode([1.5, events, *tail])]


def test_arrays_of_older_releases_are_read_by_position() -> None:
    stored = ["BlockStored", [1, b"\x02"], None, [5, 6], 2, None, "GPU", None, [["salt"]], 0]
    read = decode_kv_events(message(stored, stored[:6], ["BlockRemoved", [1]], ["AllBlocksCleared"]))
    assert read.events == (
        BlockStored(
            block_hashes=[1, b"\x02"],
            parent_block_hash=None,
            token_ids=[5, 6],
            block_size=2,
            medium="GPU",
            extra_keys=[["salt"]],
            group_idx=0,
        ),
        BlockStored(block_hashes=[1, b"\x02"], parent_block_hash=None, token_ids=[5, 6], block_size=2),
        BlockRemoved(block_hashes=[1]),
        AllBlocksCleared(),
    )
    assert read.unread == 0


def test_further_fields_and_positions_are_no_trouble() -> None:
    removed = ["BlockRemoved", [1], "GPU", 0, "LOCAL", "tier", "of", "later"]
    named = {"type": "BlockRemoved", "block_hashes": [1], "of_a_later_release": {}}
    read = decode_kv_events(message(removed, named, tail=(3, "later")))
    assert read == KVEventMessage(
        topic="",
        sequence_number=0,
        published_s=1.5,
        data_parallel_rank=3,
        events=(
            BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0, locality="LOCAL", ownership="tier"),
            BlockRemoved(block_hashes=[1]),
        ),
        unread=0,
    )


def test_one_bad_event_does_not_spoil_the_others() -> None:
    bad = [None, 1, "AllBlocksCleared", [], [[]], {}, {"type": "Later"}, ["BlockRemoved", "x"], {"type": "BlockStored"}]
    read = decode_kv_events(message(*bad, {"type": "AllBlocksCleared"}))
    assert (read.events, read.unread) == ((AllBlocksCleared(),), len(bad))


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"", bytes(8)], [b"", bytes(7), b"\x92\x01\x90"], [b"", b"\xff" * 8, b""]]
)
def test_what_is_no_message_is_an_error(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError, match="KVEventBatch"):
        decode_kv_events(frames)


@given(st.lists(PLAIN | TAGGED, max_size=4), st.integers(0, 3))
def test_any_events_are_read_or_counted(events: list[Any], cut: int) -> None:
    frames = message(*events)
    read = decode_kv_events([memoryview(frame) for frame in frames])
    assert len(read.events) + read.unread == len(events)
    if cut:
        with pytest.raises(DecodeError):
            decode_kv_events([*frames[:2], frames[2][:-cut]])


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_read_or_are_an_error(frames: list[bytes]) -> None:
    with suppress(DecodeError):
        decode_kv_events(frames)
