"""Ranks that are lost at an awkward moment: while the client starts, while it is left, while something is asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines import generates, misbehaving, toy
from remote_peers import RemotePeers

from anyengine import (
    ClientState,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    EngineUnresponsiveError,
    LoRARequest,
    RemoteEngine,
    RunningEngine,
    SamplingParams,
    StartupTimeout,
)
from anyengine._wire import WireSamplingParams

pytestmark = pytest.mark.anyio


def pid_of(core: EngineCoreClient, rank: int) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


async def test_the_client_is_left_while_a_rank_is_being_buried(caplog: pytest.LogCaptureFixture) -> None:
    """The burial reads what the dying rank still sends; so does, at the end, whoever waits for the other's word."""
    engine = RemoteEngine(handshake="tcp://127.0.0.1:*", ranks=2)
    with anyio.fail_after(30), RemotePeers("serve", ("dead_but_talking", "called")) as peers:
        async with EngineClient(engine=engine, on_progress=peers.joining) as client:
            session = client.core.session
            stop_drain, buried = session.stop_drain, anyio.Event()

            async def stop_drain_and_wait() -> None:
                await stop_drain()
                buried.set()
                while session.cause is None:
                    await anyio.lowlevel.checkpoint()

            session.stop_drain = stop_drain_and_wait  # type: ignore[method-assign] # the moment to leave at
            session.send(1, session.connection.utility("is_sleeping", (), 1, lambda: None)[1])
            await buried.wait()
            assert client.state is ClientState.READY and session.cause is None
        assert client.state is ClientState.CLOSED
    assert "own task" not in caplog.text


async def test_a_rank_that_is_lost_while_another_is_asked_for_its_release(tmp_path: Path) -> None:
    """Nobody waits for the word of a rank that is dead already."""
    marker = str(tmp_path / "rank 1 was stopped")
    engines = [misbehaving("old_pair", marker)] * 2
    with anyio.fail_after(20):
        async with EngineCoreClient(engines) as core:
            assert core.ranks == (0,)
            assert (await core.wait_dead(1)).rank == 1
            assert core.statistics()["utility_calls_in_flight"] == 0


async def test_cancellation_of_a_pause_wins_over_the_death_of_the_engine() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with anyio.CancelScope() as scope:
                async with client.paused("keep"):
                    os.kill(pid_of(client.core, 0), signal.SIGKILL)
                    await client.wait_dead()
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
            assert scope.cancelled_caught


async def test_what_ended_a_pause_is_what_is_raised() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with pytest.raises(ZeroDivisionError):
                async with client.paused("keep"):
                    os.kill(pid_of(client.core, 0), signal.SIGKILL)
                    await client.wait_dead()
                    raise ZeroDivisionError
            with pytest.raises(EngineDeadError):
                async with client.paused("keep"):
                    pytest.fail("it cannot be paused")


async def test_a_pause_survives_the_death_of_a_rank() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=[toy(), toy()]) as client:
            async with client.paused("keep"):
                os.kill(pid_of(client.core, 1), signal.SIGKILL)
                await client.wait_dead(1)
            assert await client.is_paused() is False


async def test_a_ping_names_the_rank_that_does_not_answer() -> None:
    """All are asked at once: one that takes its time takes none of the others'."""
    with anyio.fail_after(30):
        async with EngineCoreClient([misbehaving("slow_calls"), toy(), misbehaving("slow_calls")]) as core:
            caught: list[EngineUnresponsiveError] = []

            async def ping() -> None:
                with pytest.raises(EngineUnresponsiveError) as raised:
                    await core.ping(0.5)
                caught.append(raised.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ping)
                await anyio.wait_all_tasks_blocked()  # it has asked
                await core.utility("is_sleeping", rank=1)
                assert core.statistics()["utility_calls_in_flight"] == 2
                await core.utility("flush", rank=0, unchecked=True)
            assert [error.rank for error in caught] == [2]
            assert core.statistics()["utility_calls_in_flight"] == 0


async def test_a_rank_that_was_given_up_is_asked_nothing_more() -> None:
    """It is stuck: what is sent to it is taken, and never answered."""
    with anyio.fail_after(30):
        engines = [toy(), misbehaving("deaf_ears")]
        async with EngineCoreClient(engines, max_unread_bytes=400, liveness_timeout_s=0.4) as core:
            params = WireSamplingParams(max_tokens=1)
            for number in range(4):
                core.add(EngineCoreRequest(f"r{number}", [1] * 20, sampling_params=params), rank=1)
            assert isinstance(await core.wait_dead(1), EngineUnresponsiveError)
            assert core.session.send_budget.unread_bytes == 0
            assert 1 not in {call.rank for call in core.session.connection.utilities.pending.values()}


async def test_engines_that_do_not_all_come_back() -> None:
    """A client takes over two; the second one is gone."""
    engine = RemoteEngine(handshake="tcp://127.0.0.1:*", ranks=2)
    with anyio.fail_after(30), RemotePeers("serve", "serve") as peers:
        async with EngineCoreClient(engine, on_progress=peers.joining) as core:
            running: RunningEngine = core.running_engine
        peers.processes[1].kill()
        with pytest.raises(StartupTimeout, match=r"engine 1, .* \(1 of 2 are not: 1\)") as caught:
            async with EngineCoreClient(running, startup_timeout_s=2):
                pytest.fail("one is missing")
        assert caught.value.rank == 1


@pytest.mark.parametrize("fields", [{}, {"lora_request": LoRARequest("a", 1, "/a")}], ids=["plain", "adapter"])
async def test_a_request_to_an_engine_that_is_dying_gets_its_death(fields: dict[str, Any]) -> None:
    """Between the first symptom and the last word no rank serves any more, and the session has not ended yet."""
    with anyio.fail_after(60):
        async with EngineClient(engine=misbehaving("loses_link", "input"), shutdown_grace_s=0.1) as client:
            generates(client)
            await client.core.utility("first", unchecked=True)
            async with anyio.create_task_group() as tasks:

                async def last_call() -> None:
                    with pytest.raises(EngineDeadError):
                        await client.core.utility("second", unchecked=True)

                tasks.start_soon(last_call)
                while client.ranks:
                    await anyio.lowlevel.checkpoint()
                assert client.state is ClientState.READY
                with pytest.raises(EngineDeadError, match="input connection is gone"):
                    async with client.generate([1], SamplingParams(max_tokens=1), **fields) as stream:
                        await anext(stream)  # libzmq may not have forgotten the peer yet, and take the request
