"""What happens to a client is told to whoever follows it, and the flags are what the engine has confirmed."""

from __future__ import annotations

import os
import signal

import anyio
import anyio.lowlevel
import pytest
from engines import misbehaving, toy

from anyengine import (
    ClientEvent,
    ClientState,
    CurrentState,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    EngineStartupError,
    RankChanged,
    RankState,
    SamplingParams,
    StateChanged,
    UtilityError,
)
from anyengine.testing.scripted import Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio


def in_words(event: ClientEvent) -> str:
    match event:
        case CurrentState():
            return f"now {event.state.value}"
        case RankChanged():
            return f"{event.rank} {event.rank_state.value}"
    return event.state.value


async def follow(client: EngineClient | EngineCoreClient, told: list[ClientEvent]) -> None:
    async for event in client.events():
        told.append(event)  # noqa: PERF401 - what was told before a failure shall be seen


def pid_of(core: EngineCoreClient, rank: int) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


@pytest.mark.feature("L30")
async def test_a_scripted_life_is_told_event_by_event() -> None:
    client = EngineClient(engine=toy())
    early: list[ClientEvent] = []
    late: list[ClientEvent] = []
    with anyio.fail_after(30):
        async with anyio.create_task_group() as followers:
            followers.start_soon(follow, client, early)
            await anyio.wait_all_tasks_blocked()
            async with client:
                await client.pause_generation(mode="keep")
                assert client.state is ClientState.PAUSED
                followers.start_soon(follow, client, late)
                await anyio.wait_all_tasks_blocked()
                await client.resume_generation()
                await client.sleep()
                assert client.state is ClientState.ASLEEP
                await client.wake_up()
                assert client.state is ClientState.READY
    expected = [
        "now created",
        "starting",
        "0 ready",
        "ready",
        "0 paused",
        "paused",
        "0 ready",
        "ready",
        "0 asleep",
        "asleep",
        "0 ready",
        "ready",
        "closing",
        "closed",
    ]
    assert [in_words(event) for event in early] == expected
    assert [in_words(event) for event in late] == ["now paused", *expected[6:]]  # and both have ended


@pytest.mark.feature("L30")
@pytest.mark.case("K82")
async def test_a_rank_that_dies_while_nobody_has_a_request_open() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=[toy(), toy()]) as client:
            events = client.events()
            assert in_words(await anext(events)) == "now ready"
            os.kill(pid_of(client.core, 1), signal.SIGKILL)
            with anyio.fail_after(2):
                event = await anext(events)
            assert isinstance(event, RankChanged) and (event.rank, event.rank_state) == (1, RankState.DEAD)
            assert isinstance(event.cause, EngineDeadError) and event.cause.signal == "SIGKILL"
            assert event.state is ClientState.READY and event.degraded == (1,)
            os.kill(pid_of(client.core, 0), signal.SIGKILL)
            with anyio.fail_after(2):
                rank_event, death = await anext(events), await anext(events)
            assert in_words(rank_event) == "0 dead"
            assert isinstance(death, StateChanged) and death.state is ClientState.DEAD
            assert isinstance(death.cause, EngineDeadError) and death.cause.rank == 0


async def test_a_pause_that_the_engine_refuses_is_none() -> None:
    """Flags change on the peer's word: not when we send, and not on a failure."""
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            with pytest.raises(UtilityError):
                await client.core.utility("pause_scheduler", "sideways", True)
            assert client.state is ClientState.READY
            with anyio.CancelScope() as scope:
                scope.cancel()
                await client.pause_generation(mode="keep")  # sent, perhaps, and not confirmed
            assert client.state is ClientState.READY
            with anyio.fail_after(10):
                await client.is_paused()
                is_paused = await client.is_paused()
            assert client.state is (ClientState.PAUSED if is_paused else ClientState.READY)


async def test_an_engine_that_says_otherwise_is_believed() -> None:
    """Somebody else has paused it: the next answer tells."""
    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("says_paused")) as core:
            assert core.state is ClientState.READY
            assert await core.utility("is_sleeping") is True
            assert core.state is ClientState.PAUSED


async def test_a_start_that_fails_ends_the_events() -> None:
    client = EngineClient(engine=misbehaving("exit_at", "before_hello", "3"))
    told: list[ClientEvent] = []
    with anyio.fail_after(30):
        async with anyio.create_task_group() as followers:
            followers.start_soon(follow, client, told)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(EngineStartupError):
                async with client:
                    pytest.fail("it cannot start")
    assert [in_words(event) for event in told] == ["now created", "starting", "closing", "closed"]
    with anyio.fail_after(5):
        (now,) = [event async for event in client.events()]
    assert isinstance(now, CurrentState) and now.state is ClientState.CLOSED


async def test_a_follower_that_is_too_slow_gets_what_is_true_now() -> None:
    with anyio.fail_after(30):
        async with EngineCoreClient(toy()) as core:
            events = core.events()
            await anext(events)
            for number in range(200):
                core.life.confirmed(0, RankState.PAUSED if number % 2 == 0 else RankState.READY)
            event = await anext(events)
            assert isinstance(event, CurrentState) and (event.missed, event.state) == (400, ClientState.READY)
            core.life.confirmed(0, RankState.PAUSED)
            assert [in_words(await anext(events)) for _ in range(2)] == ["0 paused", "paused"]


@pytest.mark.feature("L30")
async def test_ready_means_that_requests_are_taken() -> None:
    """Whoever follows the client uses it the moment it is told, without a turn of the loop in between: a notebook's
    next line; in a later block as in the first."""
    client = EngineClient(engine=ScriptedTwin(Script()).engine)
    params = SamplingParams(max_tokens=2)

    async def own(leave: anyio.Event) -> None:
        async with client:
            await leave.wait()

    with anyio.fail_after(30):
        for _ in range(2):
            leave = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(own, leave)
                while client.state is not ClientState.STARTING:
                    await anyio.lowlevel.checkpoint()
                async for event in client.events():
                    if event.state is ClientState.READY:
                        break
                assert (await client.complete([1], params)).token_ids == expected_tokens([1], 2)
                leave.set()
