"""Figures of a client: true at every moment, told to a log and to sinks that may be as bad as they like."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from anyengine import ClientClosedError, ClientStatistics, EngineClient, RequestFailed, SamplingParams
from anyengine._client.inputs.model_files import load_model_files
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

one_loop = pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"])

LONG = SamplingParams(max_tokens=1900)


def twin(**script: Any) -> ScriptedTwin:
    return ScriptedTwin(Script(reports_load=True, step_interval_s=0.001, **script))


@pytest.mark.feature("C33")
async def test_what_is_in_flight() -> None:
    scripted = ScriptedTwin(Script(max_running=1, step_interval_s=0.001))
    client = EngineClient(engine=scripted.engine)
    with pytest.raises(ClientClosedError):
        client.stats()
    with anyio.fail_after(30):
        async with client:
            assert (client.stats().in_flight, client.stats().queued_prompt_tokens) == (0, 0)
            first = await client.submit([1, 2, 3], LONG)
            assert (client.stats().in_flight, client.stats().queued_prompt_tokens) == (1, 3)
            await anext(first)
            second = await client.submit([1] * 7, SamplingParams(n=2, max_tokens=1900))
            assert (client.stats().in_flight, client.stats().queued_prompt_tokens) == (3, 14)
            assert client.statistics()["queued_prompt_tokens"] == 14
            await second.aclose()
            assert (client.stats().in_flight, client.stats().queued_prompt_tokens) == (1, 0)
            await first.aclose()
            assert (client.stats().in_flight, client.stats().queued_prompt_tokens) == (0, 0)


@pytest.mark.case("K77")
@pytest.mark.parametrize("end", ["finish", "abort", "error"])
async def test_what_an_engine_said_before_it_fell_silent_has_an_age(end: str) -> None:
    """Whatever ends the last request: nothing is in flight at once, and the engine's last words say their age."""
    rules = (RequestRule(first_token=9, after_tokens=3, finish="error"),)
    with anyio.fail_after(30):
        async with EngineClient(engine=twin(requests=rules).engine) as client:
            stream = await client.submit([9] if end == "error" else [1], SamplingParams(max_tokens=50))
            await anext(stream)
            (busy,) = client.stats().ranks
            assert (busy.in_flight, busy.num_waiting) == (1, 0) and busy.num_running is not None
            if end == "abort":
                await client.abort(stream)
            else:
                try:
                    await stream.final()
                except RequestFailed:
                    assert end == "error"
            (idle,) = client.stats().ranks
            assert (client.stats().in_flight, idle.in_flight) == (0, 0)
            await anyio.sleep(0.02)
            assert idle.age_s is not None
            later = client.stats().ranks[0].age_s
            assert later is not None and later >= idle.age_s + 0.01


@pytest.mark.case("K80")
async def test_figures_of_clients_and_ranks_add_up() -> None:
    """Two clients with two ranks each: each figure says whose it is, and the sum is what was done."""
    modules = set(sys.modules)
    with anyio.fail_after(30):
        async with (
            EngineClient(engine=[twin().engine, twin().engine]) as one,
            EngineClient(engine=[twin().engine, twin().engine]) as other,
        ):
            for number, client in ((3, one), (5, other)):
                for rank in (0, 1):
                    for _ in range(number):
                        await client.complete([1, 2], SamplingParams(max_tokens=4 + rank), data_parallel_rank=rank)
            taken = [one.stats(), other.stats()]
    assert len({figures.client_id for figures in taken}) == 2
    labelled = {
        (figures.client_id, rank.rank): (rank.totals.ended, rank.totals.prompt_tokens, rank.totals.generation_tokens)
        for figures in taken
        for rank in figures.ranks
    }
    assert list(labelled.values()) == [({"length": n}, 2 * n, (4 + rank) * n) for n in (3, 5) for rank in (0, 1)]
    assert sum(figures.generation_tokens for figures in taken) == 3 * 9 + 5 * 9
    assert sum(figures.prompt_tokens for figures in taken) == 32
    assert sum(figures.ended for figures in taken) == 16
    assert not {name for name in set(sys.modules) - modules if "prometheus" in name}


