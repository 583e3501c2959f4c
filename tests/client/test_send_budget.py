"""What an engine has not read stays bounded: who submits waits, or is refused, and nothing is lost."""

from __future__ import annotations

import gc
import os
import signal
from array import array

import anyio
import psutil
import pytest
from engines import generates, misbehaving, toy

from anyengine import (
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    OverloadedError,
    SamplingParams,
    Tensor,
)
from anyengine._wire import WireSamplingParams
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

LIMIT_BYTES = 1 << 20
PROMPT = list(range(500)) * 400  # 200,000 tokens, about half a megabyte on the wire


def pid_of(core: EngineCoreClient) -> int:
    return core.session.children[0].child.pid


@pytest.mark.case("K67")
async def test_submitters_wait_for_an_engine_that_does_not_read() -> None:
    engine = toy(max_model_len=300_000)
    results: list[list[int]] = []
    with anyio.fail_after(120):
        async with EngineClient(engine=engine, max_unread_bytes=LIMIT_BYTES) as client:
            generates(client)

            async def submit(prompt: list[int]) -> None:
                stream = client.generate(prompt, SamplingParams(max_tokens=3))
                results.append([token async for output in stream for token in output.token_ids])

            os.kill(pid_of(client.core), signal.SIGSTOP)
            try:
                async with anyio.create_task_group() as tasks:
                    for _ in range(20):
                        tasks.start_soon(submit, PROMPT)
                    await anyio.wait_all_tasks_blocked()
                    statistics = client.statistics()
                    assert LIMIT_BYTES <= statistics["unread_bytes"] < 2 * LIMIT_BYTES
                    assert statistics["requests_in_flight"] < 6
                    assert not results
                    os.kill(pid_of(client.core), signal.SIGCONT)
            finally:
                os.kill(pid_of(client.core), signal.SIGCONT)
            expected = expected_tokens(PROMPT, 3)
            assert results == [expected] * 20
            await client.ping()
            assert client.statistics()["unread_bytes"] < LIMIT_BYTES // 4 + len(PROMPT) * 3
            assert client.statistics()["requests_in_flight"] == 0


@pytest.mark.case("K67")
@pytest.mark.blocking_ok  # asks for the memory
@pytest.mark.parametrize("anyio_backend", [("trio", {})], ids=["trio"])
async def test_the_memory_of_the_process_stays_within_the_limit_too() -> None:
    """Two hundred submissions, a hundred megabytes on the wire and more before that, for an engine that is stopped."""
    process, most_bytes = psutil.Process(), 32 << 20
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(max_model_len=300_000), max_unread_bytes=LIMIT_BYTES) as client:
            generates(client)
            gc.collect()
            before_bytes = process.memory_info().rss
            os.kill(pid_of(client.core), signal.SIGSTOP)
            try:
                async with anyio.create_task_group() as tasks:

                    async def submit() -> None:
                        async with client.generate(PROMPT, SamplingParams(max_tokens=3)) as stream:
                            await anext(stream)

                    for _ in range(200):
                        tasks.start_soon(submit)
                    await anyio.wait_all_tasks_blocked()
                    assert process.memory_info().rss - before_bytes < most_bytes
                    assert LIMIT_BYTES <= client.statistics()["unread_bytes"] < 2 * LIMIT_BYTES
                    tasks.cancel_scope.cancel()
            finally:
                os.kill(pid_of(client.core), signal.SIGCONT)
            await client.drain()
            assert client.statistics()["unread_bytes"] < LIMIT_BYTES // 4
            gc.collect()
            assert process.memory_info().rss - before_bytes < most_bytes


@pytest.mark.case("K67")
async def test_a_low_level_client_is_refused_and_told_when() -> None:
    with anyio.fail_after(60):
        async with EngineCoreClient(toy(max_model_len=300_000), max_unread_bytes=LIMIT_BYTES) as core:
            os.kill(pid_of(core), signal.SIGSTOP)
            params = WireSamplingParams(max_tokens=1)
            sent = 0
            try:
                with pytest.raises(OverloadedError, match="has not read what was sent"):
                    for sent in range(20):
                        core.add(EngineCoreRequest(f"r{sent}", PROMPT, sampling_params=params))
                assert core.statistics()["requests_in_flight"] == sent
                with anyio.move_on_after(0.05) as limit:
                    await core.wait_room()
                assert limit.cancelled_caught
            finally:
                os.kill(pid_of(core), signal.SIGCONT)
            await core.wait_room()
            core.add(EngineCoreRequest("last", PROMPT, sampling_params=params))


