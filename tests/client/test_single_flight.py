"""What must be known or loaded before the first request is asked for once, however many first requests there are."""

from __future__ import annotations

import anyio
import pytest

from anyengine import EngineClient, LoRARequest, SamplingParams
from anyengine.testing.scripted import Script, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio

SHORT = SamplingParams(max_tokens=1)


async def one_hundred(client: EngineClient, adapter: LoRARequest | None) -> None:
    async def generate() -> None:
        async for _ in client.generate([1], SHORT, lora_request=adapter):
            pass

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(generate)


@pytest.mark.feature("L37")
async def test_one_hundred_first_requests_ask_once() -> None:
    rules = (
        UtilityRule(method="get_supported_tasks", delay_s=0.01),
        UtilityRule(method="add_lora", do="reply", value=True, delay_s=0.01),
    )
    registration = {"supports_lora": True, "max_loras": 2}
    scripted = ScriptedTwin(Script(utilities=rules, registration=registration))
    adapter = LoRARequest("mine", 1, "/adapters/mine")
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            await one_hundred(client, None)
            assert [call[2] for call in scripted.received("utility")] == ["get_supported_tasks"]
            await one_hundred(client, adapter)
            methods = [call[2] for call in scripted.received("utility")]
            assert methods == ["get_supported_tasks", "add_lora"]
            assert len(scripted.received("add")) == 200
