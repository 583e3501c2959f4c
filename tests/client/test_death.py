"""Death: whoever waits is told, with the cause; whoever calls later is told at once."""

from __future__ import annotations

import os
import signal

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    ClientClosedError,
    ClientState,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    RequestFailed,
    SamplingParams,
)
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


@pytest.mark.feature("L05")
async def test_kill_9_tells_fifty_streams_and_three_calls() -> None:
    """Each raises EngineDeadError with pid and signal, within 1 s; no thread is left (leak check)."""
    errors: list[EngineDeadError] = []
    started = 0
    all_started = anyio.Event()

    async def consume(client: EngineClient, first: int) -> None:
        nonlocal started
        tokens: list[int] = []
        try:
            async with client.generate([first], SamplingParams(max_tokens=1000)) as stream:
                async for out in stream:
                    if not tokens:
                        started += 1
                        if started == 50:
                            all_started.set()
                    tokens += out.token_ids
        except EngineDeadError as exc:
            errors.append(exc)
            assert tokens == expected_tokens([first], len(tokens))  # what was delivered first is right

    async def call(client: EngineClient) -> None:
        try:
            # A call while the engine is stopped cannot be answered before the kill.
            await client.core.utility("get_engine_statistics")
        except EngineDeadError as exc:
            errors.append(exc)

    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.01)) as client:
            pid = client.core.session.engines[0].child.pid
            async with anyio.create_task_group() as tasks:
                for first in range(50):
                    tasks.start_soon(consume, client, first)
                await all_started.wait()
                os.kill(pid, signal.SIGSTOP)
                for _ in range(3):
                    tasks.start_soon(call, client)
                while client.statistics()["utility_calls_in_flight"] < 3:
                    await anyio.lowlevel.checkpoint()
                os.kill(pid, signal.SIGKILL)
                with anyio.fail_after(1):
                    while len(errors) < 53:
                        await anyio.lowlevel.checkpoint()
            with pytest.raises(EngineDeadError):
                await client.submit([1])
            with pytest.raises(EngineDeadError):
                await client.core.utility("is_sleeping")
            assert client.state is ClientState.DEAD
            assert client.statistics()["requests_in_flight"] == 0
    assert {(error.pid, error.signal, error.exit_code, error.rank) for error in errors} == {(pid, "SIGKILL", None, 0)}
    assert len({id(error) for error in errors}) == 53  # each waiter has its own instance
    assert {type(error) for error in errors} == {EngineDeadError}
    assert len({id(error.__cause__) for error in errors}) == 1  # and all have the first failure as cause


@pytest.mark.feature("L02")
async def test_an_early_dead_sentinel_is_not_lost() -> None:
    """No request is ever sent; the drain runs before the block's first statement, so the sentinel is seen."""
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("dead_after_ready")) as client:
            cause = await client.wait_dead()
            with anyio.fail_after(1), pytest.raises(EngineDeadError):
                await client.submit([1])
            await client.core.session.engines[0].child.exited.wait()  # which nobody has waited for
    assert client.shutdown_report is not None
    assert [one.exit_code for one in client.shutdown_report.exits] == [7]
    assert "RuntimeError: the model exploded" in cause.stderr_tail


@pytest.mark.feature("L02")
async def test_on_death_cancel_leaves_the_block() -> None:
    with anyio.fail_after(30), pytest.raises(EngineDeadError) as caught:
        async with EngineClient(engine=misbehaving("dead_after_ready"), on_death="cancel"):
            await anyio.sleep_forever()
    assert "ENGINE_CORE_DEAD" in str(caught.value)


async def test_on_death_cancel_leaves_the_block_of_the_low_level_client() -> None:
    with anyio.fail_after(30), pytest.raises(EngineDeadError):
        async with EngineCoreClient(misbehaving("dead_after_ready"), on_death="cancel"):
            await anyio.sleep_forever()


async def test_delivered_tokens_come_before_the_error_and_the_error_stays() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(fail_at_step=4)) as client:
            stream = client.generate([1], SamplingParams(max_tokens=50))
            tokens: list[int] = []
            with pytest.raises(EngineDeadError) as caught:
                async for out in stream:
                    tokens += out.token_ids
            assert tokens == expected_tokens([1], 3)
            for _ in range(2):
                with pytest.raises(EngineDeadError):
                    await anext(stream)
    assert "RuntimeError: the toy fails at step 4, as told" in str(caught.value)
    assert any("step" in line or "Error" in line for line in caught.value.stderr_tail)
    assert client.shutdown_report is not None
    assert [one.exit_code for one in client.shutdown_report.exits] == [1]


async def test_sigterm_from_outside_fails_requests_with_what_they_have() -> None:
    """An abort that nobody asked for through this client is RequestFailed, with the tokens so far."""
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.01)) as client:
            stream = client.generate([1], SamplingParams(max_tokens=1000))
            tokens = (await anext(stream)).token_ids
            os.kill(client.core.session.engines[0].child.pid, signal.SIGTERM)
            with pytest.raises(RequestFailed) as caught:
                async for out in stream:
                    tokens += out.token_ids
            error = caught.value
            assert error.code == "engine_aborted"
            assert error.partial.token_ids == tokens
            cause = await client.wait_dead()
    assert cause.exit_code == 0


async def test_cancelling_the_block_is_not_a_death() -> None:
    """Consumers elsewhere get ClientClosedError: no engine failed (K05's second half)."""
    caught: list[EngineDeadError] = []
    waiting = anyio.Event()

    async def consume(client: EngineClient) -> None:
        try:
            async for _ in client.generate([1], SamplingParams(max_tokens=10_000)):
                waiting.set()
        except EngineDeadError as exc:
            caught.append(exc)

    async def wait_dead(client: EngineClient) -> None:
        caught.append(await client.wait_dead())

    with anyio.fail_after(30):
        async with anyio.create_task_group() as elsewhere:
            with anyio.CancelScope() as scope:
                async with EngineClient(engine=toy(step_delay_s=0.01, max_model_len=20_000)) as client:
                    elsewhere.start_soon(wait_dead, client)
                    await anyio.lowlevel.checkpoint()
                    scope.cancel()
                    await anyio.sleep_forever()
    assert [type(error) for error in caught] == [ClientClosedError]


@pytest.mark.parametrize("link", ["input", "output"])
async def test_a_deaf_or_mute_engine_is_dead_though_its_process_lives(link: str) -> None:
    """Its thread for one direction ended, and nothing else would ever tell. Whoever waits is told."""
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("loses_link", link)) as client:
            assert await client.core.utility("first") == "done"
            stream = await client.submit([1], SamplingParams(max_tokens=5))
            with pytest.raises(EngineDeadError, match=f"lives, but its {link} connection is gone"):
                await anext(stream)
            with pytest.raises(EngineDeadError):
                await client.core.utility("second")
            assert client.state is ClientState.DEAD
            cause = await client.wait_dead()
    assert (cause.exit_code, cause.signal) == (None, None)
