"""Prefill in one engine and decode in another: what the first hands over reaches the second."""

from __future__ import annotations

from typing import Any

import anyio
import numpy as np
import pytest

from anyengine import (
    EngineClient,
    OverloadedError,
    PrefillDecodePair,
    RequestFailed,
    RequestRejected,
    SamplingParams,
)
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

HANDED = {"do_remote_prefill": True, "remote_block_ids": [4, 5], "remote_engine_id": "p"}
PREFILLS = Script(requests=(RequestRule(last={8: HANDED}),))


def transfers(add: list[Any]) -> Any:
    return add[3]["extra_args"]["kv_transfer_params"]


@pytest.mark.feature("R44")
async def test_what_one_hands_over_reaches_the_other() -> None:
    prefill, decode = ScriptedTwin(PREFILLS), ScriptedTwin()
    params = SamplingParams(max_tokens=5, stop_token_ids=[901], extra_args={"mine": 1})
    with anyio.fail_after(30):
        async with EngineClient(engine=prefill.engine) as one, EngineClient(engine=decode.engine) as other:
            pair = PrefillDecodePair(one, other)
            out = await pair.complete([1, 2, 3], params, request_id="x", priority=2)
            stream = await pair.submit([1, 2, 3], SamplingParams(max_tokens=2))
            assert (await stream.final()).token_ids == expected_tokens([1, 2, 3], 2)
    assert (out.token_ids, out.request_id) == (expected_tokens([1, 2, 3], 5), "x")
    first, second = prefill.received("add")[0], decode.received("add")[0]
    assert (first[1], first[3]["max_tokens"], first[13]) == (second[1], 1, 2) == ([1, 2, 3], 1, second[13])
    assert transfers(first)["do_remote_decode"] is True and first[3]["extra_args"]["mine"] == 1
    assert transfers(second) == HANDED and second[3]["extra_args"]["mine"] == 1
    assert (second[3]["max_tokens"], second[3]["stop_token_ids"]) == (5, [901])


@pytest.mark.feature("R44")
async def test_blocks_that_nobody_fetches_are_given_back() -> None:
    """The second engine takes no request, or the caller is cancelled while it waits to be taken."""
    prefill, decode = ScriptedTwin(PREFILLS), ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with (
            EngineClient(engine=prefill.engine) as one,
            EngineClient(engine=decode.engine, max_num_queued_reqs=1, admission="wait") as other,
        ):
            pair = PrefillDecodePair(one, other)
            async with other.generate([9], SamplingParams(max_tokens=1900)):
                with pytest.raises(OverloadedError):
                    await pair.submit([1], request_id="late", nowait=True)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(pair.submit, [2])
                    while other.stats().waiting == 0:
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
            await one.is_paused()  # a fence
            assert one.stats().in_flight == other.stats().in_flight == 0
    adds = prefill.received("add")
    assert [len(add) > 19 and add[19] for add in adds] == [False, True, False, True]
    assert transfers(adds[1]) == transfers(adds[3]) == HANDED
    assert len(decode.received("add")) == 1


@pytest.mark.feature("R44")
async def test_an_engine_that_hands_nothing_over() -> None:
    decode = ScriptedTwin()
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine) as one, EngineClient(engine=decode.engine) as other:
            with pytest.raises(RequestFailed, match="kv_transfer_config") as caught:
                await PrefillDecodePair(one, other).submit([1])
    assert caught.value.code == "nothing_handed_over"
    assert decode.received("add") == []


async def test_embeddings_are_refused_before_anything_is_computed() -> None:
    """They could not be handed over, and their blocks would stay."""
    prefill = ScriptedTwin()
    with anyio.fail_after(30):
        async with EngineClient(engine=prefill.engine) as one, EngineClient(engine=ScriptedTwin().engine) as other:
            with pytest.raises(RequestRejected, match="embeddings"):
                await PrefillDecodePair(one, other).submit(np.zeros((3, 8), np.float32))
    assert prefill.received("add") == []
