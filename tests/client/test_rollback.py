"""What a request that failed or was cancelled has introduced is not taken for known by the next one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines import misbehaving

from anyengine import (
    CommandEngine,
    EngineClient,
    LoRARequest,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
    RequestRejected,
    SamplingParams,
    Tensor,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def multimodal_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By its configuration; nobody runs it."""
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text('{"vocab_size": 512, "hidden_size": 8, "vision_config": {"depth": 1}}')
    return directory


ONE = SamplingParams(max_tokens=1)


async def answer(client: EngineClient, **fields: Any) -> list[int]:
    return [token async for output in client.generate([1, 2, 3], ONE, **fields) for token in output.token_ids]


async def cancelled_at(step: int, client: EngineClient, **fields: Any) -> None:
    """A request that is cancelled after so many turns of the event loop, wherever it is then; or fails before."""
    async with anyio.create_task_group() as tasks:

        async def attempt() -> None:
            with suppress(RequestRejected):
                await answer(client, **fields)

        tasks.start_soon(attempt)
        for _ in range(step):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


@pytest.mark.case("K68")
async def test_an_adapter_that_was_not_loaded_in_the_end_is_loaded_by_the_next_request() -> None:
    """Every other load fails; some are cancelled before their answer comes."""
    with anyio.fail_after(60):
        async with EngineClient(engine=misbehaving("strict_references")) as client:
            for step in range(12):
                adapter = LoRARequest(f"a{step}", step + 1, f"/adapters/{step}")
                await cancelled_at(step, client, lora_request=adapter)
                for _ in range(2):
                    try:
                        assert await answer(client, lora_request=adapter) == [7]
                    except RequestRejected:
                        assert await answer(client, lora_request=adapter) == [7]
                await client.remove_lora(adapter.lora_int_id)
            assert client.statistics()["requests_in_flight"] == 0


@pytest.mark.case("K68")
async def test_features_are_sent_with_their_data_every_time(multimodal_model: Path) -> None:
    """The client never takes an engine's cache for filled: after whatever end of a request, the next one brings all."""
    engine = misbehaving("strict_references")
    element = MultiModalFieldElem(Tensor("float32", (1, 2), bytes(8)), MultiModalField("batched"))
    feature = MultiModalFeatureSpec({"pixels": element}, "image", "hash-1", PlaceholderRange(1, 1))
    with anyio.fail_after(60):
        async with EngineClient(engine=CommandEngine(argv=engine.argv, model_dir=str(multimodal_model))) as client:
            for step in range(8):
                await cancelled_at(step, client, mm_features=[feature])
                assert await answer(client, mm_features=[feature]) == [7]
