"""The end of a block: what is in flight finishes or is aborted, everyone is told, the engines are stopped in time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import pytest
import trio.testing
from engines import misbehaving, toy
from incarnations import Incarnations
from memory_engines import in_loop

from anyengine import (
    ClientClosedError,
    ClientState,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    RequestStream,
    RestartPolicy,
    SamplingParams,
)
from anyengine._process.child import ChildProcess, ProcessExit
from anyengine.testing.scripted import RequestRule, Script
from anyengine.testing.scripted import expected_tokens as scripted_tokens
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

Tokens = dict[int, tuple[list[int], str | None]]


async def consume(stream: RequestStream, first: int, results: Tokens) -> None:
    tokens: list[int] = []
    async for out in stream:
        tokens += out.token_ids
        results[first] = (list(tokens), out.finish_reason)


async def leave_with(
    client: EngineClient, num_requests: int, max_tokens: int, then: Callable[[], Awaitable[None]]
) -> Tokens:
    """Leave the block of ``client`` while requests run, whose consumers are outside; what these got."""
    results: Tokens = {}
    async with anyio.create_task_group() as consumers:
        async with client:
            for first in range(num_requests):
                stream = await client.submit([first], SamplingParams(max_tokens=max_tokens))
                consumers.start_soon(consume, stream, first, results)
            await then()
    return results


@pytest.mark.feature("L15", "C22")
@pytest.mark.case("K11")
async def test_requests_in_flight_finish_within_the_drain_timeout() -> None:
    client = EngineClient(engine=in_loop(step_s=0.002), drain_timeout_s=20)
    with anyio.fail_after(30):
        results = await leave_with(client, 20, 40, anyio.lowlevel.checkpoint)
    assert results == {first: (expected_tokens([first], 40), "length") for first in range(20)}
    report = client.shutdown_report
    assert report is not None
    assert (report.in_flight_requests, report.aborted_requests, report.killed) == (20, 0, ())


@pytest.mark.feature("L15")
@pytest.mark.case("K11")
async def test_what_has_not_finished_by_then_ends_with_abort_and_its_output_so_far() -> None:
    async def one_step_later() -> None:
        await anyio.sleep(0.02)
        await client.ping()  # a fence behind the outputs of a step

    client = EngineClient(engine=in_loop(step_s=0.01), drain_timeout_s=0.05)
    with anyio.fail_after(20):
        results = await leave_with(client, 20, 2000, one_step_later)
    assert len(results) == 20
    for first, (tokens, finish_reason) in results.items():
        assert finish_reason == "abort"
        assert 0 < len(tokens) < 2000
        assert tokens == expected_tokens([first], len(tokens))
    report = client.shutdown_report
    assert report is not None
    assert (report.in_flight_requests, report.aborted_requests) == (20, 20)
    assert report.drain_s >= 0.05


@pytest.mark.feature("L15")
async def test_new_requests_are_refused_while_it_drains() -> None:
    async def keep_asking() -> None:
        await is_closing(client)
        with pytest.raises(ClientClosedError, match="takes nothing new"):
            await client.submit([1], SamplingParams(max_tokens=1))
        with pytest.raises(ClientClosedError, match="takes nothing new"):
            client.core.add(request)
        refused.append(await client.core.ping())  # what is in flight may still be looked at

    refused: list[float] = []
    client = EngineClient(engine=in_loop(step_s=0.005), drain_timeout_s=20)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as others:
            async with client:
                request = client._entered_desk().builder.build([1], SamplingParams(max_tokens=1), None, {})
                stream = await client.submit([1], SamplingParams(max_tokens=100))
                others.start_soon(keep_asking)
            assert [t async for out in stream for t in out.token_ids] == expected_tokens([1], 100)
    assert len(refused) == 1


async def test_an_exception_or_a_cancellation_does_not_wait() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    client = EngineClient(engine=in_loop(step_s=0.01), drain_timeout_s=1000)
    with anyio.fail_after(10):
        with pytest.raises(ExceptionGroup) as caught:  # of the consumers' group
            await leave_with(client, 2, 2000, fail)
        assert isinstance(caught.value.exceptions[0], ZeroDivisionError)
        report = client.shutdown_report
        assert report is not None and (report.aborted_requests, report.drain_s) == (2, 0)
        with anyio.move_on_after(0.05) as scope:
            await leave_with(client, 2, 2000, anyio.sleep_forever)
        assert scope.cancelled_caught


@pytest.mark.case("K11")
async def test_a_cancellation_ends_the_drain_and_nothing_else() -> None:
    """The second Ctrl-C: what is in flight is aborted at once; everybody is told all the same."""
    client, results = EngineClient(engine=in_loop(step_s=0.01), drain_timeout_s=1000), {}
    with anyio.fail_after(10):
        async with anyio.create_task_group() as consumers:
            with anyio.CancelScope() as scope:
                async with client:
                    stream = await client.submit([1], SamplingParams(max_tokens=2000))
                    consumers.start_soon(consume, stream, 1, results)
                    consumers.start_soon(cancel_when_closing, client, scope)
            assert scope.cancelled_caught
            assert client.state is ClientState.CLOSED
    assert results[1][1] == "abort"


async def cancel_when_closing(client: EngineClient, scope: anyio.CancelScope) -> None:
    await is_closing(client)
    scope.cancel()


async def is_closing(client: EngineClient) -> None:
    async for event in client.events():
        if event.state is ClientState.CLOSING:
            return


async def test_a_death_ends_the_drain() -> None:
    async def die_when_closing(client: EngineClient) -> None:
        await is_closing(client)
        client.core.session.engines[0].child.kill()

    client = EngineClient(engine=in_loop(step_s=0.01), drain_timeout_s=1000)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as others:
            async with client:
                stream = await client.submit([1], SamplingParams(max_tokens=2000))
                others.start_soon(die_when_closing, client)
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                [out async for out in stream]


# ------------------------------------------------------------------------------------------------------- early close


async def test_two_drains_end_although_an_engine_is_started_again_meanwhile() -> None:
    """Nothing is in flight for a moment while a request waits to be replayed: both look, and both look again."""
    engine = Incarnations(Script(requests=(RequestRule(silent=True),)), Script())
    with anyio.fail_after(10):
        async with EngineClient(engine=engine.engine, restart=RestartPolicy(backoff_s=0, in_flight="replay")) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=3, temperature=0))
            closing = client.core.session.closing
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(closing.drain, 1000.0)
                await anyio.wait_all_tasks_blocked()
                client.core.session.engines[0].child.kill()
            assert (await stream.final()).token_ids == scripted_tokens([1], 3)


async def test_closing_early_from_any_task_is_the_same_end() -> None:
    client, results = EngineClient(engine=in_loop(step_s=0.005)), {}
    with anyio.fail_after(10):
        async with client, anyio.create_task_group() as tasks:
            streams = [await client.submit([n], SamplingParams(max_tokens=20 + 1980 * n)) for n in range(2)]
            for n, stream in enumerate(streams):
                tasks.start_soon(consume, stream, n, results)
            for _ in range(3):  # at once, and again
                tasks.start_soon(partial_close, client)
            await partial_close(client)
            with pytest.raises(ClientClosedError):
                await client.submit([1])
            assert client.core.session.engines[0].child.poll() is not None
            await client.aclose()
    await client.aclose()  # long gone
    assert [results[n][1] for n in range(2)] == ["length", "abort"]
    report = client.shutdown_report
    assert report is not None and (report.in_flight_requests, report.aborted_requests) == (2, 1)


async def partial_close(client: EngineClient) -> None:
    await client.aclose(drain_timeout_s=1.0)


async def test_an_early_close_that_is_cancelled_closes_at_once() -> None:
    with anyio.fail_after(10):
        async with EngineClient(engine=in_loop(step_s=0.01)) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=2000))
            with anyio.move_on_after(0.05) as scope:
                await client.aclose(drain_timeout_s=1000)
            assert scope.cancelled_caught
            assert client.core.session.engines[0].child.poll() is not None
            assert [out.finish_reason async for out in stream][-1] == "abort"


async def test_the_low_level_client_drains_too() -> None:
    tokens: list[int] = []

    async def read(core: EngineCoreClient) -> None:
        with suppress(ClientClosedError):
            async for batch in core.outputs():
                for output in batch.outputs:
                    tokens.extend(output.new_token_ids)

    async with EngineClient(engine=in_loop()) as client:
        request = client._entered_desk().builder.build([3], SamplingParams(max_tokens=10), None, {})
    core = EngineCoreClient(in_loop(step_s=0.005), drain_timeout_s=20)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks, core:
            tasks.start_soon(read, core)
            core.add(request)
    assert tokens == expected_tokens([3], 10)


# -------------------------------------------------------------------------------------------------------- escalation


@pytest.mark.feature("L16")
@pytest.mark.case("K11")
async def test_an_engine_that_ignores_sigterm_is_killed_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    client, grace_s = EngineCoreClient(misbehaving("ignores_sigterm"), shutdown_grace_s=0.2), 0.2
    with anyio.fail_after(30) as scope:
        async with client:
            child = client.session.engines[0].child
            scope.deadline = anyio.current_time() + grace_s + 2
    report = client.shutdown_report
    assert report is not None
    told = {int(line.removeprefix("child ")) for line in child.stderr_tail() if line.startswith("child ")}
    assert {killed.pid for killed in report.killed} == {child.pid, *told}
    assert {killed.rank for killed in report.killed} == {0}
    assert "within 0.2 s" in report.killed[0].why
    assert "left it behind" in report.killed[1].why
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]


@pytest.mark.case("K11")
@pytest.mark.case("K75")
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_an_engine_that_nothing_can_kill_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the hands of a driver, for one: it is abandoned, and the report says so."""
    monkeypatch.setattr("anyengine._client.session.closing._KILLED_LIMIT_S", 0.1)
    monkeypatch.setattr("anyengine._process.child._TEAR_DOWN_S", 0.1)
    client = EngineCoreClient(misbehaving("ignores_sigterm"), shutdown_grace_s=0.1)
    kill = ChildProcess.kill
    with anyio.fail_after(30) as scope:
        async with client:
            child = client.session.engines[0].child
            assert isinstance(child, ChildProcess)
            monkeypatch.setattr(ChildProcess, "kill", lambda child: None)
            scope.deadline = anyio.current_time() + 0.1 + 2
    report = client.shutdown_report
    assert report is not None and report.killed[0].pid == child.pid
    assert child.poll() == ProcessExit(child.pid, None, None)
    assert any("does not end, though it was killed" in record.getMessage() for record in caplog.records)
    monkeypatch.undo()
    kill(child)
    child._popen.wait()


async def test_an_orderly_end_reports_nothing_killed() -> None:
    client = EngineClient(engine=toy())
    with anyio.fail_after(30):
        async with client:
            assert client.shutdown_report is None
    report = client.shutdown_report
    assert report is not None and report.killed == ()
    assert report.stop_s > 0


# ------------------------------------------------------------------------------------------------------ virtual time


@pytest.mark.feature("L44")
def test_five_minutes_of_draining_take_no_time() -> None:
    """Every wait goes by AnyIO's clock: a test may turn it."""

    async def main() -> tuple[float, Tokens]:
        client = EngineClient(engine=in_loop(step_s=1.0), drain_timeout_s=300)
        started_s = anyio.current_time()
        results = await leave_with(client, 1, 2000, anyio.lowlevel.checkpoint)
        return anyio.current_time() - started_s, results

    took_s, results = trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert 300 <= took_s < 310
    tokens, finish_reason = results[0]
    assert finish_reason == "abort"
    assert tokens == expected_tokens([0], len(tokens))
    assert 290 < len(tokens) <= 310
