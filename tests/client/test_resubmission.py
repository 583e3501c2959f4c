"""Requests that are sent again: replayed behind the tokens they have, or retried before the first one."""

from __future__ import annotations

import os
import signal
import zlib
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from engines import misbehaving, toy
from incarnations import Incarnations

from anyengine import (
    ClientClosedError,
    EmbeddedEngine,
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    EngineDeadError,
    LateInteractionParams,
    LoRARequest,
    OverloadedError,
    PoolingParams,
    RankState,
    RequestFailed,
    RequestStream,
    RestartPolicy,
    RetryPolicy,
    SamplingParams,
    UtilityError,
)
from anyengine._wire import pooling_to_wire
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, UtilityRule
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

REPLAY = RestartPolicy(backoff_s=0.01, in_flight="replay")
GREEDY = SamplingParams(max_tokens=300, temperature=0)
RETRY = RetryPolicy(max_attempts=3, backoff_s=0.001)


def pid_of(core: EngineCoreClient, rank: int = 0) -> int:
    return next(child.child.pid for child in core.session.children if child.rank == rank)


async def until(client: EngineClient, state: RankState, rank: int = 0) -> None:
    async for event in client.events():
        if event.ranks[rank] is state:
            return


@pytest.mark.feature("L31")
async def test_a_stream_goes_on_where_it_was_when_its_engine_died() -> None:
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.002), restart=REPLAY) as client:
            received: list[int] = []
            kills = 0
            async with client.generate([7, 8], GREEDY) as stream:
                async for output in stream:
                    received += output.token_ids
                    if kills < 2 and len(received) > 40 * (kills + 1):
                        kills += 1
                        os.kill(pid_of(client.core), signal.SIGKILL)
                        await until(client, RankState.RESTARTING)
            assert received == expected_tokens([7, 8], 300)
            assert output.finish_reason == "length" and output.num_output_tokens == 300
            assert output.num_prompt_tokens == 2 and stream.attempts == 3
            assert client.statistics()["requests_in_flight"] == 0


@pytest.mark.feature("L31")
@pytest.mark.case("K59")
async def test_a_stream_goes_on_with_another_rank() -> None:
    """One of two is given up for good: both serve the same model, and nobody sees a difference."""
    policy = RestartPolicy(max_restarts=1, backoff_s=30, in_flight="replay")
    engines = [toy(step_delay_s=0.002)] * 2
    with anyio.fail_after(60):
        async with EngineClient(engine=engines, restart=policy) as client:
            outputs: dict[int, list[int]] = {}

            async def consume(number: int) -> None:
                outputs[number] = []
                async for output in client.generate([number], GREEDY):
                    outputs[number] += output.token_ids
                    if len(outputs) == 6 and all(outputs.values()):
                        running.set()

            running = anyio.Event()
            async with anyio.create_task_group() as consumers:
                for number in range(6):
                    consumers.start_soon(consume, number)
                await running.wait()
                os.kill(pid_of(client.core, 1), signal.SIGKILL)
            assert outputs == {number: expected_tokens([number], 300) for number in range(6)}


@pytest.mark.feature("L31")
async def test_what_cannot_be_replayed_exactly_fails_and_says_why() -> None:
    cases = {
        "seed": SamplingParams(max_tokens=1900, seed=3),
        "presence_penalty": SamplingParams(max_tokens=1900, temperature=0, presence_penalty=1.0),
        "frequency_penalty": SamplingParams(max_tokens=1900, frequency_penalty=0.5),
    }
    caught: dict[str, EngineDeadError] = {}
    with anyio.fail_after(60):
        async with EngineClient(engine=toy(step_delay_s=0.01), restart=REPLAY) as client:

            async def consume(name: str) -> None:
                async with client.generate([7], cases[name]) as stream:
                    await anext(stream)
                    running.discard(name)
                    if not running:
                        os.kill(pid_of(client.core), signal.SIGKILL)
                    with pytest.raises(EngineDeadError) as raised:
                        async for _ in stream:
                            pass
                    caught[name] = raised.value

            running = set(cases)
            async with anyio.create_task_group() as consumers:
                for name in cases:
                    consumers.start_soon(consume, name)
    for name, error in caught.items():
        assert "was not replayed" in str(error) and name in str(error)
        assert error.partial.token_ids and error.signal == "SIGKILL"
    assert set(caught) == set(cases)


