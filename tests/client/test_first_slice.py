"""The whole product on a toy model: enter, generate, leave, on three loops."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest
from engines import toy

from anyengine import (
    ClientClosedError,
    ClientState,
    EngineClient,
    OutputKind,
    RequestOutput,
    SamplingParams,
    WrongLoopError,
)
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


@pytest.mark.feature("L25")
@pytest.mark.case("K43")
async def test_generate_yields_the_models_tokens() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            outputs = [out async for out in client.generate([1, 2, 3], SamplingParams(max_tokens=20))]
    assert [token for out in outputs for token in out.token_ids] == expected_tokens([1, 2, 3], 20)
    assert [out.finish_reason for out in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == "length"
    assert (outputs[-1].num_prompt_tokens, outputs[-1].num_output_tokens) == (3, 20)
    assert client.state is ClientState.CLOSED


async def test_output_kinds_tell_the_same_story() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.001)) as client:
            seen: dict[OutputKind, list[RequestOutput]] = {}
            for kind in OutputKind:
                params = SamplingParams(max_tokens=9, output_kind=kind)
                seen[kind] = [out async for out in client.generate([4, 5], params)]
    expected = expected_tokens([4, 5], 9)
    assert [t for out in seen[OutputKind.DELTA] for t in out.token_ids] == expected
    cumulative = [out.token_ids for out in seen[OutputKind.CUMULATIVE]]
    assert cumulative[-1] == expected
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(cumulative))
    assert [out.token_ids for out in seen[OutputKind.FINAL_ONLY]] == [expected]


async def test_outputs_share_no_mutable_state() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.001)) as client:
            prompt = [7, 8]
            params = SamplingParams(max_tokens=6, output_kind=OutputKind.CUMULATIVE)
            last: list[int] = []
            async for out in client.generate(prompt, params):
                last = list(out.token_ids)
                out.token_ids.clear()
                prompt.clear()
    assert last == expected_tokens([7, 8], 6)


@pytest.mark.feature("L33")
async def test_one_label_many_requests() -> None:
    """Two live requests with the same id stream independently; labels are echoed, wire ids are unique."""
    results: dict[int, list[int]] = {}

    async def consume(client: EngineClient, first: int) -> None:
        results[first] = []
        async for out in client.generate([first], SamplingParams(max_tokens=10), request_id="x"):
            assert out.request_id == "x"
            results[first] += out.token_ids

    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client, anyio.create_task_group() as tasks:
            for first in range(20):
                tasks.start_soon(consume, client, first)
    assert results == {first: expected_tokens([first], 10) for first in range(20)}


async def test_submit_sends_before_it_returns() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=3))
            assert client.statistics()["requests_in_flight"] == 1
            assert [t async for out in stream for t in out.token_ids] == expected_tokens([1], 3)


async def test_generate_is_inert() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            stream = client.generate([1])
            assert client.statistics()["requests_in_flight"] == 0
            assert stream.request_id is None
            await stream.aclose()
            assert [out async for out in stream] == []
            assert (await client.core.utility("get_engine_statistics"))["adds_received"] == 0


@pytest.mark.feature("L01")
def test_construction_touches_no_event_loop() -> None:
    EngineClient(engine=toy())  # outside any loop
    with pytest.raises(ValueError, match="not both"):
        EngineClient("model", engine=toy())
    with pytest.raises(ValueError, match="give the EmbeddedEngine as engine="):
        EngineClient(toy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="engine='model' is a model's name"):
        EngineClient(engine="model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_death"):
        EngineClient(engine=toy(), on_death="explode")  # type: ignore[arg-type]


async def test_use_before_and_after_the_block() -> None:
    client = EngineClient(engine=toy())
    with pytest.raises(ClientClosedError):
        await client.submit([1])
    with anyio.fail_after(30):
        async with client:
            with pytest.raises(RuntimeError, match="in use"):
                await client.__aenter__()
        with pytest.raises(ClientClosedError):
            await client.submit([1])
        with pytest.raises(ClientClosedError):
            await client.core.utility("is_sleeping")
        async with client:  # entering again starts afresh
            out = [out async for out in client.generate([1], SamplingParams(max_tokens=2))][-1]
        assert out.finish_reason == "length"


async def test_use_from_another_thread_is_refused() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:

            def add() -> None:
                client.core.usable_session()

            with pytest.raises(WrongLoopError):
                await anyio.to_thread.run_sync(add)
