"""An engine says ENGINE_CORE_DEAD, and ends late or not at all: whoever waits is told at once; how it ended, later."""

from __future__ import annotations

import logging
import os
import signal
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.testing

from anyengine import ClientState, EngineClient, EngineDeadError, EngineExit, SamplingParams
from anyengine._client.engines.engine_limits import learn_tasks
from anyengine._client.engines.fences import Patience
from anyengine.testing.scripted import Fault, Script, ScriptedProcess, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio

DEAD = Script(
    faults=(Fault(do="dead", direction="in", kind="profile"),),
    utilities=(UtilityRule(method="reset_mm_cache", do="never"),),
    step_interval_s=1.0,
)
STREAMS, CALLS = 100, 5

virtual = pytest.mark.parametrize(
    "anyio_backend",
    [("trio", {"clock": trio.testing.MockClock(autojump_threshold=0)})],  # jumps when everybody waits
    ids=["virtual"],
)


class Waiters:
    """Streams and calls that wait, and when each was told of the death."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unopened = 0
        self.all_open = anyio.Event()
        self.told_s: list[float] = []
        self.errors: list[EngineDeadError] = []

    def start(self, tasks: anyio.abc.TaskGroup, streams: int, calls: int) -> None:
        self._unopened = streams
        for number in range(streams):
            tasks.start_soon(self._consume, number)
        for _ in range(calls):
            tasks.start_soon(self._call)

    async def _consume(self, number: int) -> None:
        fresh = True
        with pytest.raises(EngineDeadError) as caught:
            async for _ in self._client.generate([number], SamplingParams(max_tokens=2000)):
                self._unopened -= fresh
                fresh = False
                if not self._unopened:
                    self.all_open.set()
        self._told(caught.value)

    async def _call(self) -> None:
        with pytest.raises(EngineDeadError) as caught:
            await self._client.reset_mm_cache()
        self._told(caught.value)

    def _told(self, error: EngineDeadError) -> None:
        self.told_s.append(anyio.current_time())
        self.errors.append(error)


@pytest.mark.case("K07", budget_s=0.1)
@virtual
async def test_nobody_waits_for_the_end_of_an_engine_that_has_said_that_it_is_dead(anyio_backend: Any) -> None:
    """It lives on: the last of all is told within 0.1 s, by the loop's own clock, of what is known by then."""
    async with EngineClient(engine=ScriptedTwin(DEAD).engine) as client:
        waiters = Waiters(client)
        async with anyio.create_task_group() as tasks:
            waiters.start(tasks, STREAMS, CALLS)
            await waiters.all_open.wait()
            said_s = anyio.current_time()
            with pytest.raises(EngineDeadError):
                await client.core.utility("profile")
        assert len(waiters.told_s) == STREAMS + CALLS
        assert max(waiters.told_s) - said_s <= 0.1
        assert {(error.exit_code, error.signal) for error in waiters.errors} == {(None, None)}
        assert "lives, but it sent ENGINE_CORE_DEAD" in str(waiters.errors[0])
        assert client.state is ClientState.DEAD


async def test_how_it_ended_is_told_when_it_has(caplog: pytest.LogCaptureFixture) -> None:
    """The error is what it was; the log and the report have the rest."""
    with anyio.fail_after(30), caplog.at_level(logging.WARNING, "anyengine.client"):
        async with EngineClient(engine=ScriptedProcess(DEAD).engine) as client:
            pid = client.core.session.engines[0].child.pid
            with pytest.raises(EngineDeadError) as caught:
                await client.core.utility("profile")
            assert (caught.value.pid, caught.value.signal) == (pid, None)
            os.kill(pid, signal.SIGKILL)
            while not any("was killed by SIGKILL; its death was told before" in line for line in caplog.messages):
                await anyio.lowlevel.checkpoint()
            with pytest.raises(EngineDeadError) as later:
                await client.submit([1])
            assert later.value.signal is None
    assert client.shutdown_report is not None
    assert client.shutdown_report.exits == (EngineExit(rank=0, pid=pid, exit_code=None, signal="SIGKILL"),)


@pytest.mark.parametrize("do", ["dead_exit", "kill"])
async def test_an_engine_that_ends_at_once_is_told_with_how_it_ended(do: str) -> None:
    script = Script(faults=(Fault(do=do, direction="in", kind="profile", exit_code=7),))  # type: ignore[arg-type]
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(script).engine) as client:
            with pytest.raises(EngineDeadError) as caught:
                await client.core.utility("profile")
    assert (caught.value.exit_code, caught.value.signal) == ((7, None) if do == "dead_exit" else (None, "SIGKILL"))
    assert client.shutdown_report is not None
    (ended,) = client.shutdown_report.exits
    assert (ended.exit_code, ended.signal) == (caught.value.exit_code, caught.value.signal)


@pytest.mark.parametrize("what", ["fences", "tasks"])
async def test_nothing_is_asked_behind_the_end(what: str) -> None:
    """Its link is there, and takes calls that nobody will ever answer."""
    with anyio.fail_after(10):
        async with EngineClient(engine=ScriptedTwin(DEAD).engine) as client:
            with pytest.raises(EngineDeadError):
                await client.core.utility("profile")
            session = client.core.session
            if what == "fences":
                await session.fences.wait([0], Patience(None))
            else:
                session.connection.rota.revive(0)  # for whoever has looked a turn before
                await learn_tasks(session)
            assert not session.connection.utilities.pending


@virtual
async def test_one_that_has_ended_says_nothing_any_more(anyio_backend: Any) -> None:
    """Who may still say that it is dead makes the next sentinel no evidence; one that ended late may not."""
    twins = [ScriptedTwin(DEAD), ScriptedTwin(DEAD), ScriptedTwin()]
    with anyio.fail_after(60):
        async with EngineClient(engine=[twin.engine for twin in twins], liveness_timeout_s=None) as client:
            for rank in (0, 1):
                with pytest.raises(EngineDeadError) as caught:
                    await client.core.utility("profile", rank=rank)
                assert caught.value.rank == rank
                assert "ENGINE_CORE_DEAD" in str(caught.value)
                child = client.core.session.engines[rank].child
                assert child.poll() is None
                child.kill()
                await child.exited.wait()
                await anyio.sleep(1)
            assert [out async for out in client.generate([1], SamplingParams(max_tokens=2))]
