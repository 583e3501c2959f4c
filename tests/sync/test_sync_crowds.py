"""Many threads and one client: what each gets is its own, whatever the others do and whatever the engine does."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest
from crowds import crowd, started, until
from test_sync_client import BACKENDS, ENDLESS, SLOW, backends, every_backend

from anyengine import ClientClosedError, EngineClient, EngineDeadError, SamplingParams, WrongLoopError
from anyengine.sync import SyncEngineClient
from anyengine.testing.scripted import Fault, Script, ScriptedTwin, expected_tokens


@every_backend
@pytest.mark.feature("L24")
def test_eight_threads_with_fifty_requests_each(backend: dict[str, Any]) -> None:
    """And from a foreign loop, the asynchronous client behind it refuses."""

    def work(number: int) -> int:
        for count in range(50):
            prompt = [1 + number, 1 + count]
            if count % 2:
                tokens = client.complete(prompt, SamplingParams(max_tokens=5)).token_ids
            else:
                tokens = [t for out in client.generate(prompt, SamplingParams(max_tokens=5)) for t in out.token_ids]
            assert tokens == expected_tokens(prompt, 5)
        return number

    async def elsewhere(asynchronous: EngineClient) -> None:
        with pytest.raises(WrongLoopError):
            await asynchronous.complete([1])

    with SyncEngineClient(engine=ScriptedTwin().engine, strict=True, **backend) as client:
        assert crowd(8, work) == list(range(8))
        for own in BACKENDS:
            anyio.run(elsewhere, client._client, **own)
        assert client.statistics()["requests_in_flight"] == 0


@backends
def test_thirty_two_threads_that_leave_as_they_like(backend: dict[str, Any]) -> None:
    """Each token is the right one, each request that was left is aborted once, and nothing is left."""

    def work(number: int) -> int:
        draw = random.Random(number)
        left = 0
        for count in range(6):
            prompt, length = [1 + number, 1 + count], draw.randrange(1, 30)
            expected = expected_tokens(prompt, length)
            stream = client.generate(prompt, SamplingParams(max_tokens=length), request_id=f"{number}-{count}")
            stop_after, way = draw.randrange(1, 40), draw.choice(["break", "close", "block", "abort", "final"])
            tokens: list[int] = []
            if way == "block":
                stream.__enter__()
            for out in stream:
                tokens += out.token_ids
                assert tokens == expected[: len(tokens)]
                left += not out.finished and len(tokens) >= stop_after
                if len(tokens) >= stop_after:
                    break
            else:
                assert tokens == expected
            if way == "close":
                stream.close()
            elif way == "block":
                stream.__exit__(None, None, None)
            elif way == "abort":
                client.abort(stream)
            elif way == "final" and len(tokens) < length:
                assert stream.final().token_ids == expected
                left -= 1
            del stream
        return left

    twin = ScriptedTwin(Script(step_interval_s=0.001))
    with SyncEngineClient(engine=twin.engine, strict=True, **backend) as client:
        left = sum(crowd(32, work))
        until(lambda: client.statistics()["requests_in_flight"] == 0)
        client.ping()
        aborted = [wire_id for batch in twin.received("abort") for wire_id in batch]
        assert len(aborted) == len(set(aborted)) <= left  # some had ended by themselves before the abort was made
        assert client.debug_snapshot().requests == ()
        until(lambda: not client._running()._pending)  # nor a task in the loop


@backends
@pytest.mark.case("K01", budget_s=2)
def test_the_engines_death_is_told_to_everyone_who_waits(backend: dict[str, Any]) -> None:
    """Sixteen threads in calls of four kinds: each gets the error, with what it had, and so does a later call."""
    script = Script(
        step_interval_s=0.001,
        registration={"max_model_len": 20_000},
        faults=(Fault(do="exit", direction="in", kind="reset_mm_cache", exit_code=7),),
    )

    def work(number: int) -> EngineDeadError:
        with pytest.raises(EngineDeadError) as caught:
            if number % 4 == 0:
                stream = client.generate([1], ENDLESS)
                next(stream)
                streaming.release()
                list(stream)
            elif number % 4 == 1:
                streaming.release()
                client.complete([1], ENDLESS)
            elif number % 4 == 2:
                streaming.release()
                list(client.generate_many([[1], [2]], ENDLESS))
            else:
                streaming.release()
                raise client.wait_dead()
        return caught.value

    streaming = threading.Semaphore(0)
    with SyncEngineClient(engine=ScriptedTwin(script).engine, **backend) as client:
        with started(16, work) as futures:
            for _ in range(16):
                streaming.acquire()
            until(lambda: client.statistics()["requests_in_flight"] == 4 + 4 + 8)
            with pytest.raises(EngineDeadError):
                client.reset_mm_cache()
        errors = [future.result() for future in futures]
        assert {(type(error), error.exit_code, error.rank) for error in errors} == {(EngineDeadError, 7, 0)}
        assert len({id(error) for error in errors}) == 16
        assert all(error.partial.num_output_tokens > 0 for error in errors[::4])
        with pytest.raises(EngineDeadError):
            client.complete([1])


@backends
@pytest.mark.parametrize("way", ["the block ends", "the block fails", "close"])
def test_closing_while_streams_are_open(backend: dict[str, Any], way: str) -> None:
    """Every thread gets a last item, or the error that says that the client was closed; none waits on."""

    def work(number: int) -> Any:
        try:
            if number % 2:
                return client.complete([1], ENDLESS).finish_reason
            stream = client.generate([1], ENDLESS)
            next(stream)
            streaming.release()
            return [out.finish_reason for out in stream][-1]
        except ClientClosedError as exc:
            return type(exc)

    streaming = threading.Semaphore(0)
    client = SyncEngineClient(engine=ScriptedTwin(SLOW).engine, strict=True, **backend)
    client.__enter__()
    try:
        with started(16, work) as futures:
            for _ in range(8):
                streaming.acquire()
            until(lambda: client.statistics()["requests_in_flight"] == 16)
            if way == "close":
                client.close()
            else:
                failure = ZeroDivisionError() if way == "the block fails" else None
                client.__exit__(None if failure is None else type(failure), failure, None)
        assert [future.result() for future in futures] == ["abort"] * 16
    finally:
        client.__exit__(None, None, None)


@backends
def test_calls_that_race_with_the_end_are_answered(backend: dict[str, Any]) -> None:
    """However late they come: each ends, with a result or with the one error."""

    def work(number: int) -> int:
        answered = 0
        while True:
            try:
                if number % 3 == 0:
                    client.is_paused()
                elif number % 3 == 1:
                    for _ in client.generate([1], SamplingParams(max_tokens=2)):
                        pass
                else:
                    client.complete([1], SamplingParams(max_tokens=1))
            except ClientClosedError:
                return answered
            answered += 1
            busy.release()

    for _ in range(3):
        busy = threading.Semaphore(0)
        client = SyncEngineClient(engine=ScriptedTwin().engine, **backend)
        client.__enter__()
        with started(9, work) as futures:
            for _ in range(30):
                busy.acquire()
            client.__exit__(None, None, None)
        assert sum(future.result() for future in futures) >= 30


@backends
def test_a_call_that_comes_while_the_last_ones_end_is_refused(backend: dict[str, Any]) -> None:
    """And nothing of it is left to a collection, which would complain of a coroutine that was never awaited."""

    class Ending:
        def start_soon(self, func: Callable[..., Coroutine[Any, Any, None]], *args: object) -> None:
            func(*args)
            raise RuntimeError("Nursery is closed to new arrivals")

    with SyncEngineClient(engine=ScriptedTwin().engine, **backend) as client:
        thread = client._running()
        calls, thread._calls = thread._calls, Ending()  # type: ignore[assignment]
        with pytest.raises(ClientClosedError):
            client.complete([1], SamplingParams(max_tokens=1))
        thread._calls = calls
        gc.collect()
        assert client.complete([1], SamplingParams(max_tokens=1)).token_ids
