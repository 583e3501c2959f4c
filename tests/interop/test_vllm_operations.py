"""Every utility call on a real vLLM engine core: what it answers, or why the build for CPUs refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from vllm_engines import make_vllm_model, one_process, tiny_vllm

from anyengine import EngineClient, LoRARequest, SamplingParams, UtilityError
from anyengine._wire.methods import METHODS, arity_at

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
async def client(anyio_backend: Any, vllm_python: str, model: Path) -> AsyncIterator[EngineClient]:
    engine = tiny_vllm(vllm_python, model, env=one_process)
    with anyio.fail_after(300):
        async with EngineClient(engine=engine, shutdown_grace_s=20) as client:
            yield client


async def pause_and_resume(client: EngineClient) -> Any:
    await client.pause_generation(mode="wait", clear_cache=True)
    paused = await client.is_paused()
    await client.resume_generation()
    return paused, await client.is_paused()


async def sleep_and_wake(client: EngineClient) -> Any:
    await client.sleep(0, "wait")
    asleep = await client.is_sleeping()
    return asleep, await client.wake_up(["scheduling"]), await client.is_sleeping()


async def checksum_lengths(client: EngineClient) -> Any:
    (of_worker,) = await client.compute_weight_checksums()
    return set(map(len, of_worker.values()))  # SHA-256, in hexadecimal


async def weight_versions(client: EngineClient) -> Any:
    before = await client.get_weight_version()
    await client.update_weight_version("v2")
    return before, await client.get_weight_version()


Walk = Callable[[EngineClient, Path], Awaitable[Any]]

WORKS: dict[str, tuple[Walk, Any]] = {
    "get_supported_tasks": (lambda client, _: client.supported_tasks(), ("generate",)),
    "pause_scheduler resume_scheduler is_scheduler_paused": (
        lambda client, _: pause_and_resume(client),
        (True, False),
    ),
    "sleep wake_up is_sleeping": (lambda client, _: sleep_and_wake(client), (True, True, False)),
    "set_weight_version get_weight_version": (lambda client, _: weight_versions(client), ("default", "v2")),
    "reset_prefix_cache": (lambda client, _: client.reset_prefix_cache(), True),
    "reset_mm_cache": (lambda client, _: client.reset_mm_cache(), None),
    "reset_encoder_cache": (lambda client, _: client.reset_encoder_cache(), None),
    "execute_dummy_batch": (lambda client, _: client.execute_dummy_batch(), None),
    "get_kv_cache_group_metadata": (
        lambda client, _: client.get_kv_cache_group_metadata(),
        [{"group_idx": 0, "kind": "full_attention", "block_size": 128, "sliding_window": None}],
    ),
    "compute_weight_checksums": (lambda client, _: checksum_lengths(client), {64}),
    "collective_rpc": (lambda client, _: client.collective_rpc("check_health"), [None]),
    "save_sharded_state": (lambda client, path: client.save_sharded_state(str(path)), None),
}

REFUSED: dict[str, tuple[Walk, str]] = {
    "add_lora": (lambda client, _: client.add_lora(LoRARequest("a", 1, "/no/such")), "LoRA is not enabled"),
    "remove_lora": (lambda client, _: client.remove_lora(1), "LoRA is not enabled"),
    "pin_lora": (lambda client, _: client.pin_lora(1), "LoRA is not enabled"),
    "list_loras": (lambda client, _: client.list_loras(), "LoRA is not enabled"),
    "release_kv_cache_memory": (lambda client, _: client.release_kv_cache_memory(), "requires a completed pause first"),
    "profile": (lambda client, _: client.start_profile(), "Profiling is not enabled"),
}
"""With vLLM's own reason. The adapters' calls work where LoRA is enabled: see ``test_vllm_requests.py``."""

NOT_FOR_A_DENSE_ENGINE = {
    "barrier": "only ranks of mixture-of-experts models have it, for tests",
    "handle_fault_tolerance": "ends the input thread of an engine without fault tolerance",
    "reinitialize_distributed": "a step of elastic expert parallelism",
    "commit_prepared_elastic_ep": "a step of elastic expert parallelism",
}


@pytest.mark.feature("C38", "C42")
async def test_every_call(client: EngineClient, tmp_path: Path) -> None:
    table: list[str] = []
    with anyio.fail_after(120):
        for names, (call, expected) in WORKS.items():
            result = await call(client, tmp_path)
            assert result == expected, names
            table.append(f"{names}: {result!r}")
        for name, (call, _) in REFUSED.items():
            try:
                table.append(f"{name}: {await call(client, tmp_path)!r}")
            except UtilityError as exc:
                table.append(f"{name}: refused: {exc}")
    print("\n".join(table))
    assert [path async for path in anyio.Path(tmp_path).iterdir()]  # the state that was saved
    for line, (_, reason) in zip(table[len(WORKS) :], REFUSED.values(), strict=True):
        assert reason in line


def test_no_method_is_left_out() -> None:
    walked = {name for names in (*WORKS, *REFUSED) for name in names.split()} | set(NOT_FOR_A_DENSE_ENGINE)
    assert walked == {name for name in METHODS if arity_at(name, (0, 32, 0)) is not None}


async def test_a_typed_refusal_of_arguments(client: EngineClient) -> None:
    with anyio.fail_after(60):
        with pytest.raises(UtilityError, match="no_such_method"):
            await client.collective_rpc("no_such_method")
        assert await client.ping() >= 0


@pytest.mark.feature("C19", "C20", "C21")
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_pause_modes_under_load(client: EngineClient, mode: Any) -> None:
    """What runs is ended normally, awaited, or frozen until the engine goes on."""
    params = LONG if mode != "wait" else SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    with anyio.fail_after(120):
        async with client.generate([1, 2, 3], params) as stream:
            last = await anext(stream)  # all of it, perhaps, on a busy machine
            received = list(last.token_ids)
            await client.pause_generation(mode=mode, clear_cache=False)
            assert await client.is_paused()
            if mode == "keep":
                held = client.core.session.connection.requests.live
                assert len(held) == 1
                await client.resume_generation()
                received += (await anext(stream)).token_ids
                stream.abort()
            async for last in stream:
                received += last.token_ids
            if mode != "keep":
                assert last.finish_reason == {"abort": "abort", "wait": "length"}[mode]
                await client.resume_generation()
        assert not await client.is_paused()
        if mode == "wait":
            assert len(received) == 60