async def test_a_request_that_kills_its_engine_is_not_replayed_for_ever() -> None:
    with anyio.fail_after(60):
        engine = toy(fail_at_step=1)
        async with EngineClient(
            engine=engine, restart=RestartPolicy(max_restarts=9, backoff_s=0, in_flight="replay")
        ) as client:
            with pytest.raises(EngineDeadError, match="may be what kills"):
                await anext(client.generate([7], GREEDY))
            await until(client, RankState.READY)
            assert client.statistics()["restarts"] == 2


@pytest.mark.feature("L31")
@pytest.mark.parametrize("way", ["abort", "aclose", "cancel", "label", "close"])
async def test_every_exit_works_while_a_request_waits_to_be_replayed(way: str) -> None:
    policy = RestartPolicy(backoff_s=30, in_flight="replay")
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.01), restart=policy) as client:
            stream = await client.submit([7], GREEDY, request_id="mine")
            await anext(stream)
            os.kill(pid_of(client.core), signal.SIGKILL)
            await until(client, RankState.RESTARTING)
            desk = client._entered_desk()
            while not desk.resubmissions.waiting():
                await anyio.lowlevel.checkpoint()
            if way == "abort":
                stream.abort()
                *_, last = [output async for output in stream]
                assert last.finish_reason == "abort"
            elif way == "aclose":
                await stream.aclose()
            elif way == "label":
                assert await client.abort("mine") == (stream.wire_id,)
                assert [output.finish_reason async for output in stream][-1] == "abort"
            elif way == "cancel":
                with anyio.move_on_after(0.01):
                    async for _ in stream:
                        pass
            if way != "close":
                assert desk.resubmissions.waiting() == desk.live() == []
        if way == "close":
            assert [output.finish_reason async for output in stream][-1] == "abort"
            with pytest.raises(ClientClosedError):
                await client.submit([7])


@pytest.mark.feature("L22")
async def test_a_retryable_error_twice_then_tokens() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("fails_at_first", "2"), retries=RETRY) as client:
            stream = client.generate([7], SamplingParams(max_tokens=2))
            assert [output.token_ids async for output in stream] == [[7]]
            assert stream.attempts == 3


@pytest.mark.feature("L22")
@pytest.mark.parametrize(("failures", "retries", "attempts"), [(3, RETRY, 3), (1, None, 1)])
async def test_the_last_error_is_told(failures: int, retries: RetryPolicy | None, attempts: int) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("fails_at_first", str(failures)), retries=retries) as client:
            stream = client.generate([7], SamplingParams(max_tokens=2))
            with pytest.raises(RequestFailed) as caught:
                await anext(stream)
            assert (caught.value.code, caught.value.retryable, stream.attempts) == ("engine_paused", True, attempts)


@pytest.mark.feature("L22")
async def test_nothing_is_retried_behind_a_token_or_without_need() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("fails_at_first", "99", "[5]"), retries=RETRY) as client:
            stream = client.generate([7], SamplingParams(max_tokens=2))
            with pytest.raises(RequestFailed):
                async for _ in stream:
                    pass
            assert stream.attempts == 1
        async with EngineClient(engine=misbehaving("fails_requests", "0.33.0", "null"), retries=RETRY) as client:
            stream = client.generate([7], SamplingParams(max_tokens=2))
            with pytest.raises(RequestFailed):
                async for _ in stream:
                    pass
            assert stream.attempts == 1


@pytest.mark.feature("L22")
async def test_a_request_whose_rank_dies_before_its_first_token_is_retried_on_another() -> None:
    runner = "anyengine.testing.toy_runner:create_runner"
    engines = [
        EmbeddedEngine(runner=runner, seed=0),
        EmbeddedEngine(runner=runner, seed=1, runner_options={"fail_at_step": 1}),
    ]
    with anyio.fail_after(30):
        async with EngineClient(engine=engines, retries=RETRY) as client:
            for _ in range(2):
                out = [
                    token
                    async for output in client.generate([7], SamplingParams(max_tokens=5))
                    for token in output.token_ids
                ]
                assert out == expected_tokens([7], 5, seed=0)
            assert client.ranks == (0,)


