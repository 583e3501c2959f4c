"""An engine dies at each message of a session in turn, is started again, and no consumer sees a difference.

In memory, so that every point is cheap. The judge is the scripted engine's own rule for its tokens: what was received
before a death is a prefix of the one answer, what comes behind it is the answer to prompt and prefix together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import anyio
import pytest
from incarnations import Incarnations

from anyengine import ClientState, EngineClient, EngineDeadError, RankState, RestartPolicy, SamplingParams
from anyengine.testing.scripted import Fault, Script, expected_tokens

pytestmark = pytest.mark.anyio

REPLAY = RestartPolicy(backoff_s=0, in_flight="replay")
GREEDY = SamplingParams(max_tokens=4, temperature=0)
PROMPTS = [[number, number + 1] for number in range(1, 5)]


def is_continuous(prompt: list[int], tokens: list[int]) -> bool:
    """Whether ``tokens`` is one answer, cut at one place at most and gone on with from there."""
    count = len(tokens)
    return any(
        tokens == expected_tokens(prompt, cut) + expected_tokens(prompt + tokens[:cut], count - cut)
        for cut in range(count + 1)
    )


def faults() -> Iterator[Fault]:
    """Every message of the session behind the start; more than it has."""
    for when in ("before", "after"):
        for nth in range(2, 9):
            yield Fault(do="kill", direction="in", nth=nth, when=when)
        for nth in range(4, 10):
            yield Fault(do="kill", direction="out", nth=nth, when=when)
            yield Fault(do="dead_exit", direction="out", nth=nth, when=when)


async def settled(client: EngineClient) -> None:
    """Until the engine answers calls: it may have died just now, or be about to."""
    for _ in range(3):
        with suppress(EngineDeadError):
            assert await client.core.utility("is_sleeping") is False


async def answer(client: EngineClient, prompt: list[int], found: dict[int, list[int]]) -> None:
    tokens: list[int] = []
    async for output in client.generate(prompt, GREEDY):
        tokens += output.token_ids
    found[prompt[0]] = tokens


async def end_of(client: EngineClient, prompt: list[int], ends: list[str | None]) -> None:
    try:
        *_, last = [output async for output in client.generate(prompt, GREEDY)]
        ends.append(last.finish_reason)
    except EngineDeadError:
        ends.append("dead")


@pytest.mark.feature("L28")
@pytest.mark.feature("L31")
async def test_a_death_at_each_message_is_seen_by_nobody() -> None:
    restarts = 0
    for fault in faults():
        engine = Incarnations(Script(faults=(fault,)), Script())
        found: dict[int, list[int]] = {}
        with anyio.fail_after(20):
            async with EngineClient(engine=engine.engine, restart=REPLAY) as client:
                async with anyio.create_task_group() as consumers:
                    for prompt in PROMPTS:
                        consumers.start_soon(answer, client, prompt, found)
                await settled(client)
                assert client.statistics()["requests_in_flight"] == 0
                assert client._entered_desk().resubmissions.waiting() == []
                restarts += client.statistics()["restarts"]
        assert {first: is_continuous(PROMPTS[first - 1], tokens) for first, tokens in found.items()} == dict.fromkeys(
            range(1, 5), True
        ), (fault, found)
        assert all(len(tokens) == 4 for tokens in found.values()), (fault, found)
        assert len(set(engine.added())) == len(engine.added()), "an id was used twice"
    assert restarts >= 20  # of 38 points; what lies behind the end of the session is not reached


@pytest.mark.feature("L28")
async def test_an_engine_that_always_dies_is_given_up_and_everybody_is_told() -> None:
    """At whatever message: all requests end, with tokens or with the reason, and the client with the history."""
    for nth in range(2, 6):
        engine = Incarnations(Script(faults=(Fault(do="kill", direction="in", nth=nth),)))
        ends: list[str | None] = []
        with anyio.fail_after(20):
            async with EngineClient(engine=engine.engine, restart=REPLAY) as client:
                async with anyio.create_task_group() as consumers:
                    for prompt in PROMPTS:
                        consumers.start_soon(end_of, client, prompt, ends)
                while client.state is not ClientState.DEAD:
                    with suppress(EngineDeadError):
                        await client.core.utility("is_sleeping")
                    await anyio.lowlevel.checkpoint()
                death = await client.wait_dead()
                assert len(death.history) == 3 and engine.starts == 4
        assert len(ends) == 4, ends


async def test_of_three_ranks_each_is_started_again_for_itself() -> None:
    dying = [
        Incarnations(Script(faults=(Fault(do="kill", direction="in", nth=4 + rank),)), Script()) for rank in range(3)
    ]
    found: dict[int, list[int]] = {}
    with anyio.fail_after(20):
        async with EngineClient(engine=[one.engine for one in dying], restart=REPLAY) as client:
            async with anyio.create_task_group() as consumers:
                for number in range(1, 30):
                    consumers.start_soon(answer, client, [number, number + 1], found)
            async for event in client.events():
                if set(event.ranks.values()) == {RankState.READY}:
                    break
            assert client.ranks == (0, 1, 2)
            assert all(is_continuous([first, first + 1], tokens) for first, tokens in found.items())
            assert [one.starts for one in dying] == [2, 2, 2] and client.statistics()["restarts"] == 3


async def test_a_client_that_is_left_finishes_what_is_being_replayed() -> None:
    """It is in flight, although no engine has it: draining waits for it, and nothing new is taken meanwhile."""
    engine = Incarnations(Script(faults=(Fault(do="kill", direction="out", nth=6),)), Script(step_interval_s=0.01))
    found: dict[int, list[int]] = {}
    with anyio.fail_after(20):
        async with anyio.create_task_group() as consumers:
            async with EngineClient(engine=engine.engine, restart=REPLAY, drain_timeout_s=15) as client:
                consumers.start_soon(answer, client, [3, 4], found)
                async for event in client.events():
                    if event.state is ClientState.RESTARTING:
                        break
        report = client.shutdown_report
    assert len(found[3]) == 4 and is_continuous([3, 4], found[3])
    assert report is not None and (report.in_flight_requests, report.aborted_requests) == (1, 0)
