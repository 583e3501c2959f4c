"""Ways out of a request and of a call, beside others that must not notice."""

from __future__ import annotations

import gc
import os
import random
import signal
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from engines import misbehaving

from anyengine import (
    EngineClient,
    EngineCoreClient,
    EngineCoreRequest,
    OutputProcessingError,
    PoolingParams,
    RequestFailed,
    SamplingParams,
    Tensor,
    UtilityTimeout,
)
from anyengine._client.inputs.request_builder import RequestBuilder
from anyengine._client.requests.state import RequestState
from anyengine._wire import EngineCoreOutput, WireSamplingParams
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, UtilityRule, expected_tokens

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=2000)
one_loop = pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"])

# ------------------------------------------------------------------------------- before the first output


def open_in(scripted: ScriptedTwin) -> set[str]:
    """The wire ids that the engine has been told of, and not been told to abort."""
    aborted = {one for ids in scripted.received("abort") for one in ids}
    return {add[0] for add in scripted.received("add")} - aborted


@pytest.mark.case("K21")
async def test_cancelled_before_its_first_output_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits to be let in, is tokenized, is registered, is sent; neighbours stream on, byte for byte."""
    scripted = ScriptedTwin(Script(step_interval_s=0.002, requests=(RequestRule(first_token=5, silent=True),)))
    encode = RequestBuilder.encode

    async def slow(builder: RequestBuilder, *args: Any) -> Any:
        await anyio.lowlevel.checkpoint()
        return await encode(builder, *args)

    monkeypatch.setattr(RequestBuilder, "encode", slow)
    sent = set()
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=6, admission="wait") as client:
            neighbours = [await client.submit([n], SamplingParams(max_tokens=150)) for n in range(4)]
            blockers = [await client.submit([5], LONG) for _ in range(2)]
            for turns in range(36):
                stream = client.generate([5], LONG)
                with anyio.fail_after(1):
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(anext, stream)
                        for turn in range(turns):
                            await anyio.lowlevel.checkpoint()
                            if turn == turns // 2 and len(blockers) == 2:
                                blockers.pop().close_nowait()
                        tasks.cancel_scope.cancel()
                    await client.ping()  # the engine has read whatever was sent
                    sent.add(stream.wire_id is not None)
                    held = {blocker.wire_id for blocker in blockers} | {one.wire_id for one in neighbours}
                    assert open_in(scripted) <= held
                assert client.statistics()["requests_waiting"] == 0
                assert client._entered_desk().admission.tickets == {}
                if len(blockers) == 1:
                    blockers.append(await client.submit([5], LONG))
                assert client.statistics()["requests_in_flight"] <= 6
            for blocker in blockers:
                blocker.close_nowait()
            for n, neighbour in enumerate(neighbours):
                tokens = [token async for out in neighbour for token in out.token_ids]
                assert tokens == expected_tokens([n], 150)
            await client.drain()
    assert sent == {True, False}
    added = [add[0] for add in scripted.received("add")][4:]
    assert sorted(one for ids in scripted.received("abort") for one in ids) == sorted(added)  # each exactly once


# ---------------------------------------------------------------------------------- suspended at a yield


class _Boom(Exception):
    pass


async def _break(call: Callable[[], Any]) -> None:
    async with call() as stream:
        async for _ in stream:
            break


async def _raise(call: Callable[[], Any]) -> None:
    with pytest.raises(_Boom):
        async with call() as stream:
            async for _ in stream:
                raise _Boom


async def _aclose(call: Callable[[], Any]) -> None:
    stream = call()
    await anext(stream)
    await stream.aclose()


async def _timeout(call: Callable[[], Any]) -> None:
    with anyio.CancelScope() as scope:
        async for _ in call():
            scope.deadline = min(scope.deadline, anyio.current_time() + 0.01)
    assert scope.cancelled_caught


async def _drop(call: Callable[[], Any]) -> None:
    with pytest.warns(ResourceWarning, match="was dropped") as caught:
        async for _ in call():
            break
        gc.collect()
    assert len([one for one in caught if one.category is ResourceWarning]) == 1


@pytest.mark.case("K22")
@pytest.mark.parametrize("leave", [_break, _raise, _aclose, _timeout, _drop], ids=lambda leave: leave.__name__)
async def test_a_stream_that_is_left_at_a_yield(leave: Callable[[Any], Awaitable[None]]) -> None:
    scripted = ScriptedTwin(Script(step_interval_s=0.001))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with anyio.fail_after(1):
                await leave(lambda: client.generate([1], LONG))
                while client.statistics()["requests_in_flight"]:
                    await anyio.lowlevel.checkpoint()
                await client.ping()
                ((added, *_),) = scripted.received("add")
                assert scripted.received("abort") == [[added]]
            assert client._entered_desk().admission.tickets == {}
    assert scripted.received("abort") == [[added]]


@pytest.mark.case("K22")
@pytest.mark.parametrize("task", ["embed", "classify", "token_embed", "token_classify"])
@pytest.mark.parametrize("leave", ["scope", "raise", "timeout", "abort"])
async def test_a_pooling_call_that_is_left(leave: str, task: Any) -> None:
    scripted = ScriptedTwin(Script(tasks=(task,), requests=(RequestRule(silent=True),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:

            async def call() -> None:
                await client.encode([1], PoolingParams(task=task), request_id="one")

            with anyio.fail_after(1):
                if leave == "timeout":
                    async with anyio.create_task_group() as tasks:
                        scope = anyio.CancelScope()

                        async def call_in_scope() -> None:
                            with scope:
                                await call()

                        tasks.start_soon(call_in_scope)
                        while not scripted.scheduled():
                            await anyio.lowlevel.checkpoint()
                        scope.deadline = anyio.current_time() + 0.001
                    assert scope.cancelled_caught
                else:
                    ends: list[type[BaseException]] = []

                    async def note() -> None:
                        try:
                            await call()
                        except BaseException as exc:
                            ends.append(type(exc))
                            if not isinstance(exc, RequestFailed):
                                raise

                    with suppress(BaseExceptionGroup):
                        async with anyio.create_task_group() as tasks:
                            tasks.start_soon(note)
                            while not scripted.scheduled():
                                await anyio.lowlevel.checkpoint()
                            if leave == "scope":
                                tasks.cancel_scope.cancel()
                            elif leave == "raise":
                                raise _Boom
                            else:
                                await client.abort("one")
                    assert ends == [RequestFailed if leave == "abort" else anyio.get_cancelled_exc_class()]
                assert client.statistics()["requests_in_flight"] == 0
                await client.ping()
    ((added, *_),) = scripted.received("add")
    assert scripted.received("abort") == [[added]]


async def test_a_second_cancellation_during_clean_up_loses_nothing() -> None:
    """Whoever waits for the confirmation of an abort may be cancelled, again and again: it has been sent."""
    scripted = ScriptedTwin(Script(step_interval_s=0.001, utilities=(UtilityRule(method="is_sleeping", delay_s=0.01),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            streams = [await client.submit([n], LONG, request_id="x") for n in range(3)]
            with anyio.CancelScope() as outer:
                try:
                    outer.cancel()
                    await anext(streams[0])
                finally:
                    with anyio.CancelScope(shield=True) as shield:
                        shield.cancel()
                        await client.abort("x")
            assert outer.cancelled_caught
            assert client.statistics()["requests_in_flight"] == 0
            for stream in streams[1:]:
                assert [out.finish_reason async for out in stream][-1] == "abort"
            while client.statistics()["utility_calls_in_flight"]:  # the fence whose waiter has gone
                await anyio.lowlevel.checkpoint()
            await client.abort(await client.submit([9], LONG))
    ids = [add[0] for add in scripted.received("add")]
    aborted = [one for received in scripted.received("abort") for one in received]
    assert sorted(aborted) == sorted(ids)


# -------------------------------------------------------------------------------------------------- calls


@pytest.mark.case("K25")
@pytest.mark.feature("L13")
async def test_five_hundred_calls_are_given_up_beside_fifty_streams() -> None:
    late = UtilityRule(method="reset_mm_cache", do="reply", value=True, delay_s=0.2)
    scripted = ScriptedTwin(Script(step_interval_s=0.01, utilities=(late,)))
    limit = SamplingParams(max_tokens=10)
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:

            async def stream(n: int) -> None:
                tokens = [token async for out in client.generate([n], limit) for token in out.token_ids]
                assert tokens == expected_tokens([n], 10)

            async def call() -> None:
                with anyio.move_on_after(0.02) as scope:
                    await client.core.utility("reset_mm_cache")
                assert scope.cancelled_caught

            async with anyio.create_task_group() as tasks:
                for n in range(50):
                    tasks.start_soon(stream, n)
                for _ in range(500):
                    tasks.start_soon(call)
            assert client.statistics()["utility_calls_in_flight"] == 0
            while client.statistics()["late_utility_replies"] < 500:
                await anyio.lowlevel.checkpoint()
            await client.ping()
            assert client.statistics()["utility_calls_in_flight"] == 0


@pytest.mark.case("K08")
@pytest.mark.feature("L13")
@pytest.mark.parametrize("how", ["argument", "scope", "all ranks"])
async def test_a_call_that_is_not_answered_in_time(how: str) -> None:
    mute = Script(step_interval_s=0.001, utilities=(UtilityRule(method="reset_mm_cache", do="never"),))
    late = Script(utilities=(UtilityRule(method="reset_mm_cache", do="reply", value=None, delay_s=0.1),))
    with anyio.fail_after(30):
        async with EngineClient(engine=[ScriptedTwin(late).engine, ScriptedTwin(mute).engine]) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=100), data_parallel_rank=1)
            began_s = anyio.current_time()
            if how == "scope":
                with pytest.raises(TimeoutError), anyio.fail_after(0.05):
                    await client.reset_mm_cache()
            elif how == "argument":
                with pytest.raises(UtilityTimeout, match="has not answered") as caught:
                    await client.core.utility("reset_mm_cache", rank=1, timeout_s=0.05)
                assert (caught.value.rank, caught.value.method) == (1, "reset_mm_cache")
            else:
                with pytest.raises(UtilityTimeout, match="engines 0, 1 have not answered"):
                    await client.core.utility_on(None, "reset_mm_cache", timeout_s=0.05)
            assert anyio.current_time() - began_s > 0.04
            tokens = [token async for out in stream for token in out.token_ids]
            assert tokens == expected_tokens([1], 100)
            await anyio.sleep(0.1)
            await client.ping()
            statistics = client.statistics()
            assert statistics["utility_calls_in_flight"] == 0
            assert statistics["late_utility_replies"] == (0 if how == "argument" else 1)


@pytest.mark.feature("L13")
@one_loop
async def test_a_thousand_calls_that_are_given_up_leave_no_trace() -> None:
    scripted = ScriptedTwin(Script(utilities=(UtilityRule(method="reset_mm_cache", do="reply", delay_s=0.01),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            for _ in range(1000):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await client.core.utility("reset_mm_cache")
            assert client.statistics()["utility_calls_in_flight"] == 0
            while client.statistics()["late_utility_replies"] < 1000:
                await anyio.lowlevel.checkpoint()


# --------------------------------------------------------------------------------------------- many, and one


@pytest.mark.case("K30")
@one_loop
async def test_nothing_outlives_its_request() -> None:
    """Tasks, entries and objects after five thousand requests in every flavour are as many as before them."""
    scripted = ScriptedTwin(Script(tokens_per_frame=4))
    rng = random.Random(30)
    with anyio.fail_after(120):
        async with EngineClient(engine=scripted.engine, max_num_queued_reqs=1000) as client:

            async def some(count: int) -> None:
                for _ in range(count):
                    params = SamplingParams(max_tokens=3, logprobs=None)
                    limits = {"timeout_s": 600.0} if rng.random() < 0.3 else {}
                    streams = [await client.submit([1], params, **limits) for _ in range(10)]
                    for stream in streams:
                        if rng.random() < 0.1:
                            stream.close_nowait()
                        async for _ in stream:
                            pass
                scripted._records.clear()

            def counts() -> tuple[int, int]:
                gc.collect()
                states = sum(issubclass(type(one), RequestState) for one in gc.get_objects())
                return len(anyio.get_running_tasks()), states

            await some(20)
            before, objects = counts(), len(gc.get_objects())
            await some(500)
            tasks, states = counts()
            assert tasks == before[0]
            assert states <= 130  # with a deadline, until it is due or they are the half of all: see Deadlines
            assert len(gc.get_objects()) - objects < 2000
            assert client.statistics()["requests_in_flight"] == 0


@pytest.mark.case("K03")
@pytest.mark.parametrize("where", ["push", "text"])
async def test_trouble_with_one_of_64_is_its_own(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that cannot be taken, and a detokenizer that fails; the other 63 get what they would have got."""
    scripted = ScriptedTwin(Script(step_interval_s=0.0005))
    results: dict[int, Any] = {}
    push = RequestState.push

    def picky(state: RequestState, output: EngineCoreOutput) -> None:
        if state.label == "r7" and len(results_of_seven) == 3:
            raise ZeroDivisionError("a broken output")
        if state.label == "r7":
            results_of_seven.append(1)
        push(state, output)

    results_of_seven: list[int] = []

    class Failing:
        calls = 0

        def push(self, token_ids: list[int]) -> str:
            self.calls += 1
            if self.calls == 3:
                raise ZeroDivisionError("a broken vocabulary")
            return ""

        def finish(self) -> str:
            return ""

    if where == "push":
        monkeypatch.setattr(RequestState, "push", picky)
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:

            async def consume(n: int) -> None:
                stream = await client.submit([n], SamplingParams(max_tokens=20), request_id=f"r{n}")
                if where == "text" and n == 7:
                    assert stream._completions is not None
                    stream._completions._all[0]._detokenizer = Failing()  # type: ignore[assignment]
                try:
                    results[n] = [token async for out in stream for token in out.token_ids]
                except OutputProcessingError as exc:
                    results[n] = exc

            async with anyio.create_task_group() as tasks:
                for n in range(64):
                    tasks.start_soon(consume, n)
            error = results.pop(7)
            assert isinstance(error, OutputProcessingError)
            assert isinstance(error.__cause__, ZeroDivisionError | OutputProcessingError)
            assert error.request_id == "r7"
            assert results == {n: expected_tokens([n], 20) for n in range(64) if n != 7}
            await client.drain()
    (seven,) = [add[0] for add in scripted.received("add") if add[1] == [7]]
    assert scripted.received("abort") == [[seven]]