@pytest.mark.parametrize("end", ["death", "close"])
async def test_the_end_wakes_those_who_wait(end: str) -> None:
    """One request has been sent: it dies with its engine, or is aborted as every other."""
    ends: list[str] = []
    engine = misbehaving("deaf_ears")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with EngineClient(engine=engine, max_unread_bytes=1, shutdown_grace_s=0.1) as client:
                generates(client)

                async def submit() -> None:
                    try:
                        async with client.generate([1], SamplingParams(max_tokens=1)) as stream:
                            ends.append(str((await anext(stream)).finish_reason))
                    except EngineDeadError as exc:
                        ends.append(type(exc).__name__)

                for _ in range(3):
                    tasks.start_soon(submit)
                while client.statistics()["requests_in_flight"] == 0:
                    await anyio.lowlevel.checkpoint()
                await anyio.wait_all_tasks_blocked()
                assert client.statistics()["requests_in_flight"] == 1
                if end == "death":
                    os.kill(pid_of(client.core), signal.SIGKILL)
                    await client.wait_dead()
    closed = ["ClientClosedError", "ClientClosedError", "abort"]
    assert sorted(ends) == (["EngineDeadError"] * 3 if end == "death" else closed)


async def test_short_prompts_cause_no_calls() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=toy()) as client:
            generates(client)
            before = client.core.session.connection.utilities._counter
            for number in range(50):
                async with client.generate([number], SamplingParams(max_tokens=1)) as stream:
                    await anext(stream)
            assert client.core.session.connection.utilities._counter == before


async def test_other_ranks_take_over_from_one_that_does_not_read() -> None:
    with anyio.fail_after(60):
        engines = [toy(max_model_len=300_000), toy(max_model_len=300_000)]
        async with EngineCoreClient(engines, max_unread_bytes=1 << 18) as core:
            stopped = core.session.children[0].child.pid
            os.kill(stopped, signal.SIGSTOP)
            try:
                params = WireSamplingParams(max_tokens=1)
                ranks = []
                for number in range(6):
                    await core.wait_room()
                    ranks.append(core.add(EngineCoreRequest(f"r{number}", PROMPT, sampling_params=params)))
                    await core.ping(rank=1)
                assert sorted(ranks) == [0, 1, 1, 1, 1, 1]
            finally:
                os.kill(stopped, signal.SIGCONT)


async def test_an_engine_that_was_given_up_is_not_asked_again() -> None:
    """It lives on and takes calls; nobody would ever answer, or forget, one that is sent to it."""
    with anyio.fail_after(60):
        async with EngineCoreClient(
            [misbehaving("deaf_ears"), toy(max_model_len=300_000)],
            max_unread_bytes=4 * LIMIT_BYTES,
            liveness_timeout_s=0.6,
            shutdown_grace_s=0.2,
        ) as core:
            for number in range(6):
                core.add(
                    EngineCoreRequest(f"a{number}", PROMPT[:60], sampling_params=WireSamplingParams(max_tokens=1)),
                    rank=0,
                )
                core.session.send_budget.charge(0, LIMIT_BYTES // 2)
            assert (await core.wait_dead(0)).rank == 0
            await core.ping()
            assert core.statistics()["utility_calls_in_flight"] == 0
            assert core.session.connection.rota.serving == (1,)


async def test_views_count_in_bytes() -> None:
    """A tensor may be sent from memory whose items are wider than a byte."""
    embeds = Tensor("float32", (32, 1024), memoryview(array("f", bytes(4 * 32 * 1024))))
    with anyio.fail_after(60):
        async with EngineCoreClient(misbehaving("deaf_ears")) as core:
            params = WireSamplingParams(max_tokens=1)
            core.add(EngineCoreRequest("r", None, sampling_params=params, prompt_embeds=embeds))
            assert core.statistics()["unread_bytes"] >= embeds.nbytes == 4 * 32 * 1024
