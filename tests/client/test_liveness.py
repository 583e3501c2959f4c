"""Dead, deaf, mute, stuck and busy are told from each other."""

from __future__ import annotations

import os
import signal

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    ClientState,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    EngineUnresponsiveError,
    SamplingParams,
)
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


def pid_of(core: EngineCoreClient, rank: int = 0) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


async def asked(core: EngineCoreClient, times: int) -> None:
    """Wait until the client has asked its engine for a sign of life."""
    calls = core.session.connection.utilities
    before = calls._counter
    while calls._counter < before + times:  # noqa: ASYNC110 - the client's own calls tell nobody
        await anyio.sleep(0.001)


@pytest.mark.feature("L07")
async def test_a_stopped_engine_is_unresponsive_and_goes_on_afterwards() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.002)) as client:
            assert await client.ping() >= 0
            async with client.generate([7], SamplingParams(max_tokens=100)) as stream:
                received = list((await anext(stream)).token_ids)
                os.kill(pid_of(client.core), signal.SIGSTOP)
                with pytest.raises(
                    EngineUnresponsiveError, match=r"lives, but its main loop has not answered"
                ) as caught:
                    await client.ping(0.3)
                assert caught.value.rank == 0 and caught.value.exit_code is None
                assert client.state is ClientState.READY
                os.kill(pid_of(client.core), signal.SIGCONT)
                async for output in stream:
                    received += output.token_ids
            assert received == expected_tokens([7], 100)


@pytest.mark.feature("L07")
@pytest.mark.case("K02")
async def test_a_stuck_engine_is_given_up_at_the_limit() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.002), liveness_timeout_s=0.8, shutdown_grace_s=0.2) as client:
            stream = await client.submit([7], SamplingParams(max_tokens=1900))
            os.kill(pid_of(client.core), signal.SIGSTOP)
            with pytest.raises(EngineUnresponsiveError, match=r"has not answered for 0.8 s") as caught:
                async for _ in stream:
                    pass
            assert caught.value.rank == 0
            assert caught.value.silent_s is not None and caught.value.silent_s >= 0.4
            assert "its last sign of life was" in str(caught.value)
            assert isinstance(await client.wait_dead(), EngineUnresponsiveError)
            with pytest.raises(EngineUnresponsiveError):
                await client.is_paused()


@pytest.mark.case("K02")
async def test_an_idle_engine_and_a_busy_one_outlive_the_limit() -> None:
    """Each step is shorter than the limit; the whole is many times longer."""
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.15), liveness_timeout_s=2.4) as client:
            await asked(client.core, 2)  # while there is nothing to do
            params = SamplingParams(max_tokens=15)
            out = [token async for output in client.generate([7], params) for token in output.token_ids]
            assert out == expected_tokens([7], 15)
            assert client.state is ClientState.READY


async def test_our_own_loop_held_up_is_no_sign_of_the_engines_death() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(), liveness_timeout_s=1.2) as client:
            for _ in range(3):
                await asked(client.core, 1)
                before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
                signal.sigtimedwait({signal.SIGUSR1}, 1.5)  # holds up the thread and the loop in it, beyond the limit
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            assert await client.ping() >= 0
            assert client.state is ClientState.READY


@pytest.mark.parametrize(("link", "symptom"), [("input", "input connection"), ("output", "output connection")])
async def test_deaf_and_mute_are_told_from_busy(link: str, symptom: str) -> None:
    """Rank 0 is held up, which is no crime; rank 1 breaks. Only rank 1 is given up, and rank 0 goes on."""
    with anyio.fail_after(60):
        async with EngineCoreClient([toy(), misbehaving("loses_link", link)]) as core:
            assert await core.utility("first", rank=1) == "done"
            os.kill(pid_of(core, 0), signal.SIGSTOP)
            try:
                async with anyio.create_task_group() as tasks:

                    async def resume() -> None:
                        if link == "output":
                            await anyio.wait_all_tasks_blocked()  # both are suspects, and stay so
                            assert core.ranks == (0, 1)
                        os.kill(pid_of(core, 0), signal.SIGCONT)

                    with pytest.raises(EngineDeadError, match=f"its {symptom} is gone") as caught:
                        tasks.start_soon(resume)
                        await core.utility("second", rank=1)
            finally:
                os.kill(pid_of(core, 0), signal.SIGCONT)
            assert caught.value.rank == 1
            assert core.ranks == (0,)
            assert await core.utility("is_sleeping") is False


async def test_a_deaf_rank_of_ours_is_stopped() -> None:
    """It would never end by itself, and holds the memory of its model."""
    with anyio.fail_after(60):
        async with EngineCoreClient([toy(), misbehaving("loses_link", "input")]) as core:
            assert await core.utility("first", rank=1) == "done"
            with pytest.raises(EngineDeadError):
                await core.utility("second", rank=1)
            (child,) = [child for child in core.session.children if child.rank == 1]
            await child.wait_ended()
            assert core.state is ClientState.READY


async def test_an_engine_that_talks_and_does_not_hear_is_given_up() -> None:
    """What it says may be old, or somebody else's: only an answer counts."""
    with anyio.fail_after(60):
        async with EngineClient(engine=misbehaving("talks_on"), liveness_timeout_s=0.8, shutdown_grace_s=0.1) as client:
            received = 0
            with pytest.raises(EngineUnresponsiveError, match=r"has not answered for 0\.8 s"):
                async for output in client.generate([1], SamplingParams(max_tokens=50)):
                    received += len(output.token_ids)
            assert received > 0
