"""What a request carries beside prompt and parameters, as the engine gets it; adapters, which it must have first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from engines import generates, misbehaving, toy

from anyengine import (
    EngineClient,
    LoRARequest,
    RequestFailed,
    RequestRejected,
    SamplingParams,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.anyio

FIELDS: dict[str, Any] = {
    "priority": -3,
    "cache_salt": "salt",
    "trace_headers": {"traceparent": "00-1-2-01"},
    "session_id": "session",
    "reasoning_ended": True,
    "reasoning_parser_kwargs": {"enable_thinking": False},
}
POSITIONS = {  # docs/protocol.md
    "lora_request": 6, "cache_salt": 7, "priority": 13, "trace_headers": 14, "reasoning_ended": 17,
    "reasoning_parser_kwargs": 18, "session_id": 20,
}  # fmt: skip


async def messages(path: Path, kind: str) -> list[Any]:
    lines = [json.loads(line) for line in (await anyio.Path(path).read_text()).splitlines()]
    return [payload for name, payload in lines if name == kind]


async def finish(client: EngineClient, **fields: Any) -> None:
    async for _ in client.generate([1, 2], SamplingParams(max_tokens=1), **fields):
        pass


@pytest.mark.feature("R48")
async def test_fields_arrive(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("adapters", str(path))) as client:
            await finish(client, **FIELDS)
            await finish(client)
            with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'salt'"):
                client.generate([1], salt="x")  # type: ignore[call-arg]
    given, nothing = await messages(path, "add")
    assert {name: given[POSITIONS[name]] for name in FIELDS} == FIELDS
    assert {nothing[POSITIONS[name]] for name in FIELDS if name != "priority"} == {None}


async def test_an_adapter_is_loaded_before_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lora, lost = LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/nowhere")
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("adapters", str(path))) as client:
            for _ in range(2):
                await finish(client, lora_request=lora)
            with pytest.raises(RequestRejected, match="no such file") as caught:
                await finish(client, lora_request=lost)
            assert (caught.value.parameter, bool(caught.value.remedy)) == ("lora_request", True)
            with pytest.raises(RequestRejected, match="empty"):  # bad input, before anything is sent
                await client.submit([], lora_request=LoRARequest("c", 3, "/c"))
            with pytest.raises(RequestRejected, match="stands for the adapter 'a'"):  # the engine would use it
                await client.submit([1], lora_request=LoRARequest("e", 1, "/e"))
            await client.remove_lora(1)
            await finish(client, lora_request=lora)
            await finish(client, lora_request=LoRARequest("e", 1, "/e", load_inplace=True))
            await finish(client, lora_request=LoRARequest("d", 4, "/d", load_inplace=True))
    calls = [[payload[2], payload[3][0][0]] for payload in await messages(path, "utility") if payload[2] == "add_lora"]
    assert calls == [["add_lora", name] for name in ("a", "b", "a", "e", "d")]
    adds = [payload[6] for payload in await messages(path, "add")]
    assert [adapter[0] for adapter in adds] == ["a", "a", "a", "e", "d"]
    assert adds[-1][4] is False  # it is loaded already; the engine would load it again in every step


async def test_adapters_beyond_the_engines_room_are_loaded_again(tmp_path: Path) -> None:
    """An engine keeps as many as it has slots for, and dies if it cannot read again what it has dropped."""
    path = tmp_path / "log"
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("adapters", str(path))) as client:
            for number in (1, 2, 1):
                await finish(client, lora_request=LoRARequest(f"l{number}", number, f"/{number}"))
    assert [payload[3][0][0] for payload in await messages(path, "utility")] == ["l1", "l2", "l1"]


async def test_an_adapter_that_was_removed_behind_the_clients_back_is_loaded_again(tmp_path: Path) -> None:
    path, lora = tmp_path / "log", LoRARequest("a", 1, "/a")
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("adapters", str(path))) as client:
            await finish(client, lora_request=lora)
            await client.core.utility("remove_lora", 1)
            await finish(client, lora_request=lora)
    calls = [payload[2] for payload in await messages(path, "utility")]
    assert calls == ["add_lora", "remove_lora", "add_lora"]


@pytest.mark.feature("R54")
async def test_an_engine_without_adapters_is_asked_for_none() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("registers_with", '{"supports_lora": false}')) as client:
            generates(client)
            with pytest.raises(RequestRejected, match="LoRA is not enabled") as caught:
                await client.submit([1], lora_request=LoRARequest("a", 1, "/a"))
    assert caught.value.parameter == "lora_request"


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"logprob_token_ids": [1]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ],
)
async def test_what_our_own_engine_cannot_do_fails_one_request(params: dict[str, Any]) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with pytest.raises(
                RequestFailed, match=r"not supported by this engine|has no (log-prob|structured_outputs)"
            ):
                async for _ in client.generate([1, 2], SamplingParams(**params)):
                    pass
            with pytest.raises(RequestRejected, match="LoRA is not enabled"):
                await client.submit([1], lora_request=LoRARequest("a", 1, "/a"))
            with pytest.raises(RequestRejected, match="takes no embeddings"):
                await client.submit(np.ones((2, 4), np.float32))
            await finish(client)
