"""A health check tells dead, hung, wedged, failing and busy engines apart, within its time, and harms nobody."""

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
    EngineError,
    EngineUnresponsiveError,
    SamplingParams,
)
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


def pid_of(core: EngineCoreClient, rank: int) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


@pytest.mark.feature("L32")
@pytest.mark.case("K04")
async def test_each_level_tells_more() -> None:
    """Rank 0 is well, 1 is hung, 2 is wedged, 3 fails requests, 4 is dead."""
    engines = [toy(), toy(), misbehaving("wedged"), misbehaving("fails_requests", "0.33.0", "null"), toy()]
    with anyio.fail_after(60):
        async with EngineClient(engine=engines, shutdown_grace_s=0.1) as client:
            os.kill(pid_of(client.core, 4), signal.SIGKILL)
            await client.wait_dead(4)
            os.kill(pid_of(client.core, 1), signal.SIGSTOP)
            expected = {
                "process": ["healthy", "healthy", "healthy", "healthy", "dead"],
                "rpc": ["healthy", "silent", "healthy", "silent", "dead"],  # rank 3 answers no calls either
                "generate": ["healthy", "silent", "wedged", "silent", "dead"],
            }
            found = {}
            async with anyio.create_task_group() as tasks:

                async def examine(level: str) -> None:
                    found[level] = await client.health(level, timeout_s=0.4)  # type: ignore[arg-type]

                for level in expected:
                    tasks.start_soon(examine, level)
            for level, verdicts in expected.items():
                health = found[level]
                assert [rank.verdict for rank in health.ranks] == verdicts, level
                assert health.state is ClientState.READY and not health.is_healthy
                assert health.degraded == tuple(n for n, verdict in enumerate(verdicts) if verdict != "healthy")
            assert found["rpc"].silent == (1, 3)
            with pytest.raises(EngineUnresponsiveError, match=r"1 \(silent\), 2 \(wedged\), 3 \(silent\)") as caught:
                found["generate"].raise_unhealthy()
            assert caught.value.rank == 1 and caught.value.silent_s is not None
            with pytest.raises(EngineDeadError) as death:
                found["process"].raise_unhealthy()
            assert death.value.rank == 4 and death.value.signal == "SIGKILL"
            well = found["generate"].ranks[0]
            assert (well.pid, well.num_running, well.asked) == (pid_of(client.core, 0), 0, "generate")
            assert well.last_step_age_s is not None and well.requests_in_flight == 0
            os.kill(pid_of(client.core, 1), signal.SIGCONT)
            assert (await client.health(timeout_s=5)).ranks[1].verdict == "healthy"  # it was not given up
            assert client.statistics()["requests_in_flight"] == 0
            pending = client.core.session.connection.utilities.pending.values()
            assert {call.rank for call in pending} <= {3}  # asked whether it is it that is missing


@pytest.mark.feature("L32")
async def test_an_engine_that_is_busy_with_others_is_healthy() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(max_num_seqs=1, step_delay_s=0.01)) as client:
            async with client.generate([7], SamplingParams(max_tokens=1900)) as stream:
                await anext(stream)
                health = await client.health("generate", timeout_s=0.3)
                assert health.is_healthy and health.ranks[0].verdict == "busy"
                assert health.ranks[0].requests_in_flight == 1
                health.raise_unhealthy()
            short = client.generate([7], SamplingParams(max_tokens=5))
            assert [token async for output in short for token in output.token_ids] == expected_tokens([7], 5)


async def test_an_engine_that_fails_every_request() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("errors_only")) as client:
            assert (await client.health("rpc")).is_healthy
            health = await client.health("generate")
            assert health.ranks[0].verdict == "failing"
            with pytest.raises(EngineError, match="fails requests"):
                health.raise_unhealthy()


async def test_a_paused_engine_is_healthy_and_gets_no_request() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            await client.pause_generation(mode="keep")
            health = await client.health("generate")
            assert health.is_healthy and health.state is ClientState.PAUSED
            assert (health.ranks[0].asked, health.ranks[0].verdict) == ("rpc", "healthy")
            with pytest.raises(ValueError, match="level='all'"):
                await client.health("all")  # type: ignore[arg-type]


async def test_the_health_of_a_client_that_is_dead_or_closed() -> None:
    client = EngineClient(engine=toy())
    with anyio.fail_after(30):
        assert (await client.health()).state is ClientState.CREATED
        async with client:
            os.kill(pid_of(client.core, 0), signal.SIGKILL)
            await client.wait_dead()
            health = await client.health("generate")
            assert (health.state, health.degraded, health.ranks[0].verdict) == (ClientState.DEAD, (0,), "dead")
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                health.raise_unhealthy()
        assert (await client.health()).state is ClientState.CLOSED