@pytest.mark.case("K81")
async def test_totals_hold_at_every_moment() -> None:
    """With the tokens that nobody has taken, those of requests that were aborted, and those of requests that failed."""
    rules = (RequestRule(first_token=9, after_tokens=3, finish="error"),)
    with anyio.fail_after(30):
        async with EngineClient(engine=twin(requests=rules).engine) as client:
            stream = await client.submit([1] * 5, LONG)
            await anext(stream)
            before = client.stats()
            assert (before.prompt_tokens, before.ended) == (5, 0)
            assert before.generation_tokens == 1 + stream.lag
            with pytest.raises(RequestFailed):
                await client.complete([9], SamplingParams(max_tokens=8))
            await client.abort(stream)
            taken = (await stream.final()).num_output_tokens
            after = client.stats()
    assert (after.prompt_tokens, after.generation_tokens, after.ended) == (6, taken + 3, 2)
    assert after.ranks[0].totals.ended == {"abort": 1, "failed": 1}


@pytest.mark.feature("C09")
async def test_a_line_at_each_interval_and_none_when_idle_twice(caplog: pytest.LogCaptureFixture) -> None:
    sent, told = anyio.create_memory_object_stream[ClientStatistics](1000)

    def sink(statistics: ClientStatistics) -> None:
        anyio.from_thread.run_sync(sent.send_nowait, statistics)

    caplog.set_level(logging.INFO, "anyengine.statistics")
    with anyio.fail_after(30), sent, told:
        async with EngineClient(engine=twin().engine, stats_interval_s=0.02, stats_sinks=[sink]) as client:
            for _ in range(3):
                await told.receive()
            assert caplog.messages == []  # it has never done anything
            async with client.generate([1, 2], LONG) as stream:
                await anext(stream)
                while (await told.receive()).in_flight == 0:
                    pass
                assert "in flight 1 reqs" in caplog.messages[-1] and "KV cache usage 1.0%" in caplog.messages[-1]
            while (await told.receive()).in_flight:
                pass
            for _ in range(5):
                await told.receive()
    ends = [message for message in caplog.messages if "in flight 0 reqs" in message]
    assert 1 <= len(ends) <= 2  # the interval in which it ended, and one that says that nothing happens


@pytest.mark.feature("C09")
async def test_statistics_can_be_flushed(caplog: pytest.LogCaptureFixture) -> None:
    """Without an interval there is no timer; asked for, the line comes at once, and the sinks have it."""
    seen: list[ClientStatistics] = []
    caplog.set_level(logging.INFO, "anyengine.statistics")
    with anyio.fail_after(30):
        async with EngineClient(engine=twin().engine, stats_sinks=[seen.append]) as client:
            await client.complete([1, 2], SamplingParams(max_tokens=3))
            await client.do_log_stats()
            assert [figures.generation_tokens for figures in seen] == [3]
            await client.do_log_stats()
            await client.do_log_stats()
    assert len(seen) == 3
    assert len(caplog.messages) == 2  # the second says that nothing happens; the third would say it again


@pytest.mark.parametrize("interval", [0, -1.0, float("nan"), float("inf")])
def test_an_interval_that_makes_no_sense_is_refused(interval: float) -> None:
    with pytest.raises(ValueError, match="stats_interval_s"):
        EngineClient(engine=twin().engine, stats_interval_s=interval)