@pytest.mark.feature("L31")
async def test_a_replay_whose_adapter_cannot_be_loaded_again_fails_as_a_request() -> None:
    """Its consumer asked for tokens, and knows nothing of the call."""
    able = {"supports_lora": True, "max_loras": 2}
    lost = UtilityRule(method="add_lora", do="fail", message="no such file")
    engine = Incarnations(
        Script(registration=able, step_interval_s=0.001), Script(registration=able, utilities=(lost,))
    )
    with anyio.fail_after(20):
        async with EngineClient(engine=engine.engine, restart=REPLAY) as client:
            adapter = LoRARequest("french", 1, "/adapters/french")
            stream = client.generate([7], GREEDY, lora_request=adapter, request_id="mine")
            received = (await anext(stream)).token_ids
            client.core.session.engines[0].child.kill()
            with pytest.raises(RequestFailed) as caught:
                async for out in stream:
                    received += out.token_ids
            assert (caught.value.code, caught.value.request_id) == ("adapter_lost", "mine")
            assert caught.value.partial.token_ids == received
            assert "'french'" in str(caught.value) and "no such file" in str(caught.value)
            assert caught.value.__cause__ is not None
            assert isinstance(caught.value.__cause__.__cause__, UtilityError)
            assert client._entered_desk().live() == []
            assert [out async for out in client.generate([8], SamplingParams(max_tokens=2))]


async def test_a_replay_for_one_rank_waits_for_its_room_and_asks_no_more() -> None:
    """Another rank has room, which is of no use to it."""
    silent = (RequestRule(silent=True),)
    reads_nothing = Script(requests=silent, utilities=(UtilityRule(method="is_sleeping", do="never"),))
    first, second = Incarnations(Script(requests=silent), reads_nothing), ScriptedTwin(Script())
    sent: list[str] = []
    with anyio.fail_after(20):
        async with EngineClient(
            engine=[first.engine, second.engine], restart=REPLAY, max_unread_bytes=2000, liveness_timeout_s=None
        ) as client:
            streams: list[RequestStream] = []
            while len(streams) < 20:
                with suppress(OverloadedError):
                    streams.append(await client.submit([len(streams)] * 40, GREEDY, data_parallel_rank=0))
                await anyio.lowlevel.checkpoint()
            put = client.core.put

            def counted(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> int:
                sent.append(request.request_id)
                return put(request, *args, **kwargs)

            client.core.put = counted  # type: ignore[method-assign]
            client.core.session.engines[0].child.kill()
            await until(client, RankState.RESTARTING)
            await until(client, RankState.READY)
            await anyio.wait_all_tasks_blocked()
            waiting = client._entered_desk().resubmissions.waiting()
            assert waiting and len(sent) == 20 - len(waiting)
            for stream in streams:
                stream.close_nowait()


@pytest.mark.feature("C36")
async def test_a_retry_where_its_query_is_kept_waits_for_the_room_there() -> None:
    """Another rank has room, which is of no use to it."""
    fails = RequestRule(nth=1, output={4: None, 5: 2})  # no result, but an abort that nobody has asked for
    # What it has read is not told: it never answers what would ask.
    script = Script(
        tasks=("token_embed",),
        requests=(fails, RequestRule(silent=True)),
        utilities=(UtilityRule(method="is_sleeping", do="never"),),
    )
    key = next(key for key in "abcdef" if zlib.crc32(key.encode()) % 2 == 0)
    late = LateInteractionParams(mode="cache_query", query_key=key)
    params = PoolingParams(task="token_embed", late_interaction_params=late)
    first, sent = ScriptedTwin(script), list[str]()
    with anyio.fail_after(20):
        async with EngineClient(
            engine=[first.engine, ScriptedTwin(script).engine],
            retries=RETRY,
            max_unread_bytes=2000,
            liveness_timeout_s=None,
        ) as client:
            put = client.core.put

            def counted(request: EngineCoreRequest, *args: Any, **kwargs: Any) -> int:
                sent.append(request.request_id)
                return put(request, *args, **kwargs)

            client.core.put = counted  # type: ignore[method-assign]
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.encode, [1, 2, 3], params)
                while not first.received("add"):
                    await anyio.lowlevel.checkpoint()
                wire = pooling_to_wire(params)
                with pytest.raises(OverloadedError):
                    for number in range(50):  # in one go: its end has not been heard of
                        client.core.add(EngineCoreRequest(str(number), [9] * 1500, pooling_params=wire), rank=0)
                while not client.core.session.send_budget.waiting:
                    await anyio.lowlevel.checkpoint()
                assert len(client._entered_desk().resubmissions.waiting()) == 1
                tasks.cancel_scope.cancel()
    assert not [one for one in sent if one.endswith(".2")]  # it was not even tried
