"""What an engine says of a request that it fails reaches the consumer, behind what was generated before."""

from __future__ import annotations

import json

import anyio
import pytest
from engines import misbehaving

from anyengine import EngineClient, RequestFailed, SamplingParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin

pytestmark = pytest.mark.anyio

DETAIL = {"code": "engine_paused", "message": "come back later", "retryable": True}


async def failure(version: str, error: object) -> tuple[list[int], RequestFailed]:
    received: list[int] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("fails_requests", version, json.dumps(error))) as client:
            with pytest.raises(RequestFailed) as caught:
                async for output in client.generate([1], SamplingParams(max_tokens=9), request_id="mine"):
                    received += output.token_ids
            assert client.statistics()["requests_in_flight"] == 0
    return received, caught.value


@pytest.mark.feature("O19")
async def test_the_engines_own_reason_is_in_the_error() -> None:
    received, error = await failure("0.33.0", DETAIL)
    assert received == [5]
    assert (error.code, error.retryable, error.request_id) == ("engine_paused", True, "mine")
    assert "come back later" in str(error)
    assert error.partial.token_ids == [5]


@pytest.mark.feature("O19")
@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
async def test_an_engine_that_gives_no_reason(version: str) -> None:
    received, error = await failure(version, None)
    assert received == [5] and error.partial.token_ids == [5]
    assert (error.code, error.status, error.retryable) == ("request_failed", 500, False)
    assert "it gave no reason" in str(error)


async def test_tokens_and_an_error_that_arrive_together_are_both_delivered() -> None:
    """The consumer is woken once for both: it must not wait for what is there already."""
    rule = RequestRule(tokens=(5, 6), finish="error", error={"code": "broken", "message": "it is"})
    with anyio.fail_after(20):
        async with EngineClient(engine=ScriptedTwin(Script(requests=(rule,), tokens_per_frame=2)).engine) as client:
            received: list[int] = []
            with pytest.raises(RequestFailed) as caught:
                async for output in client.generate([1], SamplingParams(max_tokens=9)):
                    received += output.token_ids
            assert received == [5, 6] and caught.value.code == "broken"
            assert caught.value.partial.token_ids == [5, 6]
