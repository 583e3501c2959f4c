"""Several dense ranks behind one client: they take turns, fail alone, and are called together."""

from __future__ import annotations

import os
import signal
from typing import Any

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    ClientState,
    EmbeddedEngine,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    EngineStartupError,
    RemoteEngine,
    RequestRejected,
    SamplingParams,
    StartupTimeout,
    UtilityError,
)
from anyengine._wire import WireSamplingParams
from anyengine.testing.scripted import ScriptedTwin
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

SHORT = SamplingParams(max_tokens=5)
LONG = SamplingParams(max_tokens=1900)


def ranks(count: int, **options: Any) -> list[EmbeddedEngine]:
    """Engines of different seeds, so that the tokens tell which one made them."""
    return [
        EmbeddedEngine(
            runner="anyengine.testing.toy_runner:create_runner", runner_options=options, max_num_seqs=256, seed=rank
        )
        for rank in range(count)
    ]


def rank_of(prompt: list[int], token_ids: list[int], count: int) -> int:
    (rank,) = [r for r in range(count) if token_ids == expected_tokens(prompt, len(token_ids), seed=r)]
    return rank


def pid_of(core: EngineCoreClient, rank: int) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


async def tokens(client: EngineClient, prompt: list[int], params: SamplingParams = SHORT) -> list[int]:
    return [token async for output in client.generate(prompt, params) for token in output.token_ids]


async def test_requests_take_turns() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=ranks(3)) as client:
            assert client.ranks == (0, 1, 2)
            used = [rank_of([7, n], await tokens(client, [7, n]), 3) for n in range(6)]
            assert used == [0, 1, 2, 0, 1, 2]


@pytest.mark.feature("L05")
@pytest.mark.feature("L29")
@pytest.mark.case("K62")
async def test_a_rank_that_dies_takes_only_its_own_along() -> None:
    results: dict[int, list[int] | EngineDeadError] = {}
    with anyio.fail_after(60):
        async with EngineClient(engine=ranks(3, step_delay_s=0.002)) as client:

            async def consume(number: int) -> None:
                received: list[int] = []
                try:
                    async for output in client.generate(
                        [number], SamplingParams(max_tokens=200), request_id=f"r{number}"
                    ):
                        received += output.token_ids
                        if len(received) > 3:
                            started[number].set()
                    results[number] = received
                except EngineDeadError as exc:
                    results[number] = exc

            started = [anyio.Event() for _ in range(9)]
            async with anyio.create_task_group() as consumers:
                for number in range(9):
                    consumers.start_soon(consume, number)
                    await anyio.wait_all_tasks_blocked() if number < 0 else await anyio.lowlevel.checkpoint()
                for event in started:
                    await event.wait()
                os.kill(pid_of(client.core, 1), signal.SIGKILL)
                death = await client.wait_dead(1)
                assert (death.rank, death.signal) == (1, "SIGKILL")
            failed = {number for number, result in results.items() if isinstance(result, EngineDeadError)}
            assert len(failed) == 3 and all(result.rank == 1 for n in failed for result in [results[n]])  # type: ignore[union-attr]
            for number in failed:
                error: Any = results[number]
                assert error.request_id == f"r{number}"
                delivered = error.partial.token_ids
                assert delivered == expected_tokens([number], len(delivered), seed=1)
            for number in set(results) - failed:
                assert rank_of([number], results[number], 3) in (0, 2)  # type: ignore[arg-type]
            health = await client.health("generate")
            assert health.degraded == (1,) and not health.is_healthy
            assert [rank.verdict for rank in health.ranks] == ["healthy", "dead", "healthy"]
            assert client.state is ClientState.READY and client.ranks == (0, 2)
            assert {rank_of([n], await tokens(client, [n]), 3) for n in range(100)} == {0, 2}
            assert await client.abort("nobody") == ()
            assert await client.is_paused() is False  # calls go to those that live
            for rank in (0, 2):
                os.kill(pid_of(client.core, rank), signal.SIGKILL)
            last = await client.wait_dead()
            assert last.rank in (0, 2) and client.state is ClientState.DEAD
            with pytest.raises(EngineDeadError):
                await tokens(client, [1])


