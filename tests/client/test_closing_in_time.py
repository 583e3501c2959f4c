"""A close takes as long as it may, and no longer: in virtual time, which goes by what is waited for alone."""

from __future__ import annotations

import gc
import time
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import trio.testing

from anyengine import ClientState, EngineClient, RequestStream, SamplingParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=2000)
STREAMS = 20
ENGINES = {
    "polite": Script(step_interval_s=0.01),
    "slow to end": Script(step_interval_s=0.01, shutdown_delay_s=2.0),
    "deaf to SIGTERM": Script(step_interval_s=0.01, ignore_sigterm=True),
    "silent": Script(requests=(RequestRule(silent=True),), ignore_sigterm=True),
}


@pytest.fixture
def anyio_backend() -> Any:
    """Trio with a clock that jumps to the next deadline as soon as everybody waits."""
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


class Consumers:
    """What each of the streams was given, and when."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str | None] = {}
        self.ended_s = 0.0

    async def consume(self, number: int, stream: RequestStream) -> None:
        async for out in stream:
            self.tokens.setdefault(number, []).extend(out.token_ids)
            self.ends[number] = out.finish_reason
        self.ended_s = anyio.current_time()


@pytest.mark.case("K11")
@pytest.mark.feature("L15")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("drain_s", "grace_s"), [(0.0, 0.0), (0.5, 0.0), (0.0, 3.0), (1.0, 3.0)])
@pytest.mark.parametrize("again", [False, True], ids=["once", "cancelled meanwhile"])
async def test_it_is_over_within_the_grace_and_two_seconds(
    engine: str, drain_s: float, grace_s: float, again: bool
) -> None:
    """Whatever the engine ignores, and though somebody cancels it meanwhile; everyone has had one last item by then."""
    consumers = Consumers()
    client = EngineClient(
        engine=ScriptedTwin(ENGINES[engine]).engine, drain_timeout_s=drain_s, shutdown_grace_s=grace_s
    )
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            async with client:
                for number in range(STREAMS):
                    tasks.start_soon(consumers.consume, number, await client.submit([number], LONG))
                await anyio.sleep(0.1)
                if again:
                    scope.deadline = anyio.current_time() + drain_s + grace_s / 2
                began_s = anyio.current_time()
        took_s = anyio.current_time() - began_s
        await client.aclose()  # once more: long gone
        await anyio.lowlevel.checkpoint()
    assert took_s <= drain_s + grace_s + 2
    assert consumers.ended_s <= began_s + drain_s + 1
    assert consumers.ends == dict.fromkeys(range(STREAMS), "abort")
    for number, tokens in consumers.tokens.items():
        assert tokens == expected_tokens([number], len(tokens))
        assert bool(tokens) == (engine != "silent")
    assert client.state is ClientState.CLOSED


@pytest.mark.feature("L15")
async def test_what_can_finish_in_time_does() -> None:
    consumers = Consumers()
    client = EngineClient(engine=ScriptedTwin(ENGINES["polite"]).engine, drain_timeout_s=5)
    async with anyio.create_task_group() as tasks:
        async with client:
            for number in range(STREAMS):
                stream = await client.submit([number], SamplingParams(max_tokens=300))
                tasks.start_soon(consumers.consume, number, stream)
            began_s = anyio.current_time()
        assert anyio.current_time() - began_s < 6
    assert consumers.tokens == {number: expected_tokens([number], 300) for number in range(STREAMS)}
    assert set(consumers.ends.values()) == {"length"}


@pytest.mark.feature("L44")
async def test_a_drain_of_five_minutes_takes_a_tenth_of_a_second() -> None:
    """Of a processor: nobody polls."""
    consumers = Consumers()
    client = EngineClient(engine=ScriptedTwin(ENGINES["silent"]).engine, drain_timeout_s=300)
    async with anyio.create_task_group() as tasks:
        async with client:
            tasks.start_soon(consumers.consume, 0, await client.submit([1], LONG))
            gc.collect()  # not in between: it takes as long as the process is large
            began_s, began_cpu_s = anyio.current_time(), time.thread_time()
        assert 300 <= anyio.current_time() - began_s < 310
        assert time.thread_time() - began_cpu_s < 0.1
    assert consumers.ends == {0: "abort"}