# ------------------------------------------------------------------------------------------- what is sent


@pytest.mark.feature("L42")
@one_loop
async def test_what_is_changed_after_it_was_sent_does_not_change_what_arrives() -> None:
    """The engine is stopped, so nothing has been read when the caller's memory is overwritten."""
    sums: list[int] = []
    with anyio.fail_after(60):
        async with EngineCoreClient(misbehaving("checksums")) as core:
            pid = core.session.children[0].child.pid
            os.kill(pid, signal.SIGSTOP)
            try:
                for number in range(8):
                    memory = bytearray(bytes([number + 1]) * (1 << 19))  # far beyond what ZeroMQ would copy by itself
                    sums.append(zlib.crc32(memory))
                    tensor = Tensor("float32", (32, 4096), memoryview(memory))
                    params = WireSamplingParams(max_tokens=1)
                    core.add(EngineCoreRequest(f"r{number}", None, sampling_params=params, prompt_embeds=tensor))
                    memory[:] = bytes(len(memory))
            finally:
                os.kill(pid, signal.SIGCONT)
            assert await core.utility("checksums", unchecked=True) == sums


@pytest.mark.case("K64")
@one_loop
async def test_memory_that_is_used_again_and_again_arrives_as_it_was(deep: bool) -> None:
    """300 messages of 1 KB to 4 MB back to back (100,000 in the deep profile), every other one small, all from the same
    memory, to an engine that reads meanwhile."""
    rng = random.Random(64)
    memory = memoryview(bytearray(4 << 20))
    sums: list[int] = []
    with anyio.fail_after(3000 if deep else 60):
        async with EngineCoreClient(misbehaving("checksums"), max_unread_bytes=32 << 20) as core:
            for _ in range(50_000 if deep else 150):
                for size_kb in (int(4096 ** rng.random()), 1):
                    part = memory[: size_kb << 10]
                    part[:] = bytes([rng.randrange(256)]) * len(part)
                    sums.append(zlib.crc32(part))
                    tensor = Tensor("float32", (1, size_kb * 256), part)
                    params = WireSamplingParams(max_tokens=1)
                    await core.wait_room()
                    core.add(EngineCoreRequest(f"r{len(sums)}", None, sampling_params=params, prompt_embeds=tensor))
            assert await core.utility("checksums", unchecked=True) == sums