async def test_an_engine_that_says_it_is_dead_is_found_among_several() -> None:
    engines = [*ranks(2), *ranks(1, fail_at_step=4)]
    with anyio.fail_after(60):
        async with EngineClient(engine=engines) as client:
            assert len(await tokens(client, [1])) == len(await tokens(client, [2])) == 5
            with pytest.raises(EngineDeadError) as caught:
                await tokens(client, [3])
            assert caught.value.rank == 2
            assert client.ranks == (0, 1)


async def test_a_low_level_client_gets_the_end_of_a_rank_as_a_batch() -> None:
    with anyio.fail_after(60):
        async with EngineCoreClient(ranks(2, step_delay_s=0.002)) as core:
            for name in ("a", "b", "c"):
                params = WireSamplingParams(max_tokens=1900)
                core.add(EngineCoreRequest(name, [1], sampling_params=params), rank=0 if name == "b" else 1)
            os.kill(pid_of(core, 1), signal.SIGKILL)
            ended: dict[str, str] = {}
            async for batch in core.outputs():
                ended |= {output.request_id: output.error.code for output in batch.outputs if output.error is not None}
                if ended:
                    break
            assert ended == {"a": "engine_dead", "c": "engine_dead"}
            assert core.statistics()["requests_in_flight"] == 1


async def test_a_rank_can_be_chosen_and_must_exist() -> None:
    with anyio.fail_after(60):
        async with EngineCoreClient(ranks(2)) as core:
            for name in ("a", "b"):
                params = WireSamplingParams(max_tokens=2)
                assert core.add(EngineCoreRequest(name, [1], sampling_params=params, data_parallel_rank=1)) == 1
            assert (await core.utility("get_engine_statistics", rank=0))["num_running_requests"] == 0
            with pytest.raises(RequestRejected, match="there is no rank 2") as caught:
                core.add(EngineCoreRequest("c", [1], sampling_params=WireSamplingParams(max_tokens=2)), rank=2)
            assert caught.value.parameter == "rank" and "0, 1" in str(caught.value.remedy)
            with pytest.raises(RequestRejected, match="there is no rank -1"):
                await core.utility("is_sleeping", rank=-1)
            assert "c" not in core.session.connection.requests.live


@pytest.mark.feature("C38")
async def test_calls_go_to_all_before_any_is_awaited() -> None:
    """Some calls of real engines end only when every rank has them."""
    with anyio.fail_after(60):
        async with EngineCoreClient([misbehaving("slow_calls"), misbehaving("slow_calls")]) as core:
            results: dict[int, Any] = {}

            async def call() -> None:
                results.update(await core.utility_on(None, "held"))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                await core.utility("flush", rank=1)
                assert not results
                await core.utility("flush", rank=0)
            assert set(results) == {0, 1}


async def test_operations_reach_every_rank() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=ranks(2, step_delay_s=0.002)) as client:
            async with client.paused("keep"):
                assert await client.is_paused() is True
                assert await client.core.utility_on([1, 0], "is_scheduler_paused") == {1: True, 0: True}
            assert await client.is_paused() is False
            await client.core.utility("pause_scheduler", "keep", False, rank=1)
            with pytest.raises(UtilityError, match=r"differ.*0: False, 1: True"):
                await client.is_paused()
            await client.resume_generation()
            assert await client.supported_tasks() == ("generate",)


async def test_a_call_to_a_rank_that_dies_meanwhile() -> None:
    with anyio.fail_after(60):
        async with EngineCoreClient([misbehaving("slow_calls"), misbehaving("slow_calls")]) as core:
            caught: list[EngineDeadError] = []

            async def call() -> None:
                with pytest.raises(EngineDeadError) as raised:
                    await core.utility_on(None, "held")
                caught.append(raised.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await anyio.wait_all_tasks_blocked()
                os.kill(pid_of(core, 0), signal.SIGKILL)
                await core.wait_dead(0)
                assert not caught  # the other one has not answered yet
                await core.utility("flush", rank=1)
            assert [error.rank for error in caught] == [0]
            pending = core.session.connection.utilities.pending.values()
            assert {call.method for call in pending} <= {"is_sleeping"}  # rank 1 may have been a suspect, too


async def test_an_abort_reaches_the_rank_that_has_the_request() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=ranks(2, step_delay_s=0.002)) as client:
            streams = [await client.submit([n], LONG, request_id=f"r{n}") for n in range(4)]
            assert len(await client.abort(["r1", "r2"])) == 2
            running = await client.core.utility_on(None, "get_engine_statistics")
            assert {rank: stats["num_running_requests"] for rank, stats in running.items()} == {0: 1, 1: 1}
            for stream in streams:
                await stream.aclose()


