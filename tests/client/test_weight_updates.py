"""Other weights while the engine lives: the calls of vLLM's weight transfer, in their order."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from anyengine import EngineClient, LoRARequest, SamplingParams, UtilityError, UtilityRejected
from anyengine.sync import SyncEngineClient
from anyengine.testing.scripted import Script, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio

INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 2]]}


def workers(*rules: UtilityRule) -> ScriptedTwin:
    answer = UtilityRule(method="collective_rpc", do="reply", value=[None, None])
    return ScriptedTwin(Script(utilities=(*rules, answer)))


def asked_of_workers(twin: ScriptedTwin) -> list[Any]:
    """Method and keyword arguments of each call, and the labels."""
    return [
        (args[0], args[3]) if method == "collective_rpc" else tuple(args)
        for _, _, method, args in twin.received("utility")
        if method in ("collective_rpc", "set_weight_version")
    ]


@pytest.mark.feature("C29")
async def test_the_six_calls() -> None:
    twin = workers()
    with anyio.fail_after(30):
        async with EngineClient(engine=twin.engine) as client:
            await client.init_weight_transfer_engine({"master_port": 1234})
            await client.start_weight_update()
            await client.start_draft_weight_update()
            await client.update_weights(INFO)
            await client.update_weights([INFO, {}])
            await client.finish_weight_update()
            await client.finish_weight_update("v2")
            await client.shutdown_weight_transfer_engine()
    assert asked_of_workers(twin) == [
        ("init_weight_transfer_engine", {"init_info": {"master_port": 1234}}),
        ("start_weight_update", None),
        ("start_draft_weight_update", None),
        ("update_weights", {"update_info": INFO}),
        ("update_weights", {"update_info": [INFO, {}]}),
        ("finish_weight_update", None),
        ("finish_weight_update", None),
        ("v2",),
        ("shutdown_weight_transfer_engine", None),
    ]


@pytest.mark.feature("C29")
async def test_a_block_starts_and_finishes() -> None:
    twin = workers()
    with anyio.fail_after(30):
        async with EngineClient(engine=twin.engine) as client:
            async with client.weight_update("v3"):
                await client.update_weights(INFO)
            async with client.weight_update(draft=True):
                pass
    assert [name for name, *_ in asked_of_workers(twin)] == [
        "start_weight_update", "update_weights", "finish_weight_update", "v3",
        "start_draft_weight_update", "finish_weight_update",
    ]  # fmt: skip


@pytest.mark.feature("C29")
async def test_what_is_not_whole_is_not_finished() -> None:
    """Neither after an error of an engine or of the block, nor when it is cancelled."""
    broken = UtilityRule(method="collective_rpc", nth=2, do="fail", message="no such tensor")
    twin = workers(broken)
    with anyio.fail_after(30):
        async with EngineClient(engine=twin.engine) as client:
            with pytest.raises(UtilityError, match="no such tensor"):
                async with client.weight_update("v2"):
                    await client.update_weights(INFO)
            with pytest.raises(ZeroDivisionError):
                async with client.weight_update("v2"):
                    raise ZeroDivisionError
            with anyio.CancelScope() as scope:
                async with client.weight_update("v2"):
                    scope.cancel()
                    await anyio.sleep_forever()
    assert [name for name, *_ in asked_of_workers(twin)] == [
        "start_weight_update", "update_weights", "start_weight_update", "start_weight_update",
    ]  # fmt: skip


async def test_what_is_no_description_is_refused() -> None:
    twin = workers()
    with anyio.fail_after(30):
        async with EngineClient(engine=twin.engine) as client:
            for call, parameter in (
                (client.init_weight_transfer_engine([1]), "init_info"),  # type: ignore[arg-type]
                (client.update_weights("w"), "update_info"),  # type: ignore[arg-type]
                (client.update_weights([INFO, 3]), "update_info"),  # type: ignore[list-item]
                (client.update_weights([]), "update_info"),
                (client.finish_weight_update(3), "weight_version"),  # type: ignore[arg-type]
            ):
                with pytest.raises(UtilityRejected) as caught:
                    await call
                assert caught.value.parameter == parameter
            with pytest.raises(UtilityRejected, match="weight_version"):
                async with client.weight_update(3):  # type: ignore[arg-type]
                    pass
    assert asked_of_workers(twin) == []


async def test_adapters_are_loaded_again_for_the_new_weights() -> None:
    """vLLM unloads all of them at the end of an update: an engine that is not asked first may die of a request."""
    twin = ScriptedTwin(
        Script(
            utilities=(
                UtilityRule(method="collective_rpc", do="reply", value=[None]),
                UtilityRule(method="add_lora", do="reply", value=True),
            ),
            registration={"supports_lora": True, "max_loras": 2},
        )
    )
    adapter, short = LoRARequest("adapter", 1, "/adapter"), SamplingParams(max_tokens=2)
    with anyio.fail_after(30):
        async with EngineClient(engine=twin.engine) as client:
            for _ in range(2):
                assert (await client.complete([1], short, lora_request=adapter)).finished
            async with client.weight_update():
                pass
            for _ in range(2):
                assert (await client.complete([1], short, lora_request="adapter")).finished
    assert [method for _, _, method, _ in twin.received("utility") if method == "add_lora"] == ["add_lora"] * 2


def test_in_threads() -> None:
    twin = workers()
    with SyncEngineClient(engine=twin.engine) as client, client.weight_update("v2"):
        client.update_weights(INFO)
    assert [name for name, *_ in asked_of_workers(twin)] == [
        "start_weight_update", "update_weights", "finish_weight_update", "v2",
    ]  # fmt: skip
