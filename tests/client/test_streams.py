"""Request streams: every exit is an exit; the engine sees exactly one abort; nothing is lost and nothing stays."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from engines import misbehaving, toy

from anyengine import EngineClient, OutputProcessingError, RequestOutput, RequestStream, SamplingParams
from anyengine.testing.scripted import Script, ScriptedTwin
from anyengine.testing.scripted import expected_tokens as twin_tokens
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=1500)


async def engine_statistics(client: EngineClient) -> dict[str, int]:
    """The engine's own counters. The call is a fence: every abort written before it has been taken."""
    statistics: dict[str, int] = await client.core.utility("get_engine_statistics")
    return statistics


async def assert_aborted(client: EngineClient, count: int) -> None:
    statistics = await engine_statistics(client)
    assert (statistics["aborts_received"], statistics["unknown_aborts"]) == (count, 0)
    assert statistics["num_running_requests"] + statistics["num_waiting_requests"] == 0
    assert client.statistics()["requests_in_flight"] == 0


async def leave_by_break(client: EngineClient) -> None:
    async with client.generate([1], LONG) as stream:
        async for _ in stream:
            break


async def leave_by_exception(client: EngineClient) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.generate([1], LONG) as stream:
            async for _ in stream:
                raise ZeroDivisionError


async def leave_by_aclose(client: EngineClient) -> None:
    stream = client.generate([1], LONG)
    await anext(stream)
    await stream.aclose()
    assert [out async for out in stream] == []


async def leave_by_timeout(client: EngineClient) -> None:
    with anyio.move_on_after(0.05):
        async for _ in client.generate([1], LONG):
            pass


async def leave_by_scope(client: EngineClient) -> None:
    with anyio.CancelScope() as scope:
        async for _ in client.generate([1], LONG):
            scope.cancel()
    assert scope.cancelled_caught


async def leave_by_abort(client: EngineClient) -> None:
    stream = client.generate([1], LONG)
    tokens = (await anext(stream)).token_ids
    stream.abort()
    stream.abort()
    rest = [out async for out in stream]
    assert [out.finish_reason for out in rest] == ["abort"]
    tokens += rest[0].token_ids
    assert tokens == expected_tokens([1], len(tokens))
    assert rest[0].num_output_tokens == len(tokens)


async def leave_by_wire_id(client: EngineClient) -> None:
    """By the low-level client, which knows no streams."""
    stream = client.generate([1], LONG)
    tokens = (await anext(stream)).token_ids
    (wire_id,) = client.core.session.connection.requests.live
    client.core.abort(wire_id)
    rest = [out async for out in stream]
    assert [out.finish_reason for out in rest] == ["abort"]
    assert tokens + rest[0].token_ids == expected_tokens([1], rest[0].num_output_tokens)


EXITS = [
    leave_by_break, leave_by_exception, leave_by_aclose, leave_by_timeout, leave_by_scope, leave_by_abort,
    leave_by_wire_id,
]  # fmt: skip


@pytest.mark.feature("L08", "L09")
@pytest.mark.parametrize("leave", EXITS, ids=lambda leave: leave.__name__)
async def test_every_exit_is_the_same_abort_exactly_once(leave: Any) -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.005)) as client:
            await leave(client)
            await assert_aborted(client, 1)
            out = [t async for out in client.generate([2], SamplingParams(max_tokens=3)) for t in out.token_ids]
            assert out == expected_tokens([2], 3)


@pytest.mark.feature("L09")
async def test_a_dropped_stream_is_aborted_and_reported() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.005)) as client:
            with pytest.warns(ResourceWarning, match="was dropped"):
                async for _ in client.generate([1], LONG):
                    break
                gc.collect()
            while client.statistics()["requests_in_flight"]:
                await anyio.lowlevel.checkpoint()
            await assert_aborted(client, 1)


@pytest.mark.feature("L08")
async def test_no_abort_after_the_end() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            async with client.generate([1], SamplingParams(max_tokens=3)) as stream:
                assert [out async for out in stream][-1].finish_reason == "length"
                stream.abort()
            await stream.aclose()
            await assert_aborted(client, 0)


@pytest.mark.feature("L08")
async def test_cancellation_at_every_scheduling_step(anyio_backend_name: str) -> None:
    """Cancel a request's task after its 0th, 1st, 2nd … turn until it completes uncancelled; check the invariants
    each time."""
    with anyio.fail_after(120):
        async with EngineClient(engine=toy(step_delay_s=0.001)) as client:
            neighbour = await client.submit([9], SamplingParams(max_tokens=1500))
            completed = False
            turns = 0
            while not completed:
                before = await engine_statistics(client)
                tokens: list[int] = []
                stream = client.generate([5], SamplingParams(max_tokens=8))

                async def victim(tokens: list[int] = tokens, stream: RequestStream = stream) -> None:
                    nonlocal completed
                    async for out in stream:
                        tokens += out.token_ids
                    completed = True

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(victim)
                    for _ in range(turns):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                after = await engine_statistics(client)
                added = after["adds_received"] - before["adds_received"]
                aborted = after["aborts_received"] - before["aborts_received"]
                assert tokens == expected_tokens([5], len(tokens))
                assert client.statistics()["requests_in_flight"] == 1  # the neighbour
                # Exactly one abort, or none because it was never sent or had finished (perhaps with its last output
                # still untaken).
                finished = (
                    stream._completions is not None and stream._completions._all[0].state.finish_reason == "length"
                )
                assert aborted == (0 if finished else added), (turns, added, aborted)
                assert finished or not completed
                assert after["num_running_requests"] + after["num_waiting_requests"] == 1
                turns += 1 if turns < 12 else turns  # every early turn, then ever later ones
            rest = neighbour
            first = (await anext(rest)).token_ids
            assert first == expected_tokens([9], len(first))  # merged since the consumer was slow, and whole
            await rest.aclose()


