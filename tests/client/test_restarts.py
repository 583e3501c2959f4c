"""Engines that die are started again by policy, and nobody is told anything of a former incarnation."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import pytest
from engines import misbehaving, toy
from incarnations import Incarnations

from anyengine import (
    ClientState,
    EmbeddedEngine,
    EngineAsleepError,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    EngineStartupError,
    LoRARequest,
    RankChanged,
    RankState,
    RemoteEngine,
    RequestOutput,
    RestartPolicy,
    SamplingParams,
)
from anyengine._process.launch import launch_engine
from anyengine._wire import WireSamplingParams
from anyengine.testing.scripted import RequestRule, Script, StartupStage
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

SOON = RestartPolicy(backoff_s=0.01)
SHORT = SamplingParams(max_tokens=5)


def pid_of(core: EngineCoreClient, rank: int = 0) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


async def tokens(client: EngineClient, prompt: list[int], params: SamplingParams = SHORT) -> list[int]:
    return [token async for output in client.generate(prompt, params) for token in output.token_ids]


async def until(client: EngineClient | EngineCoreClient, state: RankState, rank: int = 0) -> None:
    async for event in client.events():
        if event.ranks[rank] is state:
            return


@pytest.mark.feature("L28")
async def test_three_deaths_under_load_and_a_fourth_that_is_final() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.002), restart=SOON) as client:
            pids = set()
            for _ in range(3):
                pids.add(pid := pid_of(client.core))
                async with client.generate([7], SamplingParams(max_tokens=1900)) as stream:
                    await anext(stream)
                    os.kill(pid, signal.SIGKILL)
                    with pytest.raises(EngineDeadError) as caught:
                        async for _ in stream:
                            pass
                assert (caught.value.pid, caught.value.signal) == (pid, "SIGKILL")
                assert caught.value.history == ()
                assert await tokens(client, [9]) == expected_tokens([9], 5)  # it has waited for the next one
                assert client.state is ClientState.READY and client.ranks == (0,)
                assert (await client.health("generate")).is_healthy
            assert client.statistics()["restarts"] == 3
            os.kill(pid_of(client.core), signal.SIGKILL)
            death = await client.wait_dead()
            assert [type(one) for one in death.history] == [EngineDeadError] * 3
            assert {getattr(one, "pid", None) for one in death.history} == pids
            assert "started again 3 times in 60 s" in str(death)
            with pytest.raises(EngineDeadError, match="started again 3 times"):
                await tokens(client, [9])
            assert client.state is ClientState.DEAD


@pytest.mark.feature("L28")
@pytest.mark.feature("L29")
async def test_only_the_rank_that_died_is_started_again() -> None:
    runner = "anyengine.testing.toy_runner:create_runner"
    engines = [EmbeddedEngine(runner=runner, runner_options={"step_delay_s": 0.002}, seed=seed) for seed in range(2)]
    told = []
    with anyio.fail_after(60):
        async with EngineClient(engine=engines, restart=SOON) as client:
            first_pid = pid_of(client.core, 0)
            async with client.generate([7], SamplingParams(max_tokens=300)) as stream:
                received = list((await anext(stream)).token_ids)
                async with anyio.create_task_group() as tasks:

                    async def follow() -> None:
                        async for event in client.events():
                            assert event.state is ClientState.READY
                            if isinstance(event, RankChanged):
                                told.append((event.rank, event.rank_state.value, event.degraded))
                                if event.rank_state is RankState.READY:
                                    return

                    tasks.start_soon(follow)
                    await anyio.wait_all_tasks_blocked()
                    os.kill(pid_of(client.core, 1), signal.SIGKILL)
                async for output in stream:
                    received += output.token_ids
            assert received == expected_tokens([7], 300)  # it has seen nothing of it
            assert told == [(1, "restarting", (1,)), (1, "ready", ())]
            assert pid_of(client.core, 0) == first_pid
            both = sorted([await tokens(client, [5]) for _ in range(2)])
            assert both == sorted(expected_tokens([5], 5, seed=seed) for seed in range(2))


@pytest.mark.feature("L28")
async def test_while_it_is_down_requests_fail_at_once_if_told_so() -> None:
    policy = RestartPolicy(backoff_s=30, while_down="fail")
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(), restart=policy) as client:
            os.kill(pid_of(client.core), signal.SIGKILL)
            await until(client, RankState.RESTARTING)
            assert client.state is ClientState.RESTARTING and client.ranks == ()
            with pytest.raises(EngineDeadError, match="is being started again") as caught:
                await client.submit([1])
            assert caught.value.retryable and caught.value.rank == 0
            for call in (client.is_paused, client.ping, lambda: client.core.utility("is_sleeping", rank=0)):
                with pytest.raises(EngineDeadError):
                    await call()
            assert await client.abort("nobody") == ()
            health = await client.health("generate")
            assert health.ranks[0].verdict == "restarting" and not health.is_healthy
        assert client.state is ClientState.CLOSED  # leaving does not wait for the thirty seconds


@pytest.mark.feature("L28")
async def test_starts_that_fail_count_and_are_told(tmp_path: Path) -> None:
    """The first incarnation is well; those that follow exit before they are ready."""
    marker = tmp_path / "was here"
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("only_once", str(marker)), restart=SOON) as client:
            os.kill(pid_of(client.core), signal.SIGKILL)
            async with anyio.create_task_group() as tasks:

                async def wait_for_it() -> None:
                    with pytest.raises(EngineDeadError, match="started again 3 times"):
                        await tokens(client, [1])

                tasks.start_soon(wait_for_it)
                death = await client.wait_dead()
            assert isinstance(death.history[0], EngineDeadError) and death.history[0].rank == 0
            assert [type(one) for one in death.history[1:]] == [EngineStartupError] * 2
            assert "exited with code 3 at stage" in str(death)
            assert client.state is ClientState.DEAD


@pytest.mark.feature("L28")
@pytest.mark.parametrize("moment", ["backoff", "starting", "clearing"])
async def test_a_client_that_is_left_in_the_middle_of_a_restart_leaves_nothing(moment: str, tmp_path: Path) -> None:
    """The leak checks look: no process, task, file or descriptor is left."""
    policy = RestartPolicy(backoff_s=30.0 if moment == "backoff" else 0.0)
    engine = misbehaving("slow_second_start", str(tmp_path / "was here"), moment)
    with anyio.fail_after(30):
        async with EngineClient(engine=engine, restart=policy, shutdown_grace_s=0.2) as client:
            former = pid_of(client.core)
            if moment == "clearing":  # it ignores SIGTERM, and is only deaf
                with pytest.raises(EngineDeadError):
                    await client.core.utility("deaf", unchecked=True)
            else:
                os.kill(former, signal.SIGKILL)
            await until(client, RankState.RESTARTING)
            if moment == "starting":
                while pid_of(client.core) == former:  # noqa: ASYNC110 - nothing tells when a process is started
                    await anyio.sleep(0.01)
        assert client.state is ClientState.CLOSED


async def test_a_pause_is_gone_with_the_engine_that_was_paused() -> None:
    """The new one knows of none, and says so: what was in flight goes on, and new requests are taken."""
    policy = RestartPolicy(backoff_s=0.01, in_flight="replay")
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.005), restart=policy) as client:
            greedy = SamplingParams(max_tokens=200, temperature=0)
            async with client.generate([7], greedy) as stream:
                received = list((await anext(stream)).token_ids)
                await client.pause_generation(mode="keep")
                os.kill(pid_of(client.core), signal.SIGKILL)
                await until(client, RankState.RESTARTING)
                await until(client, RankState.READY)
                assert client.state is ClientState.READY and await client.is_paused() is False
                assert await tokens(client, [9]) == expected_tokens([9], 5)
                async for output in stream:
                    received += output.token_ids
            assert received == expected_tokens([7], 200)


async def test_a_pause_while_no_engine_serves_holds_for_the_next_one() -> None:
    """It waits for that one; nothing is let in meanwhile, nor behind it, until the client goes on."""
    engine = Incarnations(Script())
    policy = RestartPolicy(backoff_s=0.1, jitter=0)
    with anyio.fail_after(10):
        async with EngineClient(engine=engine.engine, restart=policy) as client:
            client.core.session.engines[0].child.kill()
            await until(client, RankState.RESTARTING)
            await client.pause_generation()
            assert client.state is ClientState.PAUSED and await client.is_paused()
            with pytest.raises(EngineAsleepError):
                await client.submit([1], SHORT)
            assert engine.added() == []
            await client.resume_generation()
            assert len(await tokens(client, [1])) == 5

            await client.pause_generation()  # and it is gone with that one
            client.core.session.engines[0].child.kill()
            await until(client, RankState.RESTARTING)
            await until(client, RankState.READY)
            assert len(await tokens(client, [1])) == 5


@pytest.mark.parametrize("moment", ["inside", "waiting"])
async def test_a_paused_block_is_cancelled_at_once_while_no_engine_serves(moment: str) -> None:
    """There is nobody to be told to resume."""
    policy = RestartPolicy(backoff_s=1000)
    with anyio.fail_after(10):
        async with EngineClient(engine=Incarnations(Script()).engine, restart=policy) as client:
            async with anyio.create_task_group() as tasks:
                entered = anyio.Event()

                async def pause() -> None:
                    async with client.paused():
                        entered.set()
                        await anyio.sleep_forever()

                if moment == "inside":
                    tasks.start_soon(pause)
                    await entered.wait()
                client.core.session.engines[0].child.kill()
                await until(client, RankState.RESTARTING)
                if moment == "waiting":
                    tasks.start_soon(pause)
                    await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
            assert client._entered_desk().admission.is_open


async def test_what_a_pause_held_up_goes_on_with_a_rank_that_is_not_paused() -> None:
    """One of two paused ranks is back, and new; the other one dies too, and with it the pause."""
    silent = Script(requests=(RequestRule(silent=True),))
    first = Incarnations(silent, Script())
    second = Incarnations(Script(), Script(startup=(StartupStage(name="loading", hang=True),)))
    policy = RestartPolicy(backoff_s=0, in_flight="replay")
    with anyio.fail_after(10):
        async with EngineClient(engine=[first.engine, second.engine], restart=policy) as client:
            stream = await client.submit([1], SHORT, data_parallel_rank=0)
            await client.pause_generation(mode="keep")
            engines = client.core.session.engines
            engines[0].child.kill()
            await until(client, RankState.RESTARTING)
            await until(client, RankState.READY)
            await anyio.wait_all_tasks_blocked()
            assert stream.attempts == 1
            engines[1].child.kill()
            assert len((await stream.final()).token_ids) == 5


async def test_a_rank_that_comes_back_while_a_request_waits_has_its_adapter_loaded() -> None:
    """Which it lacks, being a new one; the request has had it loaded before, and waits for its turn."""
    able = {"supports_lora": True, "max_loras": 2}
    script = Script(registration=able, requests=(RequestRule(silent=True, first_token=9),))
    one, two = Incarnations(script), Incarnations(script)
    policy = RestartPolicy(backoff_s=0.1, jitter=0)
    adapter = LoRARequest("a", 1, "/a")
    with anyio.fail_after(10):
        async with EngineClient(
            engine=[one.engine, two.engine], restart=policy, max_num_queued_tokens=4, admission="wait"
        ) as client:
            client.core.session.engines[1].child.kill()
            await until(client, RankState.RESTARTING, 1)
            found: list[RequestOutput] = []

            async def ask(first: int) -> None:
                found.append(await client.generate([first, 2], SHORT, lora_request=adapter).final())

            async with client.generate([9, 9, 9], SHORT) as silent, anyio.create_task_group() as consumers:
                await silent.start()
                for first in (1, 2):
                    consumers.start_soon(ask, first)
                await until(client, RankState.READY, 1)
                silent.abort()
            assert len(found) == 2 and len(two.added()) == 1


async def test_a_request_with_an_adapter_waits_for_its_own_rank() -> None:
    """Which is being started again, and has no adapter yet: that is no fault of the request's."""
    script = Script(registration={"supports_lora": True, "max_loras": 2})
    one, two = Incarnations(script), Incarnations(script)
    policy = RestartPolicy(backoff_s=0.1, jitter=0)
    with anyio.fail_after(10):
        async with EngineClient(engine=[one.engine, two.engine], restart=policy) as client:
            client.core.session.engines[1].child.kill()
            await until(client, RankState.RESTARTING, 1)
            stream = client.generate([1], SHORT, lora_request=LoRARequest("a", 1, "/a"), data_parallel_rank=1)
            assert len((await stream.final()).token_ids) == 5
            assert (one.added(), len(two.added())) == ([], 1)


