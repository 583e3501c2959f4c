"""Slow consumers merge exactly and hold up nobody; large batches are taken in slices."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import sniffio

from anyengine import EngineClient, SamplingParams
from anyengine._client.requests import output_processor
from anyengine._client.requests.output_processor import OutputProcessor
from anyengine._client.requests.state import RequestState
from anyengine._client.session.wakeup import make_parker
from anyengine._wire import EngineCoreOutput, EngineCoreOutputs
from anyengine.testing.scripted import Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=2000)


@pytest.mark.feature("L19")
@pytest.mark.parametrize(("tokens_per_frame", "num_peers"), [(1, 20), (7, 100)])
async def test_a_slow_consumer_gets_one_merged_piece_and_its_peers_every_token(
    tokens_per_frame: int, num_peers: int
) -> None:
    scripted = ScriptedTwin(Script(tokens_per_frame=tokens_per_frame, step_interval_s=0.0005))
    limit = SamplingParams(max_tokens=200)
    items: dict[int, list[int]] = {}
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            slow = await client.submit([99], limit)
            assert slow.lag == 0

            async def consume(n: int) -> None:
                outputs = [out.token_ids async for out in client.generate([n], limit)]
                assert [token for ids in outputs for token in ids] == expected_tokens([n], 200)
                items[n] = [len(ids) for ids in outputs]

            async with anyio.create_task_group() as tasks:
                for n in range(num_peers):
                    tasks.start_soon(consume, n)
                first = await anext(slow)
                taken = list(first.token_ids)
                while slow.lag < 50:
                    await anyio.lowlevel.checkpoint()
                lag = slow.lag
                merged = await anext(slow)  # a boundary in the middle of the stream: nothing twice, nothing missing
                assert len(merged.token_ids) == lag and slow.lag == 0
                taken += merged.token_ids
                assert taken == expected_tokens([99], len(taken))
            assert slow.lag == 200 - len(taken)
            last = await anext(slow)
            assert (taken + last.token_ids, last.finish_reason) == (expected_tokens([99], 200), "length")
            assert last.num_output_tokens == 200
    for lengths in items.values():
        assert max(lengths) <= 20 * tokens_per_frame  # they were woken all along
    assert len(items) == num_peers


@pytest.mark.feature("L19")
async def test_what_a_stalled_consumer_holds_is_its_tokens_alone() -> None:
    """Merged into one list: a token costs what an int in a list costs, however many outputs brought it."""
    state = RequestState("w", "r", make_parker())

    def arrive(count: int) -> None:
        for token in range(count):
            state.push(EngineCoreOutput("w", [token % 200]))  # small ints are shared

    arrive(1000)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        arrive(50_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 50_000 < 12


class _Count:
    """A consumer."""

    def __init__(self) -> None:
        self.outputs = 0

    def push(self, output: EngineCoreOutput) -> None:
        self.outputs += 1

    def fail(self, error: BaseException) -> None: ...

    def aborted(self) -> None: ...


@pytest.mark.feature("L35")
async def test_a_batch_of_4096_rows_lets_others_run_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in rows: never more than a slice of them between two turns of another task."""
    monkeypatch.setattr(output_processor, "_SLICE_S", math.inf)  # a slow machine would only make the slices smaller
    scripted = ScriptedTwin()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            consumer, session = _Count(), client.core.session
            for n in range(4096):
                session.connection.requests.open(f"w{n}", 0, consumer)
            gaps: list[int] = []

            async def tick() -> None:
                seen = 0
                while consumer.outputs < 4096:
                    await anyio.lowlevel.checkpoint()
                    gaps.append(consumer.outputs - seen)
                    seen = consumer.outputs

            batch = EngineCoreOutputs(engine_index=0, outputs=[EngineCoreOutput(f"w{n}", [1]) for n in range(4096)])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tick)
                await anyio.lowlevel.checkpoint()
                session.feed.send_nowait(batch)
            assert sum(gaps) == 4096
            assert max(gaps) <= 2 * 256  # on asyncio two slices may fall between two of its turns
            session.connection.requests.fail_all(RuntimeError())


@pytest.mark.feature("L35")
async def test_time_ends_a_slice_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_processor, "_SLICE_S", 0.0)
    slices: list[int] = []
    work = OutputProcessor._work_for_a_slice

    def counted(processor: OutputProcessor) -> None:
        work(processor)
        slices.append(processor._rows_done)

    monkeypatch.setattr(OutputProcessor, "_work_for_a_slice", counted)
    scripted = ScriptedTwin()
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            got = [token async for out in client.generate([1], SamplingParams(max_tokens=9)) for token in out.token_ids]
            assert got == expected_tokens([1], 9)
    assert max(slices) == 1


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_what_is_left_of_a_batch_at_the_end_is_delivered(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is interrupted between two slices of one batch."""
    monkeypatch.setattr(output_processor, "_SLICE_S", 0.0)
    scripted = ScriptedTwin()
    consumer = _Count()
    with anyio.fail_after(30), anyio.CancelScope() as scope:
        async with EngineClient(engine=scripted.engine) as client:
            session: Any = client.core.session
            for n in range(1000):
                session.connection.requests.open(f"w{n}", 0, consumer)
            batch = EngineCoreOutputs(engine_index=0, outputs=[EngineCoreOutput(f"w{n}", [1]) for n in range(1000)])
            session.feed.send_nowait(batch)
            while not consumer.outputs:
                await anyio.lowlevel.checkpoint()
            assert consumer.outputs < 1000
            if how == "cancel":
                scope.cancel()
                await anyio.lowlevel.checkpoint()
    assert consumer.outputs == 1000


@pytest.mark.case("K72")
@pytest.mark.parametrize("how", ["many tasks", "one task", "a group"])
async def test_a_burst_of_requests_lets_others_run_in_between(how: str) -> None:
    """Counted in requests: never more than a few between two turns of another task; sent in order."""
    count = 300
    scripted = ScriptedTwin()
    params = SamplingParams(max_tokens=1)
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            await anext(await client.submit([0], params))
            requests = client.core.session.connection.requests
            gaps: list[int] = []

            async def tick() -> None:
                seen = 1
                while seen < count:
                    await anyio.lowlevel.checkpoint()
                    sent = requests.num_ended + len(requests)
                    gaps.append(sent - seen)
                    seen = sent

            async def answer(n: int) -> None:
                await anext(await client.submit([n], params))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(tick)
                await anyio.lowlevel.checkpoint()
                if how == "many tasks":
                    for n in range(1, count):
                        tasks.start_soon(answer, n)
                elif how == "one task":
                    streams = [await client.submit([n], params) for n in range(1, count)]
                    for stream in streams:
                        await anext(stream)
                else:
                    _ = [one async for one in client.generate_many([[n] for n in range(1, count)], params)]
            assert sum(gaps) == count - 1
            assert max(gaps) <= 3 * 8
    sent = [add[1][0] for add in scripted.received("add")]
    in_order = how != "many tasks" or sniffio.current_async_library() != "trio"  # which starts tasks in any order
    assert (sent if in_order else sorted(sent)) == list(range(count))
