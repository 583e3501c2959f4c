"""Many prompts in one call: all answers, one failure policy, one abort of exactly what has not ended."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from anyengine import (
    EngineClient,
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestFailed,
    RequestOutput,
    RequestRejected,
    RequestTimeout,
    SamplingParams,
)
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

SHORT = SamplingParams(max_tokens=4)
LONG = SamplingParams(max_tokens=2000)


@pytest.mark.feature("L34")
@pytest.mark.parametrize(("ordered", "concurrency"), [(False, None), (True, 7)])
async def test_a_thousand_prompts_and_a_bad_one(ordered: bool, concurrency: int | None) -> None:
    scripted = ScriptedTwin(Script(max_running=50))
    prompts = [[n] if n != 500 else [-1] for n in range(1000)]
    got: dict[int, RequestOutput | EngineError] = {}
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            async for index, out in client.generate_many(
                prompts, SHORT, ordered=ordered, concurrency=concurrency, on_error="collect"
            ):
                got[index] = out
                assert concurrency is None or client.statistics()["requests_in_flight"] <= concurrency
            assert client.statistics()["requests_in_flight"] == 0
    assert sorted(got) == list(range(1000))
    assert not ordered or list(got) == list(range(1000))
    bad = got.pop(500)
    assert isinstance(bad, RequestRejected) and bad.prompt_index == 500
    for index, out in got.items():
        assert isinstance(out, RequestOutput)
        assert (out.token_ids, out.finish_reason) == (expected_tokens([index % 1000], 4), "length")


@pytest.mark.feature("L34")
async def test_the_first_failure_aborts_the_others_and_is_raised() -> None:
    rules = (RequestRule(first_token=3, after_tokens=1, finish="error"), RequestRule(silent=True))
    scripted = ScriptedTwin(Script(requests=rules))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            group = client.generate_many(([n] for n in range(6)), LONG, request_id="all")
            for _ in range(2):
                with pytest.raises(RequestFailed) as failed:
                    await anext(group)
                assert failed.value.prompt_index == 3
                assert any("prompt 3" in note for note in failed.value.__notes__)
            assert client.statistics()["requests_in_flight"] == 0
            await client.ping()
            group = client.generate_many([[3], [4], [-1], [5]], LONG)
            with pytest.raises(RequestRejected) as rejected:  # before anything that was sent can end
                async with group:
                    pass
            assert rejected.value.prompt_index == 2
            await client.ping()
    aborts = scripted.received("abort")
    ids = [add[0] for add in scripted.received("add")]
    assert [sorted(one) for one in aborts] == [sorted({*ids[:6]} - {ids[3]}), sorted(ids[6:8])]


@pytest.mark.feature("L34")
@pytest.mark.case("K72")
async def test_answers_that_are_all_there_let_others_run_in_between() -> None:
    """Counted in answers: never more than a few between two turns of another task."""
    got, longest = 0, 0
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine) as client, anyio.create_task_group() as tasks:

            async def tick() -> None:
                nonlocal longest
                seen = 0
                while True:
                    await anyio.lowlevel.checkpoint()
                    longest, seen = max(longest, got - seen), got

            tasks.start_soon(tick)
            async with client.generate_many(([n] for n in range(300)), SHORT) as group:
                while group.num_in_flight:
                    await anyio.lowlevel.checkpoint()
                async for _ in group:
                    got += 1
            tasks.cancel_scope.cancel()
    assert got == 300
    assert longest <= 2 * 32  # on asyncio a turn of the other one may be missed


async def leave_by_break(group: Any) -> None:
    seen = 0
    async with group:
        async for _ in group:
            seen += 1
            if seen == 3:
                break


async def leave_by_exception(group: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        async with group:
            for _ in range(3):
                await anext(group)
            raise ZeroDivisionError


async def leave_by_aclose(group: Any) -> None:
    for _ in range(3):
        await anext(group)
    await group.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(group)


async def leave_by_cancellation(group: Any) -> None:
    with anyio.CancelScope() as scope:
        async for _ in group:
            if len(group._sent) == 5:
                scope.cancel()


async def leave_by_dropping(group: Any) -> None:
    for _ in range(3):
        await anext(group)


@pytest.mark.case("K28")
@pytest.mark.feature("L34")
@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_exception, leave_by_aclose, leave_by_cancellation, leave_by_dropping],
    ids=lambda leave: leave.__name__,
)
async def test_one_abort_for_exactly_what_has_not_ended(leave: Callable[[Any], Any]) -> None:
    """Of eight three finish, two run and three are queued, which are never scheduled."""
    rules = (*(RequestRule(first_token=n, after_tokens=2) for n in range(3)), RequestRule(silent=True))
    scripted = ScriptedTwin(Script(max_running=2, requests=rules))
    prompts = [[n] for n in range(8)]
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            group: Any = client.generate_many(prompts, LONG)
            if leave is leave_by_dropping:
                await leave(group)
                with pytest.warns(ResourceWarning, match="with 5 in flight"):
                    del group
                    gc.collect()
                while client.statistics()["requests_in_flight"]:
                    await anyio.lowlevel.checkpoint()
            else:
                await leave(group)
            with anyio.fail_after(1):
                assert client.statistics()["requests_in_flight"] == 0
                await client.ping()
                (aborted,) = scripted.received("abort")
            ids = [add[0] for add in scripted.received("add")]
            assert len(ids) == 8
            assert sorted(aborted) == sorted(ids[3:])
    assert len(scripted.received("abort")) == 1
    assert scripted.scheduled() == ids[:5]  # not one more, although there is room now


@pytest.mark.case("K28")
@pytest.mark.feature("L10")
@pytest.mark.parametrize("how", ["stream", "label", "leave"])
async def test_one_abort_for_the_completions_that_have_not_ended(how: str) -> None:
    """n=8, of which three finish, two run and three are queued."""
    rules = (*(RequestRule(nth=n, after_tokens=2) for n in range(1, 4)), RequestRule(silent=True))
    scripted = ScriptedTwin(Script(max_running=2, requests=rules))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=8) as client:
            async with client.generate([1], SamplingParams(max_tokens=100, n=8), request_id="x") as stream:
                while client.statistics()["requests_in_flight"] > 5 or stream.wire_id is None:
                    await anext(stream)
                with pytest.raises(OverloadedError):
                    client.check_admission(4)
                client.check_admission(3)
                unfinished = stream.wire_ids[3:]
                if how == "stream":
                    assert await client.abort(stream) == unfinished
                elif how == "label":
                    assert await client.abort("x") == unfinished
            await client.ping()
            client.check_admission(8)
    assert scripted.received("abort") == [list(unfinished)]
    assert scripted.scheduled() == [add[0] for add in scripted.received("add")][:5]


async def test_what_was_not_sent_is_never_sent() -> None:
    scripted = ScriptedTwin(Script(max_running=1, step_interval_s=0.001))
    drawn: list[int] = []

    def prompts() -> Any:
        for n in range(100):
            drawn.append(n)
            yield [n]

    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            async with client.generate_many(prompts(), LONG, concurrency=3) as group:
                assert group.num_in_flight == 3
                await anyio.lowlevel.checkpoint()
            await client.ping()
    assert drawn == [0, 1, 2]
    assert len(scripted.received("add")) == 3
    assert len(scripted.scheduled()) == 1


async def test_admission_limits_bound_a_group() -> None:
    scripted = ScriptedTwin()
    prompts = [[n, n] for n in range(50)]
    for limits in (
        {"max_num_queued_reqs": 4},
        {"max_num_queued_tokens": 8},
        {"max_num_queued_reqs": 4, "admission": "wait"},
    ):
        with anyio.fail_after(30):
            async with EngineClient(engine=scripted.engine, **limits) as client:  # type: ignore[arg-type]
                got = [index async for index, _ in client.generate_many(prompts, SHORT)]
                assert sorted(got) == list(range(50))
                async with client.generate([1], LONG), client.generate([1], LONG):
                    if limits.get("max_num_queued_reqs"):
                        async with client.generate([1], LONG), client.generate([1], LONG):
                            if "admission" not in limits:
                                with pytest.raises(OverloadedError):
                                    await anext(client.generate_many(prompts, SHORT))


async def test_a_pause_in_the_middle_of_a_group_is_waited_for() -> None:
    """Also by a member that is on its way when the pause begins."""
    scripted = ScriptedTwin(Script())
    got: set[int] = set()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine, admission="wait") as client:

            async def iterate() -> None:
                async for index, _ in client.generate_many([[n] for n in range(40)], SHORT):
                    got.add(index)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(iterate)
                for _ in range(3):  # while it sends: it lets others run after every few prompts
                    await anyio.lowlevel.checkpoint()
                    async with client.paused():
                        pass
    assert got == set(range(40))


async def test_a_cancelled_wait_inside_a_block_loses_nothing() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.002))
    got: list[int] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            async with client.generate_many([[n] for n in range(30)], SHORT, concurrency=2) as group:
                while len(got) < 30:
                    with anyio.move_on_after(0.001):
                        index, _ = await anext(group)
                        got.append(index)
                with pytest.raises(StopAsyncIteration):
                    await anext(group)
    assert sorted(got) == list(range(30))
    assert scripted.received("abort") == []


async def test_deaths_timeouts_and_parameters_of_each() -> None:
    scripted = ScriptedTwin(
        Script(
            requests=(RequestRule(first_token=1, silent=True),),
            faults=(Fault(do="kill", kind="add", nth=4, direction="in"),),
        )
    )
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            params = [SamplingParams(max_tokens=n + 1) for n in range(3)]
            got = [
                (index, out)
                async for index, out in client.generate_many(
                    [[0], [1], [2]], params, ordered=True, on_error="collect", timeout_s=0.1
                )
            ]
            lengths = [len(out.token_ids) for _, out in got if isinstance(out, RequestOutput)]
            assert lengths == [1, 3]
            assert isinstance(got[1][1], RequestTimeout)
            with pytest.raises(EngineDeadError):
                await anext(client.generate_many([[1], [1]], LONG))
            with pytest.raises(EngineDeadError):
                await anext(client.generate_many([[1], [1]], LONG))
            for bad in ({"concurrency": 0}, {"on_error": "x"}, {"sampling_params": params[:2]}):
                with pytest.raises(ValueError, match=next(iter(bad))):
                    client.generate_many([[1], [1], [2]], **bad)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="use generate"):
                client.generate_many("text", LONG)
