"""Prompts in parts: one request, an answer to each part, and every way out leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from memory_engines import in_loop

from anyengine import (
    EngineClient,
    EngineDeadError,
    InputSession,
    OutputKind,
    RequestFailed,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    StreamingInput,
)
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

FOUR = SamplingParams(max_tokens=4)


async def part_of(session: InputSession) -> list[RequestOutput]:
    """The items up to the end of a part."""
    items = []
    async for item in session:
        items.append(item)
        if item.finish_reason is not None:
            break
    return items


def ids(items: list[RequestOutput]) -> list[int]:
    return [token for item in items for token in item.token_ids]


@pytest.mark.feature("C44")
@pytest.mark.parametrize("ahead", [False, True])
async def test_each_part_is_answered(ahead: bool) -> None:
    """Sent one after the other's answer, or all at once: frames of one id, to one rank, and a last one without a
    part."""
    engines = [ScriptedTwin(Script(step_interval_s=0.001)) for _ in range(2)]
    parts = [[1, 2], [3], [4, 5, 6]]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            async with client.input_session(FOUR, "label", priority=2) as session:
                assert session.wire_id is None
                answers = []
                for number, part in enumerate(parts):
                    await session.send(part, None if number else SamplingParams(max_tokens=2))
                    if not ahead:
                        answers.append(await part_of(session))
                session.end()
                while len(answers) < 3 and (items := await part_of(session)):
                    answers.append(items)
                assert [item async for item in session] == []
            await client.drain()
            assert client.stats().in_flight == 0 and client.stats().ended == 3
            wire_id = session.wire_id
    assert list(map(ids, answers)) == [expected_tokens(part, 4 if number else 2) for number, part in enumerate(parts)]
    assert [item.finished for items in answers for item in items].count(True) == (1 if ahead else 0)
    assert {item.request_id for items in answers for item in items} == {"label"}
    adds = engines[0].received("add") + engines[1].received("add")
    assert engines[1].received("add") == []
    assert [(add[0], add[1], add[15], add[13]) for add in adds] == [
        *((wire_id, part, True, 2) for part in parts),
        (wire_id, [0], False, 2),
    ]
    assert engines[0].received("abort") == []


@pytest.mark.feature("C44")
async def test_an_input_stream_is_fed() -> None:
    """What it raises is raised as it is, and nothing is left in the engine."""
    scripted = ScriptedTwin(Script(step_interval_s=0.001))

    async def parts(fails: bool) -> AsyncIterator[Any]:
        yield [1, 2]
        yield StreamingInput([3], SamplingParams(max_tokens=2))
        if fails:
            raise ZeroDivisionError("the microphone")

    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            async with client.input_session(FOUR) as session, anyio.create_task_group() as tasks:
                tasks.start_soon(session.feed, parts(fails=False))
                items = [item async for item in session]
            assert ids(items) == expected_tokens([1, 2], 4) + expected_tokens([3], 2)
            with pytest.raises(ZeroDivisionError):
                async with client.input_session(SamplingParams(max_tokens=1900)) as session:
                    await session.feed(parts(fails=True))
            await client.drain()
            assert client.stats().in_flight == 0
    assert scripted.received("abort") == [[session.wire_id]]


@pytest.mark.feature("C44")
@pytest.mark.parametrize("way", ["break", "cancel", "exception", "idle"])
async def test_leaving_aborts(way: str) -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    params = FOUR if way == "idle" else SamplingParams(max_tokens=1900)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with anyio.CancelScope() as scope:
                try:
                    async with client.input_session(params) as session:
                        await session.send([1])
                        if way == "idle":  # the engine waits for a part, and holds memory
                            await part_of(session)
                        else:
                            await anext(session)
                        if way == "cancel":
                            scope.cancel()
                            await anyio.lowlevel.checkpoint()
                        if way == "exception":
                            raise ZeroDivisionError
                except ZeroDivisionError:
                    pass
            with pytest.raises(anyio.ClosedResourceError):
                await session.send([2])
            assert [item.finish_reason async for item in session] == ([] if way == "idle" else ["abort"])
            await client.drain()
            assert client.stats().in_flight == 0
    assert scripted.received("abort") == [[session.wire_id]]


async def test_an_abort_by_label_ends_it() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(step_interval_s=0.001)).engine) as client:
            session = client.input_session(SamplingParams(max_tokens=1900), "x")
            await session.send([1])
            await session.send([2])
            first = await anext(session)
            assert await client.abort("x") == (session.wire_id,)
            items = [first] + [item async for item in session]
            assert [item.finish_reason for item in items if item.finish_reason] == ["abort", "abort"]
            assert items[-1].finished


async def test_an_error_ends_all_of_it() -> None:
    """The parts behind it have no answer, and the engine is told to forget the request."""
    scripted = ScriptedTwin(Script(requests=(RequestRule(after_tokens=2, finish="error"),), step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            session = client.input_session(FOUR, "x")
            await session.send([1])
            await session.send([2])
            taken = []
            with pytest.raises(RequestFailed) as caught:
                while True:
                    taken.append(await anext(session))
            assert caught.value.request_id == "x" and ids(taken) == expected_tokens([1], 2)
            for _ in range(2):
                with pytest.raises(RequestFailed):
                    await session.send([3])
                with pytest.raises(RequestFailed):
                    await anext(session)
            await client.drain()
            assert client.stats().in_flight == 0
    assert scripted.received("abort") == [[session.wire_id]]


async def test_the_death_of_the_engine_between_two_parts() -> None:
    fault = Fault(do="kill", direction="in", kind="utility", nth=2)
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(faults=(fault,))).engine) as client:
            session = client.input_session(FOUR)
            await session.send([1])
            await part_of(session)
            with pytest.raises(EngineDeadError):
                await client.is_paused()
            with pytest.raises(EngineDeadError):
                await anext(session)
            with pytest.raises(EngineDeadError):
                await session.send([2])


@pytest.mark.parametrize("idle", [False, True])
async def test_one_that_is_dropped_is_aborted(idle: bool) -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            session = client.input_session(FOUR if idle else SamplingParams(max_tokens=1900))
            await session.send([1])
            await (part_of(session) if idle else anext(session))
            wire_id = session.wire_id
            with pytest.warns(ResourceWarning, match="dropped before it had ended"):
                del session
                gc.collect()
            while client.stats().in_flight:
                await anyio.lowlevel.checkpoint()
            await client.drain()
    assert scripted.received("abort") == [[wire_id]]


async def test_what_cannot_be_done_in_parts_is_refused() -> None:
    scripted = ScriptedTwin(Script(registration={"max_model_len": 20}))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            for params in (
                SamplingParams(n=2),
                SamplingParams(output_kind=OutputKind.FINAL_ONLY),
                SamplingParams(stop=["x"]),
            ):
                with pytest.raises(RequestRejected, match=r"in parts|no end"):
                    client.input_session(params)
            async with client.input_session(FOUR) as session:
                with pytest.raises(RequestRejected, match="in parts"):
                    await session.send([1], SamplingParams(n=2))
                await session.send([1] * 8)
                await part_of(session)
                with pytest.raises(RequestRejected, match="room for 7"):
                    await session.send([1] * 8)
                await session.send([1] * 7)
                session.end()
                session.end()
                with pytest.raises(anyio.ClosedResourceError):
                    await session.send([1])
                assert len([item async for item in session]) > 0
            empty = client.input_session(FOUR)
            empty.end()
            assert [item async for item in empty] == []
    assert len(scripted.received("add")) == 3


async def test_our_own_engine_says_that_it_cannot() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=in_loop()) as client:
            async with client.input_session(FOUR) as session:
                await session.send([1])
                with pytest.raises(RequestFailed, match="resumable"):
                    await anext(session)