@pytest.mark.feature("L11")
async def test_late_outputs_are_dropped_and_counted() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("late_outputs", "5")) as client:
            stream = client.generate([1], SamplingParams(max_tokens=10))
            assert (await anext(stream)).token_ids == [5]
            stream.abort()
            last = await anext(stream)
            assert (last.finish_reason, last.token_ids) == ("abort", [])
            assert await client.core.utility("anything") == "done"  # behind the five late outputs
            assert client.statistics()["late_outputs"] == 5


async def test_the_engine_sees_one_abort_frame_and_nothing_else(tmp_path: Path) -> None:
    """What goes over the wire, read by an independent peer."""
    path = tmp_path / "received"
    with anyio.fail_after(30):
        async with EngineClient(engine=misbehaving("record", str(path))) as client:
            async with client.generate(
                [1, 2], SamplingParams(max_tokens=10, temperature=0.0), request_id="mine"
            ) as stream:
                await anext(stream)
            await client.core.utility("is_sleeping")
    messages = [json.loads(line) for line in (await anyio.Path(path).read_text()).splitlines()]
    assert [kind for kind, _ in messages] == ["add", "abort", "utility"]
    add, abort = messages[0][1], messages[1][1]
    assert abort == [add[0]]
    assert add[0].startswith("mine-") and add[16] == "mine"
    assert add[1] == [1, 2]
    assert (add[3]["temperature"], add[3]["max_tokens"]) == (0.0, 10)


async def test_abort_by_label_returns_behind_a_fence() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.005)) as client:
            streams = [await client.submit([n], LONG, request_id="x") for n in range(3)]
            other = await client.submit([9], SamplingParams(max_tokens=5))
            assert len(await client.abort("x")) == 3
            assert await client.abort("x") == ()
            for stream in streams:
                assert [out.finish_reason async for out in stream][-1] == "abort"
            assert [t async for out in other for t in out.token_ids] == expected_tokens([9], 5)
            await assert_aborted(client, 3)


async def test_close_gives_every_consumer_a_final_item() -> None:
    reasons: list[str | None] = []

    async def consume(client: EngineClient, first: int) -> None:
        async for out in client.generate([first], LONG):
            last = out
        reasons.append(last.finish_reason)

    with anyio.fail_after(30):
        async with anyio.create_task_group() as elsewhere:
            async with EngineClient(engine=toy(step_delay_s=0.005)) as client:
                for first in range(10):
                    elsewhere.start_soon(consume, client, first)
                while client.statistics()["requests_in_flight"] < 10:
                    await anyio.lowlevel.checkpoint()
    assert reasons == ["abort"] * 10


async def test_two_tasks_cannot_iterate_one_stream() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.05)) as client:
            async with client.generate([1], LONG) as stream, anyio.create_task_group() as tasks:

                async def iterate() -> None:
                    async for _ in stream:
                        pass

                tasks.start_soon(iterate)
                while not stream._busy:
                    await anyio.lowlevel.checkpoint()
                with pytest.raises(anyio.BusyResourceError):
                    await anext(stream)
                tasks.cancel_scope.cancel()


async def test_a_cancelled_wait_inside_a_block_loses_nothing() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.003)) as client:
            tokens: list[int] = []
            cancelled = 0
            async with client.generate([1], SamplingParams(max_tokens=60)) as stream:
                finished = False
                while not finished:
                    with anyio.move_on_after(0.002) as scope:
                        out = await anext(stream)
                        tokens += out.token_ids
                        finished = out.finished
                    cancelled += scope.cancelled_caught
            assert tokens == expected_tokens([1], 60)
            assert cancelled > 0
            await assert_aborted(client, 0)


async def test_trouble_with_one_requests_text_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rule 5: one detokenizer fails on its third call; the request is aborted, its neighbour is untouched."""

    class Failing:
        calls = 0

        def push(self, token_ids: list[int]) -> str:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("a broken vocabulary")
            return "x"

        def finish(self) -> str:
            return ""

    with anyio.fail_after(30):
        async with EngineClient(engine=toy(step_delay_s=0.005)) as client:
            stream = await client.submit([1], LONG)
            assert stream._completions is not None
            stream._completions._all[0]._detokenizer = Failing()
            neighbour = await client.submit([2], SamplingParams(max_tokens=20))
            with pytest.raises(OutputProcessingError) as caught:
                async for _ in stream:
                    pass
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert [t async for out in neighbour for t in out.token_ids] == expected_tokens([2], 20)
            await assert_aborted(client, 1)


@pytest.mark.parametrize("how", ["busy", "cancelled"])
async def test_a_final_that_is_refused_leaves_the_stream_as_it_was(how: str) -> None:
    items: list[RequestOutput] = []
    scripted = ScriptedTwin(Script(step_interval_s=0.002))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            async with client.generate([1], SamplingParams(max_tokens=20)) as stream:

                async def iterate() -> None:
                    items.extend([item async for item in stream])

                if how == "busy":
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(iterate)
                        while not stream._busy:
                            await anyio.lowlevel.checkpoint()
                        with pytest.raises(anyio.BusyResourceError):
                            await stream.final()
                else:
                    with anyio.CancelScope() as scope:
                        scope.cancel()
                        await stream.final()
                    assert scope.cancelled_caught
                    await iterate()
    assert len(items) > 1
    assert [token for item in items for token in item.token_ids] == twin_tokens([1], 20)
