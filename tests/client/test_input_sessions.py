"""Prompts in parts: one request, an answer to each part, and every way out leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
from memory_engines import in_loop

from anyengine import (
    ClientClosedError,
    EngineClient,
    EngineDeadError,
    InputSession,
    OutputKind,
    OutputProcessingError,
    RequestFailed,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    StreamingInput,
)
from anyengine._client.requests.completion import Completion
from anyengine._wire import EngineCoreOutput, EngineCoreOutputs
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

one_loop = pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"])

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


@one_loop
@pytest.mark.parametrize("end", ["end", "feed nothing", "leave", "close", "die"])
async def test_who_waits_for_an_answer_before_the_first_part_hears_of_the_end(end: str) -> None:
    fault = Fault(do="kill", direction="in", kind="utility", nth=1)
    outcome: list[object] = []

    async def nothing() -> AsyncIterator[Any]:
        for part in ():
            yield part

    async def iterate() -> None:
        try:
            outcome.append([item async for item in session])
        except EngineDeadError as exc:
            outcome.append(type(exc))

    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(faults=(fault,))).engine) as client:
            session = client.input_session(FOUR)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(iterate)
                await anyio.wait_all_tasks_blocked()
                if end == "end":
                    session.end()
                elif end == "feed nothing":
                    await session.feed(nothing())
                elif end == "leave":
                    session.close_nowait()
                elif end == "close":
                    await client.aclose()
                else:
                    with pytest.raises(EngineDeadError):
                        await client.is_paused()
    assert outcome == [{"close": ClientClosedError, "die": EngineDeadError}.get(end, [])]


async def test_who_waits_before_the_first_part_gets_its_answer() -> None:
    items: list[RequestOutput] = []

    async def iterate() -> None:
        items.extend([item async for item in session])

    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script()).engine) as client:
            async with client.input_session(FOUR) as session, anyio.create_task_group() as tasks:
                tasks.start_soon(iterate)
                await anyio.wait_all_tasks_blocked()
                with pytest.raises(anyio.BusyResourceError):
                    await anext(session)
                await session.send([1, 2])
                session.end()
            assert ids(items) == expected_tokens([1, 2], 4)


def test_making_one_needs_no_loop() -> None:
    async def talk() -> list[RequestOutput]:
        async with client, session:
            await session.send([1, 2])
            session.end()
            return [item async for item in session]

    for backend in ("asyncio", "trio"):
        client = EngineClient(engine=ScriptedTwin(Script()).engine)
        session = client.input_session(FOUR)
        assert ids(anyio.run(talk, backend=backend)) == expected_tokens([1, 2], 4)
    unused = client.input_session(FOUR)
    unused.end()
    unused.close_nowait()


@one_loop
@pytest.mark.parametrize("which", ["idle", "one part", "two parts"])
async def test_a_pause_that_aborts_ends_it(which: str) -> None:
    """The engine forgets all of it: the parts that wait, and a session that waits for a part."""
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    params = FOUR if which == "idle" else SamplingParams(max_tokens=1900)
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client, client.input_session(params) as session:
            await session.send([1])
            if which == "two parts":
                await session.send([2])
            await (part_of(session) if which == "idle" else anext(session))
            await client.pause_generation(mode="abort")
            await client.resume_generation()
            with pytest.raises(anyio.ClosedResourceError):
                await session.send([3])
            reasons = [item.finish_reason async for item in session]
            assert reasons == ["abort"] * {"idle": 0, "one part": 1, "two parts": 2}[which]
            assert client.stats().in_flight == 0
            await client.drain()


@one_loop
@pytest.mark.parametrize("idle", [False, True])
async def test_a_pause_by_somebody_else_is_an_error(idle: bool) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(step_interval_s=0.001)).engine) as client:
            session = client.input_session(FOUR if idle else SamplingParams(max_tokens=1900))
            await session.send([1])
            await (part_of(session) if idle else anext(session))
            await client.core.utility("pause_scheduler", "abort", True)
            with pytest.raises(RequestFailed, match="nobody asked for here"):
                while True:
                    await anext(session)
            with pytest.raises(RequestFailed, match="nobody asked for here"):
                await session.send([2])
            assert client.stats().in_flight == 0


@one_loop
async def test_an_output_between_two_parts_ends_it() -> None:
    """Nobody asked for it, so nothing that follows can be trusted."""
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script()).engine) as client:
            session = client.input_session(FOUR)
            await session.send([1])
            await part_of(session)
            outcome: list[BaseException] = []

            async def iterate() -> None:
                with pytest.raises(OutputProcessingError, match="behind the answer") as caught:
                    await anext(session)
                outcome.append(caught.value)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(iterate)
                await anyio.wait_all_tasks_blocked()
                assert session.wire_id is not None
                surplus = EngineCoreOutput(session.wire_id, [7])
                client.core.session.feed.send_nowait(EngineCoreOutputs(engine_index=0, outputs=[surplus]))
            assert len(outcome) == 1
            with pytest.raises(OutputProcessingError):
                await session.send([2])
            assert client.stats().in_flight == 0


@one_loop
async def test_trouble_with_its_text_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            session = client.input_session(SamplingParams(max_tokens=1900), "x")
            await session.send([1])
            await session.send([2])
            await anext(session)
            with monkeypatch.context() as broken:
                broken.setattr(Completion, "_detokenize", lambda *_, **__: 1 / 0)
                broken.setattr(Completion, "_plain", property(lambda _: False), raising=False)
                with pytest.raises(OutputProcessingError, match="ZeroDivisionError") as caught:
                    await anext(session)
            assert caught.value.request_id == "x"
            assert caught.value.partial is not None and caught.value.partial.token_ids
            for _ in range(2):
                with pytest.raises(OutputProcessingError):
                    await anext(session)
                with pytest.raises(OutputProcessingError):
                    await session.send([3])
            assert client.stats().in_flight == 0
            await client.drain()
    assert scripted.received("abort") == [[session.wire_id]]
