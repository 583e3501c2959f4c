"""Streams for threads: every way out is one abort, items merge for slow consumers, interruptions leave nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from crowds import until
from test_sync_client import ENDLESS, FOUR

from anyengine import (
    ClientState,
    EngineAsleepError,
    OutputKind,
    OverloadedError,
    RequestFailed,
    RequestRejected,
    RequestTimeout,
    SamplingParams,
    WrongLoopError,
)
from anyengine.sync import SyncEngineClient, SyncRequestStream
from anyengine.sync.client_thread import ClientThread
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, StartupStage, expected_tokens


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def slow(**changes: Any) -> ScriptedTwin:
    return ScriptedTwin(Script(step_interval_s=0.001, registration={"max_model_len": 20_000}, **changes))


def leave_by_break(stream: SyncRequestStream) -> None:
    for _ in stream:
        break


def leave_by_close(stream: SyncRequestStream) -> None:
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_block(stream: SyncRequestStream) -> None:
    with stream:
        next(stream)


def leave_before_the_first(stream: SyncRequestStream) -> None:
    with stream:
        pass


def leave_by_exception(stream: SyncRequestStream) -> None:
    with pytest.raises(ZeroDivisionError), stream:
        next(stream)
        raise ZeroDivisionError


def leave_a_generator(stream: SyncRequestStream) -> None:
    def generator() -> Iterator[int]:
        for out in stream:
            yield from out.token_ids

    with contextlib.closing(generator()) as tokens:
        next(tokens)


def leave_a_view(stream: SyncRequestStream) -> None:
    with stream.token_stream() as tokens:
        next(tokens)


def drop_a_view(stream: SyncRequestStream) -> None:
    for _ in stream.token_stream():
        break


def drop_in_a_cycle(stream: SyncRequestStream) -> None:
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)


def leave_by_timeout(stream: SyncRequestStream) -> None:
    with pytest.raises(RequestTimeout):
        for _ in stream:
            pass


WAYS: list[tuple[Callable[[SyncRequestStream], None], bool]] = [
    (leave_by_break, False), (leave_by_close, True), (leave_by_block, True), (leave_before_the_first, True),
    (leave_by_exception, True), (leave_a_generator, False), (leave_a_view, True), (drop_a_view, False),
    (drop_in_a_cycle, False), (leave_by_timeout, True),
]  # fmt: skip


@pytest.mark.case("K22", budget_s=1)
def test_every_way_out_is_one_abort(backend: str) -> None:
    """At once where the way is a call; where it is a reference that goes, as soon as the loop hears of it."""
    twin = slow()
    with SyncEngineClient(engine=twin.engine, backend=backend, strict=True) as client:  # type: ignore[arg-type]
        for number, (way, at_once) in enumerate(WAYS):
            options = {"timeout_s": 0.05} if way is leave_by_timeout else {}
            way(client.generate([1], ENDLESS, request_id=way.__name__, **options))  # type: ignore[arg-type]
            if way is drop_in_a_cycle:
                gc.collect()
            if not at_once:
                until(lambda: client.statistics()["requests_in_flight"] == 0)
            assert client.statistics()["requests_in_flight"] == 0, way
            client.ping()  # a fence: the engine has read the abort
            assert len(twin.received("abort")) == number + 1, way
        group = client.generate_many([[1], [2]], ENDLESS)
        with group:
            assert group.num_in_flight == 2
        assert client.statistics()["requests_in_flight"] == 0
        client.ping()
    ids = [wire_id for batch in twin.received("abort") for wire_id in batch]
    assert len(ids) == len(set(ids)) == len(WAYS) + 2


def test_inert_streams_send_nothing(backend: str) -> None:
    twin = slow()
    with SyncEngineClient(engine=twin.engine, backend=backend) as client:  # type: ignore[arg-type]
        client.generate([1], ENDLESS)
        client.generate([1], ENDLESS).close()
        view = client.generate([1], ENDLESS).text_stream()
        view.close()
        assert next(view, None) is None
    assert twin.received("add") == []


def test_a_slow_consumer_gets_what_has_arrived_in_one_item(backend: str) -> None:
    """And nothing is taken for a consumer that does not ask."""
    with SyncEngineClient(engine=slow().engine, backend=backend) as client:  # type: ignore[arg-type]
        stream = client.submit([1], SamplingParams(max_tokens=40))
        first = next(stream)
        until(lambda: client.statistics()["requests_in_flight"] == 0)
        assert stream.lag == 40 - len(first.token_ids)
        rest = next(stream)
        assert first.token_ids + rest.token_ids == expected_tokens([1], 40)
        assert rest.finished
        assert list(stream) == []


@pytest.mark.parametrize("kind", OutputKind)
def test_kinds_of_output_and_views(backend: str, kind: OutputKind) -> None:
    params = SamplingParams(max_tokens=9, output_kind=kind)
    expected = expected_tokens([4], 9)
    with SyncEngineClient(engine=slow().engine, backend=backend) as client:  # type: ignore[arg-type]
        assert list(client.generate([4], params).token_stream()) == expected
        assert client.generate([4], params).final().token_ids == expected
        stream = client.generate([4], params)
        next(stream)
        assert stream.final().token_ids == stream.final().token_ids == expected
        assert [out.token_ids for out in client.generate([4], params)][-1:] != []
        with client.generate([4], params) as entered:
            assert entered.request_id is not None and entered.wire_ids and entered.rank == 0 and entered.attempts == 1
            assert entered.final().token_ids == expected
        pair = client.generate([4], SamplingParams(max_tokens=3, n=2, output_kind=kind))
        with pytest.raises(ValueError, match="n=2"):
            pair.text_stream()
        assert len(pair.final().outputs) == 2


def test_errors_come_again_with_every_call(backend: str) -> None:
    twin = slow(requests=(RequestRule(first_token=66, finish="error", after_tokens=3),))
    with SyncEngineClient(engine=twin.engine, backend=backend, max_num_queued_reqs=1) as client:  # type: ignore[arg-type]
        failing = client.generate([66], FOUR)
        tokens: list[int] = []
        for _ in range(3):
            with pytest.raises(RequestFailed) as caught:
                tokens += [token for out in failing for token in out.token_ids]
            assert caught.value.partial.num_output_tokens == 3
        with pytest.raises(RequestFailed):
            failing.final()
        rejected = client.generate([], FOUR)
        for _ in range(2):
            with pytest.raises(RequestRejected):
                next(rejected)
        with client.generate([1], ENDLESS), pytest.raises(OverloadedError):
            next(client.generate([1], FOUR))


@pytest.mark.parametrize("ask", [next, SyncRequestStream.final])
def test_a_refused_caller_leaves_the_stream_as_it_is(ask: Callable[[SyncRequestStream], object]) -> None:
    """Leaving it still aborts it."""
    twin = slow()
    with SyncEngineClient(engine=twin.engine) as client:

        async def in_a_running_loop(stream: SyncRequestStream) -> None:
            with pytest.raises(WrongLoopError):
                ask(stream)

        for leave in (SyncRequestStream.close, lambda stream: None):
            stream = client.submit([1], ENDLESS)
            anyio.run(in_a_running_loop, stream)
            leave(stream)
            del stream
            until(lambda: client.statistics()["requests_in_flight"] == 0)
        client.ping()
        assert len(twin.received("abort")) == 2


def test_a_refusal_is_the_end_of_the_stream(backend: str) -> None:
    """As in the asynchronous client: when there is room again, another stream must be made."""
    twin = slow()
    with SyncEngineClient(engine=twin.engine, backend=backend) as client:  # type: ignore[arg-type]
        client.pause_generation()
        stream = client.generate([1], ENDLESS)
        with pytest.raises(EngineAsleepError):
            next(stream)
        client.resume_generation()
        for ask in (next, SyncRequestStream.final):
            with pytest.raises(EngineAsleepError):
                ask(stream)
        client.ping()
        assert twin.received("add") == []


def test_aborting_ends_a_stream_that_another_thread_waits_for(backend: str) -> None:
    """By label, by stream, and by the stream itself: it gets a last item. Two threads cannot wait for one stream."""
    twin = slow(requests=(RequestRule(first_token=77, silent=True),))
    with SyncEngineClient(engine=twin.engine, backend=backend) as client:  # type: ignore[arg-type]
        for ask in (
            lambda stream: client.abort("label"),
            lambda stream: client.abort([stream]),
            lambda stream: stream.abort(),
            lambda stream: client.abort_all(),
            lambda stream: stream.close(),
        ):
            stream = client.submit([77], ENDLESS, request_id="label")
            reasons: list[Any] = []
            waiter = threading.Thread(
                target=lambda stream=stream, to=reasons: to.extend(o.finish_reason for o in stream)
            )
            waiter.start()
            until(lambda stream=stream: stream._turn.locked())
            with pytest.raises(anyio.BusyResourceError):
                next(stream)
            ask(stream)
            waiter.join(30)
            assert reasons in (["abort"], []), reasons  # closed: the end, and nothing before it
            assert client.statistics()["requests_in_flight"] == 0


@pytest.mark.parametrize("kind", ["stream", "group", "session"])
def test_blocks_can_be_left_while_the_loop_ends(kind: str) -> None:
    """As after its end: the loop takes no call any more, and has not ended."""
    client = SyncEngineClient(engine=slow().engine, backend="asyncio", drain_timeout_s=0)
    running, release = threading.Event(), threading.Event()

    def work() -> None:
        block: Any = {
            "stream": lambda: client.generate([1], ENDLESS),
            "group": lambda: client.generate_many([[1], [2]], ENDLESS),
            "session": lambda: client.input_session(ENDLESS),
        }[kind]()
        with block:
            if kind == "session":
                block.send([1])
            if kind == "stream":
                next(block)
            running.set()
            until(lambda: client._running()._takes_no_calls)

    async def delay_the_end(_: Any) -> None:
        asyncio.get_running_loop().run_in_executor(None, release.wait, 30)

    def let_it_end() -> None:
        until(lambda: client._running()._takes_no_calls and client._running()._pending)
        release.set()

    with ThreadPoolExecutor(2) as pool:
        with client:
            client.run(delay_the_end)
            worker = pool.submit(work)
            assert running.wait(30)
            pool.submit(let_it_end)
        worker.result(30)


def test_views_go_on_after_an_exception(backend: str) -> None:
    """As the stream does: the same error again, and no token is lost to a signal handler's exception."""
    twin = slow(
        requests=(RequestRule(first_token=66, finish="error", after_tokens=2), RequestRule(first_token=77, silent=True))
    )
    with SyncEngineClient(engine=twin.engine, backend=backend) as client:  # type: ignore[arg-type]
        for view_of in (SyncRequestStream.token_stream, SyncRequestStream.text_stream):
            view: Any = view_of(client.generate([66], FOUR))
            for _ in range(2):
                with pytest.raises(RequestFailed):
                    list(view)
        with client.generate([77], FOUR) as stream:
            tokens = stream.token_stream()
            with interrupted_when(stream._turn.locked):
                next(tokens)
            stream.abort()
            assert list(tokens) == []
            assert client.statistics()["requests_in_flight"] == 0


