"""Time limits of requests and calls, and idle time, in virtual time where that makes them exact."""

from __future__ import annotations

import math
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio
import trio.abc
import trio.lowlevel
import trio.testing

from anyengine import (
    EngineClient,
    EngineUnresponsiveError,
    RequestRejected,
    RequestStream,
    RequestTimeout,
    SamplingParams,
)
from anyengine._client.requests.deadlines import _PRUNE_FROM, Deadlines, TimedRequestState, Timeouts
from anyengine._client.requests.state import RequestState
from anyengine._client.session.wakeup import make_parker
from anyengine._wire import EngineCoreOutput, EngineCoreOutputs
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, UtilityRule, expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=2000)


@pytest.fixture
def virtual() -> Any:
    """Trio with a clock that jumps to the next deadline as soon as everybody waits."""
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture(params=["virtual"])
def anyio_backend(request: pytest.FixtureRequest, virtual: Any) -> Any:
    return virtual


async def overrun(stream: RequestStream) -> tuple[list[int], RequestTimeout]:
    tokens: list[int] = []
    with pytest.raises(RequestTimeout) as caught:
        async for out in stream:
            assert not out.finished
            tokens += out.token_ids
    with pytest.raises(RequestTimeout):
        await anext(stream)
    assert caught.value.partial.token_ids == tokens
    assert caught.value.request_id == stream.request_id
    return tokens, caught.value


STALLS = Fault(do="sleep", direction="out", kind="outputs", nth=5, seconds=100)


@pytest.mark.feature("L12", "L44")
@pytest.mark.parametrize(
    ("script", "limits", "limit", "num_tokens"),
    [
        (Script(step_interval_s=0.3), {"timeout_s": 1.0}, "timeout_s", 4),
        (Script(first_token_delay_s=50), {"first_token_timeout_s": 20}, "first_token_timeout_s", 0),
        (Script(step_interval_s=0.1, faults=(STALLS,)), {"inter_token_timeout_s": 5}, "inter_token_timeout_s", 4),
        (
            Script(step_interval_s=0.1, faults=(STALLS,)),
            {"timeout_s": 300.0, "first_token_timeout_s": 1.0, "inter_token_timeout_s": 5.0},
            "inter_token_timeout_s",
            4,
        ),
        (
            Script(first_token_delay_s=50),
            {"timeout_s": 10.0, "first_token_timeout_s": 20.0, "inter_token_timeout_s": 0.1},
            "timeout_s",
            0,
        ),
    ],
)
async def test_each_limit_fires_alone(script: Script, limits: dict[str, float], limit: str, num_tokens: int) -> None:
    scripted = ScriptedTwin(script)
    async with EngineClient(engine=scripted.engine) as client:
        began_s = anyio.current_time()
        stream = client.generate([1], LONG, **limits)
        tokens, error = await overrun(stream)
        passed_s = anyio.current_time() - began_s
        assert (tokens, error.limit) == (expected_tokens([1], num_tokens), limit)
        expected_s = limits[limit] if limit != "inter_token_timeout_s" else 0.3 + 5.0
        assert passed_s == pytest.approx(expected_s, abs=0.01)
        assert client.statistics()["requests_in_flight"] == 0
        assert client.statistics()["request_timeouts"] == 1
        await client.ping(200)
    assert scripted.received("abort") == [[scripted.received("add")[0][0]]]


@pytest.mark.feature("L12")
async def test_nobody_has_to_iterate() -> None:
    """One timer: no task and no scope for a request; a slow consumer is no slow engine."""
    scripted = ScriptedTwin(Script(step_interval_s=0.1, faults=(STALLS,)))
    async with EngineClient(engine=scripted.engine) as client:
        tasks = trio.lowlevel.current_statistics().tasks_living
        streams = [await client.submit([n], LONG, inter_token_timeout_s=5 + n) for n in range(50)]
        assert trio.lowlevel.current_statistics().tasks_living <= tasks  # what the start left may end
        await anyio.sleep(60)
        assert client.statistics()["requests_in_flight"] == 0
        for n, stream in enumerate(streams):
            tokens, _ = await overrun(stream)
            assert tokens == expected_tokens([n], len(tokens)) and 3 <= len(tokens) <= 4
        done = await client.submit([1], SamplingParams(max_tokens=3), inter_token_timeout_s=1)
        await anyio.sleep(200)
        assert (await anext(done)).finish_reason == "length"


