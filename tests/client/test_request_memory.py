"""What a request in flight costs in memory, the engine in the same process included."""

from __future__ import annotations

import gc
import tracemalloc

import anyio
import pytest

from anyengine import EngineClient, SamplingParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin

pytestmark = pytest.mark.anyio

NUM_REQUESTS = 1000
MOST_BYTES = 6 << 10  # with the scripted engine's own record and log of it; the client's budget is 4 KB


@pytest.fixture
def anyio_backend() -> str:
    return "trio"  # memory is that of the client's own objects


@pytest.mark.feature("O25")
async def test_a_live_request_is_small() -> None:
    scripted = ScriptedTwin(Script(requests=(RequestRule(silent=True),)))
    params = SamplingParams(max_tokens=50)
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            warm = [await client.submit([1] * 10, params) for _ in range(100)]
            await client.ping()
            gc.collect()
            tracemalloc.start()
            try:
                streams = [await client.submit([1] * 10, params) for _ in range(NUM_REQUESTS)]
                await client.ping()  # a fence: the engine has read them
                gc.collect()
                each_bytes = tracemalloc.get_traced_memory()[0] / NUM_REQUESTS
            finally:
                tracemalloc.stop()
            assert client.stats().in_flight == NUM_REQUESTS + 100
            for stream in (*warm, *streams):
                stream.close_nowait()
    assert each_bytes < MOST_BYTES, f"{each_bytes:.0f} bytes for each request"