# ------------------------------------------------------------------------------------------------- Ctrl-C


@contextlib.contextmanager
def interrupted_when(condition: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C for the main thread, as soon as ``condition`` holds."""
    main = threading.get_ident()

    def press() -> None:
        until(condition)
        signal.pthread_kill(main, signal.SIGINT)

    presser = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):
        presser.start()
        yield
    presser.join()


@pytest.mark.parametrize("call", ["next", "complete", "many", "final", "run", "enter"])
def test_ctrl_c_aborts_the_request_and_the_client_goes_on(backend: str, call: str) -> None:
    twin = slow(requests=(RequestRule(first_token=77, silent=True),))
    with SyncEngineClient(engine=twin.engine, backend=backend, strict=True) as client:  # type: ignore[arg-type]
        with interrupted_when(lambda: twin.received("add")):
            if call == "next":
                next(client.generate([77], FOUR))
            elif call == "complete":
                client.complete([77], FOUR)
            elif call == "many":
                list(client.generate_many([[77], [77]], FOUR))
            elif call == "final":
                client.generate([77], FOUR).final()
            elif call == "run":
                client.run(lambda asynchronous: asynchronous.complete([77], FOUR))
            else:
                with client.generate([77], FOUR) as stream:
                    next(stream)
        until(lambda: client.statistics()["requests_in_flight"] == 0)
        assert len(client.complete([1], FOUR).token_ids) == 4


@pytest.mark.parametrize("call", ["next", "complete", "many", "final", "run", "enter"])
def test_ctrl_c_between_asking_and_waiting(backend: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may have begun with it by then: at the very moment it was told to."""
    twin = slow(requests=(RequestRule(first_token=77, silent=True),))
    post = ClientThread.post

    def interrupted(thread: ClientThread, action: Callable[[], object]) -> None:
        post(thread, action)
        until(lambda: twin.received("add") or call == "next")
        monkeypatch.undo()
        raise KeyboardInterrupt

    with SyncEngineClient(engine=twin.engine, backend=backend, strict=True) as client:  # type: ignore[arg-type]
        calls: dict[str, Callable[[], object]] = {
            "next": lambda: next(client.generate([77], FOUR)),
            "complete": lambda: client.complete([77], FOUR),
            "many": lambda: list(client.generate_many([[77], [77]], FOUR)),
            "final": lambda: client.generate([77], FOUR).final(),
            "run": lambda: client.run(lambda asynchronous: asynchronous.complete([77], FOUR)),
            "enter": lambda: client.generate([77], FOUR).__enter__(),
        }
        monkeypatch.setattr(ClientThread, "post", interrupted)
        with pytest.raises(KeyboardInterrupt):
            calls[call]()
        gc.collect()
        until(lambda: client.statistics()["requests_in_flight"] == 0)
        assert len(client.complete([1], FOUR).token_ids) == 4


def test_ctrl_c_in_a_stream_of_a_block_leaves_it_to_the_block(backend: str) -> None:
    twin = slow(requests=(RequestRule(first_token=77, silent=True),))
    with SyncEngineClient(engine=twin.engine, backend=backend) as client:  # type: ignore[arg-type]
        with client.generate([77], FOUR) as stream:
            with interrupted_when(stream._turn.locked):
                next(stream)
            assert client.statistics()["requests_in_flight"] == 1
            stream.abort()
            assert [out.finish_reason for out in stream] == ["abort"]


def test_ctrl_c_while_it_starts_and_while_it_drains(backend: str) -> None:
    """It ends what it waits for, and comes out when everything has ended; a second one makes no difference."""
    stages: list[str] = []
    hanging = ScriptedTwin(Script(startup=(StartupStage(name="loading", hang=True),)))
    client = SyncEngineClient(engine=hanging.engine, backend=backend, on_progress=lambda s: stages.append(s.stage))  # type: ignore[arg-type]
    with interrupted_when(lambda: "loading" in stages), client:
        pass
    twin = slow(requests=(RequestRule(first_token=77, silent=True),))
    client = SyncEngineClient(engine=twin.engine, backend=backend, drain_timeout_s=60)  # type: ignore[arg-type]
    with interrupted_when(lambda: client.state is ClientState.CLOSING):
        with client:
            stream = client.submit([77], FOUR)
    assert next(stream).finish_reason == "abort"
    assert client.shutdown_report is not None and client.shutdown_report.aborted_requests == 1