@pytest.mark.feature("L12")
@pytest.mark.parametrize("anyio_backend", list(BACKENDS.values()), ids=list(BACKENDS))
async def test_in_real_time_on_every_loop() -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.01, requests=(RequestRule(first_token=1, silent=True),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            neighbour = await client.submit([2], SamplingParams(max_tokens=20), timeout_s=25)
            tokens, error = await overrun(client.generate([1], LONG, timeout_s=20, first_token_timeout_s=0.05))
            assert (tokens, error.limit) == ([], "first_token_timeout_s")
            assert [token async for out in neighbour for token in out.token_ids] == expected_tokens([2], 20)


@pytest.mark.feature("L12")
async def test_waiting_to_be_sent_counts() -> None:
    scripted = ScriptedTwin(Script(requests=(RequestRule(silent=True),)))
    async with EngineClient(engine=scripted.engine, max_num_queued_reqs=1, admission="wait") as client:
        async with client.generate([1], LONG):
            for limits in ({"timeout_s": 3.0}, {"first_token_timeout_s": 3.0}):
                began_s = anyio.current_time()
                with pytest.raises(RequestTimeout, match="was not sent") as caught:
                    await client.submit([2], LONG, **limits)
                assert caught.value.partial is None
                assert anyio.current_time() - began_s == pytest.approx(3.0)
            with anyio.move_on_after(1) as outer:  # whose deadline this is must not be mixed up
                await client.submit([2], LONG, timeout_s=3.0)
            assert outer.cancelled_caught
        assert len(scripted.received("add")) == 1


@pytest.mark.parametrize("name", ["timeout_s", "first_token_timeout_s", "inter_token_timeout_s"])
async def test_what_is_no_time_limit_is_refused(name: str) -> None:
    scripted = ScriptedTwin()
    async with EngineClient(engine=scripted.engine) as client:
        for value in (0, -1.0, math.nan, "1", True):
            with pytest.raises(RequestRejected) as caught:
                await client.submit([1], LONG, **{name: value})
            assert caught.value.parameter == name
    assert scripted.received("add") == []


def _state(n: int) -> RequestState:
    return TimedRequestState(f"w{n}", f"r{n}", make_parker())


async def test_entries_of_what_has_ended_do_not_pile_up() -> None:
    deadlines = Deadlines(lambda expired: None, anyio.lowlevel.checkpoint)
    alive = [_state(n) for n in range(100)]
    for state in alive:
        deadlines.watch(state, Timeouts(total_s=600.0), 0.0)
    for n in range(20_000):
        state = _state(n)
        deadlines.watch(state, Timeouts(total_s=600.0), 0.0)
        state.aborted()
        assert len(deadlines) <= 2 * len(alive) + _PRUNE_FROM
    assert not any(state.ended for state in alive)


async def test_what_has_arrived_when_the_timer_is_late_counts() -> None:
    expired: list[str] = []
    deadlines = Deadlines(
        lambda items: expired.extend(error.limit or "" for _, error in items), anyio.lowlevel.checkpoint
    )
    state = _state(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(deadlines.run)
        deadlines.watch(state, Timeouts(first_token_s=1.0), anyio.current_time())

        async def arrive() -> None:
            await anyio.sleep(1.0)  # due together with the timer: both are run in one turn, in any order
            await anyio.lowlevel.checkpoint()
            state.push(EngineCoreOutput("w0", [1]))

        tasks.start_soon(arrive)
        await anyio.sleep(5)
        tasks.cancel_scope.cancel()
    assert expired == []


async def test_what_has_been_read_counts_however_long_it_takes_to_give_it_out() -> None:
    """Its token stands at the end of a batch that is given out in many slices."""
    scripted = ScriptedTwin(Script(requests=(RequestRule(silent=True),)))
    async with EngineClient(engine=scripted.engine) as client:
        late = await client.submit([1], LONG, first_token_timeout_s=1.0)
        other = await client.submit([1], LONG, first_token_timeout_s=1.0)
        assert late.wire_id is not None
        rows = [EngineCoreOutput("of nobody", [1]) for _ in range(5000)] + [EngineCoreOutput(late.wire_id, [7])]
        await anyio.sleep(1.0)
        client.core.session.feed.send_nowait(EngineCoreOutputs(engine_index=0, outputs=rows))
        assert (await anext(late)).token_ids == [7]
        with pytest.raises(RequestTimeout):
            await anext(other)
        late.close_nowait()


@pytest.mark.case("K08")
@pytest.mark.parametrize("how", ["argument", "scope"])
async def test_a_call_is_over_when_its_time_is(how: str) -> None:
    """Within 0.1 s; a stream beside it goes on, and the late reply is dropped."""
    late = UtilityRule(method="reset_mm_cache", do="reply", delay_s=0.5)
    scripted = ScriptedTwin(Script(step_interval_s=0.01, utilities=(late,)))
    async with EngineClient(engine=scripted.engine) as client:
        stream = await client.submit([1], SamplingParams(max_tokens=100))
        began_s = anyio.current_time()
        with pytest.raises(TimeoutError):
            if how == "argument":
                await client.core.utility("reset_mm_cache", timeout_s=0.2)
            else:
                with anyio.fail_after(0.2):
                    await client.reset_mm_cache()
        assert 0.2 <= anyio.current_time() - began_s < 0.3
        assert [token async for out in stream for token in out.token_ids] == expected_tokens([1], 100)
        statistics = client.statistics()
        assert (statistics["late_utility_replies"], statistics["utility_calls_in_flight"]) == (1, 0)


@pytest.mark.case("K04")
async def test_a_health_check_is_over_when_its_time_is() -> None:
    """One rank serves fifty streams, and one reads everything and never answers: it alone is named, by each of several
    checks at a time; the streams go on."""
    silent = UtilityRule(method="is_sleeping", do="never")
    engines = [ScriptedTwin(Script(step_interval_s=0.01)), ScriptedTwin(Script(utilities=(silent,)))]
    async with EngineClient(engine=[one.engine for one in engines], liveness_timeout_s=None) as client:
        streams = [await client.submit([n], SamplingParams(max_tokens=60), data_parallel_rank=0) for n in range(50)]
        began_s = anyio.current_time()

        async def check(timeout_s: float) -> None:
            health = await client.health("rpc", timeout_s=timeout_s)
            assert anyio.current_time() - began_s == pytest.approx(timeout_s, abs=0.01)
            assert ([rank.verdict for rank in health.ranks], health.silent) == (["healthy", "silent"], (1,))
            with pytest.raises(EngineUnresponsiveError, match=r"1 \(silent\)"):
                health.raise_unhealthy()

        async with anyio.create_task_group() as tasks:
            for timeout_s in (0.1, 0.2, 0.5):
                tasks.start_soon(check, timeout_s)
        for n, stream in enumerate(streams):
            assert [token async for out in stream for token in out.token_ids] == expected_tokens([n], 60)


class _Moments(trio.abc.Instrument):
    """When anything ran at all."""

    def __init__(self) -> None:
        self.seen: set[float] = set()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seen.add(trio.current_time())


@pytest.mark.case("K43")
async def test_an_idle_client_wakes_up_less_than_once_a_second() -> None:
    """All of it, its signs of life and an engine in the same loop included; with a request that waits, too."""
    scripted = ScriptedTwin(Script(requests=(RequestRule(silent=True),)))
    moments = _Moments()
    async with EngineClient(engine=scripted.engine) as client:
        for streams in (0, 1):
            waiting = [await client.submit([1], LONG, timeout_s=3000.0) for _ in range(streams)]
            await anyio.sleep(1)
            trio.lowlevel.add_instrument(moments)
            await anyio.sleep(1000)
            trio.lowlevel.remove_instrument(moments)
            assert len(moments.seen) < 1000
            moments.seen.clear()
            for stream in waiting:
                stream.close_nowait()
