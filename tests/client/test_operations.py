"""Operations on the engine as a whole: against our engine core, and byte by byte against a peer that records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    EngineAsleepError,
    EngineClient,
    LoRARequest,
    RequestFailed,
    RequestRejected,
    SamplingParams,
    UtilityError,
    UtilityRejected,
)
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=1500)


@pytest.mark.feature("C19", "C20", "C21")
async def test_pause_abort_ends_every_stream_normally() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.002)) as client:
            streams = [await client.submit([n], LONG) for n in range(3)]
            first = (await anext(streams[0])).token_ids
            await client.pause_generation()
            # The reply is a fence: the ends have reached their consumers.
            assert client.statistics()["requests_in_flight"] == 0
            assert await client.is_paused()
            assert await client.is_sleeping()
            for n, stream in enumerate(streams):
                tokens = first if n == 0 else []
                async for out in stream:
                    tokens += out.token_ids
                assert out.finish_reason == "abort"
                assert tokens == expected_tokens([n], len(tokens))
            with pytest.raises(EngineAsleepError, match="is paused"):  # it is not even sent
                [out async for out in client.generate([1], LONG)]
            client._open_admission()  # as if another client had paused the engine
            with pytest.raises(RequestFailed) as caught:
                [out async for out in client.generate([1], LONG)]
            assert (caught.value.code, caught.value.retryable) == ("engine_paused", True)
            await client.resume_generation()
            assert not await client.is_paused()
            out = [t async for out in client.generate([7], SamplingParams(max_tokens=4)) for t in out.token_ids]
            assert out == expected_tokens([7], 4)


@pytest.mark.feature("C19")
async def test_pause_keep_freezes_and_resume_goes_on() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.002)) as client:
            stream = await client.submit([5], SamplingParams(max_tokens=60))
            tokens = (await anext(stream)).token_ids
            async with client.paused("keep"):
                steps = (await client.core.utility("get_engine_statistics"))["num_steps"]
                assert (await client.core.utility("get_engine_statistics"))["num_steps"] == steps
            async for out in stream:
                tokens += out.token_ids
            assert tokens == expected_tokens([5], 60)


@pytest.mark.feature("C19")
async def test_pause_wait_lets_running_requests_finish() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.002)) as client:
            stream = await client.submit([5], SamplingParams(max_tokens=30))
            await anext(stream)
            await client.pause_generation(mode="wait")
            assert [out async for out in stream][-1].finish_reason == "length"
            await client.resume_generation()


@pytest.mark.feature("C19", "C20")
async def test_a_cancelled_pause_is_resumed() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with anyio.CancelScope() as scope:
                async with client.paused():
                    scope.cancel()
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
            assert not await client.is_paused()
            with pytest.raises(ZeroDivisionError):
                async with client.paused():
                    raise ZeroDivisionError
            assert not await client.is_paused()


@pytest.mark.feature("C07", "C13")
async def test_results_have_their_types() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            assert await client.supported_tasks() == ("generate",)
            assert await client.reset_prefix_cache() is True
            await client.reset_mm_cache()
            await client.update_weight_version("v2")
            assert await client.get_weight_version() == "v2"
            assert await client.list_loras() == set()
            with pytest.raises(UtilityError, match="no profiler"):  # its refusal, not a hang
                await client.start_profile()


async def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with pytest.raises(UtilityRejected, match="no way to pause"):
                await client.pause_generation(mode="never")  # type: ignore[arg-type]
            with pytest.raises(UtilityRejected, match="pickled"):
                await client.collective_rpc(print)  # type: ignore[arg-type]
            assert not await client.is_paused()


CALLS: list[tuple[str, tuple[Any, ...], str, list[Any]]] = [
    ("sleep", (2, "wait"), "sleep", [2, "wait"]),
    ("wake_up", (), "wake_up", [None]),
    ("wake_up", (["weights"],), "wake_up", [["weights"]]),
    ("reset_encoder_cache", (), "reset_encoder_cache", []),
    ("reset_mm_cache", (), "reset_mm_cache", []),
    ("update_weight_version", ("v2",), "set_weight_version", ["v2"]),
    ("start_profile", ("p", 1, 2), "profile", [True, "p", 1, 2]),
    ("stop_profile", (), "profile", [False]),
    ("execute_dummy_batch", (), "execute_dummy_batch", []),
    ("release_kv_cache_memory", (), "release_kv_cache_memory", []),
    ("save_sharded_state", ("/d", None, 9), "save_sharded_state", ["/d", None, 9]),
    ("resume_generation", (), "resume_scheduler", []),
    ("pause_generation", (), "pause_generation", ["abort", True]),
]


@pytest.mark.feature("C38")
async def test_names_and_arguments_on_the_wire(tmp_path: Path) -> None:
    path = tmp_path / "received"
    lora = LoRARequest("adapter", 3, "/adapters/3")
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("record", str(path))) as client:  # it answers "ok" to everything
            for name, args, _, _ in CALLS:
                await getattr(client, name)(*args)
            typed: list[tuple[str, tuple[Any, ...]]] = [
                ("add_lora", (lora,)), ("remove_lora", (3,)), ("pin_lora", (3,)), ("list_loras", ()),
                ("compute_weight_checksums", ()), ("get_kv_cache_group_metadata", ()),
            ]  # fmt: skip
            for name, args in typed:
                with pytest.raises(UtilityError, match="returned 'ok'"):
                    await getattr(client, name)(*args)
            with pytest.raises(UtilityError, match="returned 'ok'"):
                await client.collective_rpc("check_health", 5.0, (1,), {"a": 2})
    sent = [payload[2:] for _, payload in map(json.loads, (await anyio.Path(path).read_text()).splitlines())]
    assert sent == [
        *([method, arguments] for _, _, method, arguments in CALLS),
        ["add_lora", [["adapter", 3, "/adapters/3", None, False, False]]],
        ["remove_lora", [3]],
        ["pin_lora", [3]],
        ["list_loras", []],
        ["compute_weight_checksums", []],
        ["get_kv_cache_group_metadata", []],
        ["collective_rpc", ["check_health", 5.0, [1], {"a": 2}]],
    ]


@pytest.mark.feature("C38")
async def test_an_argument_that_the_release_does_not_take_is_not_dropped(tmp_path: Path) -> None:
    """Before 0.17 ``sleep`` knows no mode: to send it without would abort what was to be awaited."""
    path = tmp_path / "received"
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("record", str(path), "0.16.0")) as client:
            await client.sleep(2)
            with pytest.raises(
                UtilityError, match=r"takes 1 of the arguments \(2, 'wait'\) of 'sleep'.*nothing was sent"
            ):
                await client.sleep(2, "wait")
            with pytest.raises(UtilityError, match="nothing was sent"):
                await client.pause_generation(mode="keep")
            with pytest.raises(UtilityError, match="no utility method 'get_weight_version'; nothing was sent"):
                await client.get_weight_version()
    sent = [payload[2:] for _, payload in map(json.loads, (await anyio.Path(path).read_text()).splitlines())]
    assert sent == [["sleep", [2]]]


@pytest.mark.feature("C25")
async def test_collective_rpc_reaches_every_worker_of_the_chosen_ranks() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=[misbehaving("collective"), misbehaving("collective")]) as client:
            arguments = ["method", 2.0, ["a"], {"k": 1}]
            everywhere = [[rank, worker, "collective_rpc", arguments] for rank in (0, 1) for worker in (0, 1)]
            assert await client.collective_rpc("method", 2.0, ("a",), {"k": 1}) == everywhere
            assert await client.collective_rpc("method", 2.0, ("a",), {"k": 1}, ranks=[1]) == everywhere[2:]
            with pytest.raises(RequestRejected, match="there is no rank 2"):
                await client.collective_rpc("method", ranks=[0, 2])
            with pytest.raises(UtilityRejected, match="never does"):
                await client.collective_rpc(print)  # type: ignore[arg-type]