@pytest.mark.case("K79")
async def test_bad_sinks_concern_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """One raises, one blocks for good, one returns nonsense: the stream goes on, the fault is logged once and counted,
    and the block is left although a sink has not come back."""
    release = threading.Event()
    calls: list[str] = []
    sent, told = anyio.create_memory_object_stream[int](1000)

    def raises(_: ClientStatistics) -> None:
        calls.append("raises")
        raise RuntimeError("no such exporter")

    def blocks(_: ClientStatistics) -> None:
        calls.append("blocks")
        release.wait(30)

    def nonsense(_: ClientStatistics) -> int:
        anyio.from_thread.run_sync(sent.send_nowait, -1)
        return -1

    sinks: Sequence[Any] = [raises, blocks, nonsense]
    try:
        with anyio.fail_after(30), sent, told:
            async with EngineClient(engine=twin().engine, stats_interval_s=0.005, stats_sinks=sinks) as client:
                out = await client.complete([1], SamplingParams(max_tokens=100))
                for _ in range(3):
                    await told.receive()
                failures = client.statistics()["statistics_failures"]
    finally:
        release.set()
    assert out.token_ids == expected_tokens([1], 100)
    assert calls.count("blocks") == 1 and calls.count("raises") > 1
    assert failures >= 2
    faults = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(faults) == 1 and "no such exporter" in str(faults[0].exc_info)


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration()])
async def test_a_sink_may_raise_whatever_it_likes(failure: BaseException) -> None:
    def raises(_: ClientStatistics) -> None:
        raise failure

    with anyio.fail_after(30):
        async with EngineClient(engine=twin().engine, stats_sinks=[raises]) as client:
            await client.do_log_stats()
            assert client.statistics()["statistics_failures"] == 1
            assert (await client.complete([1], SamplingParams(max_tokens=2))).token_ids == expected_tokens([1], 2)


async def test_a_log_that_raises_concerns_nobody() -> None:
    """A filter of the user's: the client's own task goes on, and the sinks are told."""
    seen: list[ClientStatistics] = []

    def refuses(_: logging.LogRecord) -> bool:
        raise RuntimeError("no such log")

    def raises(statistics: ClientStatistics) -> None:
        seen.append(statistics)
        raise RuntimeError("no such exporter")

    logger = logging.getLogger("anyengine.statistics")
    logger.addFilter(refuses)
    formerly, logger.level = logger.level, logging.INFO
    try:
        with anyio.fail_after(30):
            async with EngineClient(engine=twin().engine, stats_interval_s=0.005, stats_sinks=[raises]) as client:
                while client.statistics()["statistics_failures"] < 3:
                    await client.complete([1], SamplingParams(max_tokens=2))
    finally:
        logger.removeFilter(refuses)
        logger.level = formerly
    assert seen


@one_loop
async def test_a_sink_is_called_once_at_a_time_though_nobody_waits_for_it() -> None:
    """Whoever asked for it has been cancelled, and its thread goes on, also into the next block."""
    release, begun = threading.Event(), threading.Event()
    at_it: list[int] = []

    def blocks(_: ClientStatistics) -> None:
        at_it.append(len(at_it))
        begun.set()
        release.wait(30)

    client = EngineClient(engine=twin().engine, stats_sinks=[blocks])
    try:
        with anyio.fail_after(30):
            for _ in range(2):
                async with client:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(client.do_log_stats)
                        if not begun.is_set():
                            await anyio.to_thread.run_sync(begun.wait)
                        tasks.cancel_scope.cancel()
                    await client.do_log_stats()
                    assert client.statistics()["statistics_failures"] >= 1
            assert at_it == [0]
    finally:
        release.set()


@one_loop
async def test_figures_begin_anew_with_each_block(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "anyengine.statistics")
    client = EngineClient(engine=twin().engine)
    with anyio.fail_after(30):
        for max_tokens in (300, 3):
            async with client:
                await client.complete([1], SamplingParams(max_tokens=max_tokens))
                await client.do_log_stats()
    assert len(caplog.messages) == 2
    assert not [message for message in caplog.messages if "throughput -" in message]


@one_loop
async def test_an_interval_shorter_than_the_loading_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async def loads(*args: Any, **kwargs: Any) -> Any:
        await anyio.sleep(0.05)
        return await load_model_files(*args, **kwargs)

    monkeypatch.setattr("anyengine._client.client.load_model_files", loads)
    with anyio.fail_after(30):
        async with EngineClient(engine=twin().engine, stats_interval_s=0.001) as client:
            assert (await client.complete([1], SamplingParams(max_tokens=2))).token_ids == expected_tokens([1], 2)
