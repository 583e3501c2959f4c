"""Several ranks as one: what adds up, what is the least, what has to agree."""

from __future__ import annotations

import json
import logging

import anyio
import msgspec
import pytest
from engines import misbehaving

from anyengine import EngineCoreClient
from anyengine._protocol.registrations import merge_registrations
from anyengine._wire import EngineCoreReadyResponse, decode_ready


def ready(rank: int, **said: object) -> EngineCoreReadyResponse:
    known = {"max_model_len": 100 - rank, "num_gpu_blocks": 10**rank, "block_size": 16, "data_parallel_rank": rank}
    response = decode_ready(msgspec.msgpack.encode({**known, **said}))
    assert response is not None
    return response


@pytest.mark.feature("F07")
def test_three_ranks_with_different_values() -> None:
    said: list[dict[str, object]] = [
        {"kv_cache_size_tokens": 5, "kv_cache_max_concurrency": 0.5, "enable_sleep_mode": True, "newer": [1]},
        {"kv_cache_size_tokens": 7, "kv_cache_max_concurrency": 1.0, "enable_sleep_mode": True, "newer": [2]},
        {"kv_cache_size_tokens": 9, "kv_cache_max_concurrency": 1.5, "enable_sleep_mode": False},
    ]
    merged, warning = merge_registrations([ready(n, dtype="float32", new=1, **it) for n, it in enumerate(said)])
    assert warning is None
    assert merged is not None
    assert (merged.max_model_len, merged.num_gpu_blocks, merged.kv_cache_size_tokens) == (98, 111, 21)
    assert (merged.block_size, merged.dtype, merged.kv_cache_max_concurrency) == (16, "float32", 3.0)
    assert (merged.enable_sleep_mode, merged.data_parallel_rank, merged.vllm_version) == (False, None, None)
    assert merged.received["new"] == 1 and merged.received["newer"] is None and merged.received["max_model_len"] == 98


@pytest.mark.feature("F07")
def test_ranks_that_are_not_alike() -> None:
    merged, warning = merge_registrations([ready(0, dtype="float16"), ready(1, block_size=32, dtype="bfloat16")])
    assert merged is not None and (merged.block_size, merged.dtype, merged.max_model_len) == (None, None, 99)
    assert warning == "the ranks of one client differ in block_size (16, 32) and dtype (float16, bfloat16)"


def test_what_a_rank_does_not_say_is_not_known() -> None:
    assert merge_registrations([None, None]) == (None, None)
    merged, warning = merge_registrations([ready(0), None])
    assert (merged and merged.max_model_len, merged and merged.num_gpu_blocks, warning) == (100, None, None)
    merged, _ = merge_registrations([ready(0, num_gpu_blocks=None), ready(1)])
    assert merged is not None and merged.num_gpu_blocks is None


def test_one_rank_is_as_it_says() -> None:
    one = ready(0, something_new={"a": 1})
    merged, warning = merge_registrations([one])
    assert merged == one and merged is not one and merged.received == one.received and warning is None


@pytest.mark.anyio
@pytest.mark.feature("F07")
async def test_a_client_has_them_merged(caplog: pytest.LogCaptureFixture) -> None:
    """And warns of ranks that are not alike, once."""
    caplog.set_level(logging.WARNING)
    said = [{"block_size": 16 * (rank + 1), "max_model_len": 90 - rank} for rank in range(3)]
    engines = [misbehaving("registers_with", json.dumps(fields)) for fields in said]
    with anyio.fail_after(30):
        async with EngineCoreClient(engines) as core:
            merged = core.merged_registration
            assert merged is not None
            assert (merged.max_model_len, merged.num_gpu_blocks, merged.block_size) == (88, 3, None)
            assert [one and one.block_size for one in core.registrations.values()] == [16, 32, 48]
            assert core.merged_registration is merged
    assert sum("differ in block_size (16, 32, 48)" in record.message for record in caplog.records) == 1