async def test_the_shortest_model_length_counts() -> None:
    engines = [*ranks(1, max_model_len=100), *ranks(1, max_model_len=50)]
    with anyio.fail_after(60):
        async with EngineClient(engine=engines) as client:
            with pytest.raises(RequestRejected, match="50"):
                await tokens(client, [1] * 60)


async def test_one_that_does_not_start_ends_the_others() -> None:
    engines = [*ranks(2), *ranks(1, fail_on_load="out of paper")]
    with anyio.fail_after(60):
        with pytest.raises(EngineStartupError, match="out of paper") as caught:
            async with EngineClient(engine=engines):
                pytest.fail("it cannot be entered")
        assert caught.value.rank == 2


@pytest.mark.feature("L04")
async def test_a_start_that_takes_too_long_names_the_late_ranks() -> None:
    engines = [*ranks(1), misbehaving("silent"), misbehaving("silent")]
    with anyio.fail_after(60):
        with pytest.raises(StartupTimeout, match=r"2 of 3 are not: 1, 2") as caught:
            async with EngineClient(engine=engines, startup_timeout_s=2, shutdown_grace_s=0.1):
                pytest.fail("it cannot be entered")
        assert caught.value.rank == 1


@pytest.mark.feature("D26")
async def test_ranks_of_different_releases_get_what_each_of_them_knows() -> None:
    """``priority`` stands at 12 from 0.17 on and at 13 from 0.21 on; ``profile`` takes two arguments from 0.17 on and
    five from 0.33 on, where ``pause_generation`` is new."""
    old = misbehaving("hands_back", '{"vllm_version": "0.20.1"}')
    new = misbehaving("hands_back", '{"vllm_version": "0.33.0"}')
    with anyio.fail_after(60):
        async with EngineCoreClient([old, new]) as core:
            assert core.utility_arity("pause_generation") is None  # not on all of them
            assert core.utility_arity("pause_scheduler") == 2
            assert core.utility_arity("profile") == 2
            for rank, position in ((0, 12), (1, 13)):
                params = WireSamplingParams(max_tokens=1)
                core.add(EngineCoreRequest(f"r{rank}", [1], sampling_params=params, priority=7), rank=rank)
                assert (await core.utility("seen", rank=rank)).index(7) == position


def test_engines_that_make_no_sense_together() -> None:
    with pytest.raises(ValueError, match="starts nothing"):
        EngineCoreClient([])
    scripted: Any = ScriptedTwin()
    with pytest.raises(ValueError, match=r"nothing that a client can start or join: give its \.engine"):
        EngineCoreClient(scripted)
    for name in ("a-model", ["a-model"]):
        with pytest.raises(ValueError, match="give an EmbeddedEngine"):
            EngineCoreClient(name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stands for all ranks"):
        EngineCoreClient([RemoteEngine(handshake="tcp://127.0.0.1:29550"), toy()])
    with pytest.raises(ValueError, match="liveness_timeout_s"):
        EngineCoreClient(toy(), liveness_timeout_s=0)


@pytest.mark.feature("L14")
async def test_a_call_that_fails_on_one_rank_keeps_the_others_answers() -> None:
    record = misbehaving("record", os.devnull)
    with anyio.fail_after(60):
        async with EngineCoreClient([record, toy(), record]) as core:
            with pytest.raises(UtilityError) as caught:
                await core.utility_on(None, "no_method_of_ours", unchecked=True)
            error = caught.value
            assert (error.rank, error.method) == (1, "no_method_of_ours")
            assert error.outcomes == {0: "ok", 1: error, 2: "ok"}
