"""``encode``: one result, one error, and the same ways out as a stream has."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    EngineClient,
    EngineDeadError,
    OutputProcessingError,
    PoolingParams,
    RequestFailed,
    RequestRejected,
    SamplingParams,
)

pytestmark = pytest.mark.anyio

EMBED = PoolingParams(task="embed")
GOOD, ERROR, NOTHING, SILENT, DEADLY, ABORTED = ([first, 9] for first in range(1, 7))  # what the peer does with it


async def test_a_result() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler")) as client:
            out = await client.encode(GOOD, EMBED, request_id="mine")
            assert (out.request_id, out.num_prompt_tokens) == ("mine", 2)
            assert (out.data.tolist(), out.data.shape, out.data.dtype) == ([1.0, 2.0, 3.0], (3,), "float32")
            assert out.data.numpy().tolist() == [1.0, 2.0, 3.0]
            assert client.statistics()["requests_in_flight"] == 0


async def test_errors_are_one_requests() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler")) as client:
            for prompt, kind in ((ERROR, RequestFailed), (NOTHING, OutputProcessingError), (ABORTED, RequestFailed)):
                with pytest.raises(kind):
                    await client.encode(prompt, EMBED)
            assert (await client.encode(GOOD, EMBED)).data.shape == (3,)
            assert client.statistics()["requests_in_flight"] == 0


async def test_cancelled() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler")) as client:
            await client.encode(GOOD, EMBED)  # its tasks are known now
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.encode, SILENT, EMBED)
                while not client.statistics()["requests_in_flight"]:
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            assert client.statistics()["requests_in_flight"] == 0
            assert len(await client.core.utility("aborted")) == 1


async def test_aborted_by_label() -> None:
    caught: list[RequestFailed] = []

    async def encode(client: EngineClient) -> None:
        with pytest.raises(RequestFailed, match="aborted before") as failure:
            await client.encode(SILENT, EMBED, request_id="mine")
        caught.append(failure.value)

    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler")) as client:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(encode, client)
                while not client.statistics()["requests_in_flight"]:
                    await anyio.lowlevel.checkpoint()
                assert len(await client.abort("mine")) == 1
    assert [(failure.code, failure.request_id) for failure in caught] == [("aborted", "mine")]


async def test_death_of_the_engine() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler")) as client:
            with pytest.raises(EngineDeadError) as caught:
                await client.encode(DEADLY, EMBED)
            assert caught.value.exit_code == 5


async def test_what_would_end_the_engine_is_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"task": "plugin"}, "task"),
        ({"task": "classify", "dimensions": 3}, "dimensions"),
        ({"task": "embed", "dimensions": 3}, "dimensions"),
        ({"task": "embed", "step_tag_id": 3}, "step_tag_id"),
    ]
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("pooler")) as client:
            for params, parameter in refused:
                with pytest.raises(RequestRejected) as caught:
                    await client.encode(GOOD, PoolingParams(**params))
                assert (caught.value.parameter, bool(caught.value.remedy)) == (parameter, True)
            with pytest.raises(RequestRejected, match="does not generate") as caught:
                await client.submit(GOOD, SamplingParams())
            assert caught.value.parameter == "sampling_params"
            with pytest.raises(TypeError, match="no_such_field"):
                await client.encode(GOOD, EMBED, no_such_field=1)  # type: ignore[call-arg]


async def test_an_engine_that_generates() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with pytest.raises(RequestRejected, match="generates only"):
                await client.encode(GOOD, EMBED)
            assert client.statistics()["requests_in_flight"] == 0