async def test_a_hung_engine_is_started_again() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(), restart=SOON, liveness_timeout_s=0.8, shutdown_grace_s=0.1) as client:
            for _ in range(2):  # the new incarnation is watched as well
                os.kill(pid_of(client.core), signal.SIGSTOP)
                await until(client, RankState.RESTARTING)
                assert await tokens(client, [9]) == expected_tokens([9], 5)


def test_what_somebody_else_starts_cannot_be_started_again() -> None:
    with pytest.raises(ValueError, match=r"restart: .* is started by someone else"):
        EngineClient(engine=RemoteEngine(handshake="tcp://127.0.0.1:*"), restart=SOON)
    with pytest.raises(ValueError, match="must be a RestartPolicy"):
        EngineClient(engine=toy(), restart=True)  # type: ignore[arg-type]


async def test_who_hears_late_of_a_death_takes_nothing_from_the_successor() -> None:
    """A low-level client reads its batches when it likes: the death of the former engine is told behind the latter's
    first request."""
    with anyio.fail_after(30):
        async with EngineCoreClient(toy(), restart=SOON) as core:
            params = WireSamplingParams(max_tokens=3)
            core.add(EngineCoreRequest("lost", [1], sampling_params=WireSamplingParams(max_tokens=1900)))
            os.kill(pid_of(core), signal.SIGKILL)
            await until(core, RankState.RESTARTING)
            await until(core, RankState.READY)
            core.add(EngineCoreRequest("kept", [9], sampling_params=params))
            received: dict[str, list[int]] = {"lost": [], "kept": []}
            errors: dict[str, str] = {}
            async for batch in core.outputs():
                for output in batch.outputs:
                    received[output.request_id] += output.new_token_ids
                    if output.error is not None:
                        errors[output.request_id] = output.error.code
                if len(received["kept"]) == 3:
                    break
            assert received["kept"] == expected_tokens([9], 3) and errors == {"lost": "engine_dead"}
            assert core.statistics()["requests_in_flight"] == 0


async def test_a_process_that_cannot_be_made_is_one_more_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for it in the system: that may pass, and is no failure of our own."""
    tried = 0

    def no_room(*args: Any, **kwargs: Any) -> Any:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return launch_engine(*args, **kwargs)

    with anyio.fail_after(30):
        async with EngineClient(engine=toy(), restart=SOON) as client:
            monkeypatch.setattr("anyengine._client.session.startup.launch_engine", no_room)
            os.kill(pid_of(client.core), signal.SIGKILL)
            await until(client, RankState.RESTARTING)
            assert await tokens(client, [9]) == expected_tokens([9], 5)
            assert tried == 2
