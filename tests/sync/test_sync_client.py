"""The client for threads: the same calls, results and errors as the asynchronous one; who may call; what is left."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
from crowds import until
from engines import RUNNER

from anyengine import (
    ClientClosedError,
    ClientState,
    EmbeddedEngine,
    EngineClient,
    EngineDeadError,
    EngineStartupError,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    WrongLoopError,
)
from anyengine.sync import ClientOptions, SyncEngineClient
from anyengine.sync.contexts import BlockingContext
from anyengine.testing import toy_runner
from anyengine.testing.scripted import End, Fault, RequestRule, Script, ScriptedTwin, StartupStage

BACKENDS: list[dict[str, Any]] = [
    {"backend": "asyncio"},
    {"backend": "trio"},
    {"backend": "asyncio", "backend_options": {"use_uvloop": True}},
]
backends = pytest.mark.parametrize("backend", BACKENDS[:2], ids=["asyncio", "trio"])
every_backend = pytest.mark.parametrize("backend", BACKENDS, ids=["asyncio", "trio", "uvloop"])
ENDLESS = SamplingParams(max_tokens=10_000)
SLOW = Script(step_interval_s=0.001, registration={"max_model_len": 20_000})


def num_client_threads() -> int:
    return sum(thread.name == "anyengine client" for thread in threading.enumerate())


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def test_every_public_method_has_a_blocking_twin() -> None:
    """With the same parameters, as an editor shows them."""
    asynchronous, blocking = public(EngineClient), public(SyncEngineClient)
    elsewhere = {"aclose": "close", "core": "run"}
    assert {elsewhere.get(name, name) for name in asynchronous} == blocking.keys()
    for name, method in asynchronous.items():
        twin = blocking[elsewhere.get(name, name)]
        assert twin.__doc__, name
        if callable(method):
            expected, found = inspect.signature(method).parameters, inspect.signature(twin).parameters
            assert [(one.name, one.default) for one in found.values()] == [
                (one.name, one.default) for one in expected.values()
            ], name
    options = set(inspect.signature(EngineClient).parameters) - {"model", "engine"}
    assert options == set(ClientOptions.__annotations__)


FOUR = SamplingParams(max_tokens=4)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("complete", ([3], FOUR), {"request_id": "label"}),
    ("complete", ([3], SamplingParams(max_tokens=4, n=2)), {}),
    ("is_paused", (), {}),
    ("supported_tasks", (), {}),
    ("drain", (), {"timeout_s": 5}),
    ("abort_all", (), {}),
    ("abort", ("nobody",), {}),
    ("complete", ([1], SamplingParams(max_tokens=4, logprobs=10**6)), {}),
    ("complete", ("text",), {}),
    ("complete", ([66], FOUR), {"request_id": "x"}),
    ("complete", ([77], FOUR), {"timeout_s": 0.05, "request_id": "x"}),
    ("submit", ([],), {}),
    ("sleep", (), {"mode": "never"}),
    ("collective_rpc", (print,), {}),
    ("ping", (), {"rank": 7}),
    ("health", ("?",), {}),
    ("encode", ([1], PoolingParams(task="embed")), {}),
    ("abort", (5,), {}),
    ("complete", ([1],), {"nonsense": 1}),
    ("pause_generation", (), {"mode": "keep"}),
    ("complete", ([1],), {}),
    ("resume_generation", (), {}),
    ("reset_mm_cache", (), {}),  # as the script says
    ("reset_encoder_cache", (), {}),  # which kills it
    ("complete", ([1],), {}),
]
SCRIPT = Script(
    requests=(RequestRule(first_token=66, finish="error", after_tokens=1), RequestRule(first_token=77, silent=True)),
    utilities=({"method": "reset_mm_cache", "do": "fail"},),  # type: ignore[arg-type]
    faults=(Fault(do="exit", direction="in", kind="reset_encoder_cache", exit_code=7),),
)


def timeless(value: Any) -> Any:
    """What can be compared."""
    if isinstance(value, RequestOutput):
        named = (
            value.request_id,
            value.text,
            value.token_ids,
            value.index,
            value.finish_reason,
            value.prompt_token_ids,
        )
        return named, value.usage, value.num_running, tuple(timeless(one) for one in value.others)
    if isinstance(value, BaseException):
        left_out = ("call_id", "outcomes")  # numbered by the client; the error itself, once more
        return type(value), str(value), {k: timeless(v) for k, v in vars(value).items() if k not in left_out}
    return value


@backends
@pytest.mark.feature("C45")
def test_results_and_errors_are_those_of_the_asynchronous_client(backend: dict[str, Any]) -> None:
    script = msgspec.convert(msgspec.to_builtins(SCRIPT), Script)

    async def outcomes() -> list[Any]:
        results: list[Any] = []
        async with EngineClient(engine=ScriptedTwin(script).engine) as client:
            for name, args, kwargs in CALLS:
                try:
                    results.append(timeless(await getattr(client, name)(*args, **kwargs)))
                except Exception as exc:  # noqa: BLE001 - all of them are compared
                    results.append(timeless(exc))
        return results

    expected, found = anyio.run(outcomes), []
    with SyncEngineClient(engine=ScriptedTwin(script).engine, **backend) as client:
        for name, args, kwargs in CALLS:
            try:
                found.append(timeless(getattr(client, name)(*args, **kwargs)))
            except Exception as exc:  # noqa: BLE001
                found.append(timeless(exc))
    for call, one, other in zip(CALLS, found, expected, strict=True):
        assert one == other, call
    kinds = {one[0] for one in found if isinstance(one, tuple) and one and isinstance(one[0], type)}
    assert len(kinds) >= 8, kinds


@backends
@pytest.mark.feature("C22")
def test_a_block_leaves_nothing_and_can_be_entered_again(backend: dict[str, Any]) -> None:
    """What was delivered before the end is still there, then the end; everything else raises."""
    client = SyncEngineClient(engine=ScriptedTwin(SLOW).engine, strict=True, **backend)
    before = num_client_threads()
    for _ in range(2):
        with client:
            assert client.state is ClientState.READY
            stream = client.submit([1], ENDLESS)
            failing = client.submit([1], ENDLESS)
            first = next(stream)
            events = client.events()
            next(events)
        assert num_client_threads() == before
        assert next(stream).finish_reason == "abort"
        with pytest.raises(StopIteration):
            next(stream)
        assert failing.final().finish_reason == "abort"
        assert [event.state for event in events][-1] is ClientState.CLOSED
        assert client.shutdown_report is not None and client.shutdown_report.aborted_requests == 2
        for late in (
            lambda: client.complete([1]),
            lambda: next(client.generate([1])),
            lambda: client.generate([1]).final(),
            lambda: next(client.generate_many([[1]])),
            lambda: client.submit([1]),
            lambda: client.statistics(),
            lambda: client.paused().__enter__(),
            lambda: client.run(anyio.sleep, 0),  # type: ignore[arg-type]
        ):
            with pytest.raises(ClientClosedError):
                late()
        assert first.token_ids
    with pytest.raises(ClientClosedError, match="not been entered"):
        SyncEngineClient(engine=ScriptedTwin().engine).complete([1])


@pytest.mark.feature("L40")
def test_an_engine_in_a_thread_beside_it() -> None:
    """No process, no event loop of the program's: what a notebook wants."""
    engine = EmbeddedEngine(runner=RUNNER, in_process=True)
    with SyncEngineClient(engine=engine) as client:
        assert client.complete([1], FOUR).token_ids == toy_runner.expected_tokens([1], 4)
        answers = dict(client.generate_many([[2], [3]], FOUR, ordered=True))
    assert {index: out.token_ids for index, out in answers.items()} == {  # type: ignore[union-attr]
        0: toy_runner.expected_tokens([2], 4),
        1: toy_runner.expected_tokens([3], 4),
    }


@pytest.mark.feature("C22")
def test_closing_before_the_end_of_the_block() -> None:
    with SyncEngineClient(engine=ScriptedTwin(SLOW).engine) as client:
        short = client.submit([1], SamplingParams(max_tokens=50))
        client.close(drain_timeout_s=30)
        assert sum(len(out.token_ids) for out in short) == 50
        with pytest.raises(ClientClosedError):
            client.complete([1])
        client.close()


def test_a_body_that_ends_normally_drains_and_one_that_fails_does_not() -> None:
    for failing in (False, True):
        client = SyncEngineClient(engine=ScriptedTwin(SLOW).engine, drain_timeout_s=30)
        try:
            with client:
                stream = client.submit([1], SamplingParams(max_tokens=50))
                if failing:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert failing
        tokens = [token for out in stream for token in out.token_ids]
        assert (len(tokens) < 50) is failing


@backends
@pytest.mark.case("K40")
@pytest.mark.blocking_ok
def test_it_refuses_to_stop_a_running_loop(backend: dict[str, Any]) -> None:
    """Unless that is what its user wants: then its thread, and all else, ends with its block."""

    async def cell() -> None:
        refused = SyncEngineClient(engine=ScriptedTwin().engine, **backend)
        with pytest.raises(WrongLoopError, match="allow_running_loop"), refused:
            pass
        before = num_client_threads()
        with SyncEngineClient(engine=ScriptedTwin().engine, allow_running_loop=True, **backend) as client:
            assert len(client.complete([1], FOUR).token_ids) == 4
            assert sum(len(out.token_ids) for out in client.generate([1], FOUR)) == 4
        assert num_client_threads() == before
        with pytest.raises(WrongLoopError, match="await"):
            entered_outside.complete([1])
        with pytest.raises(WrongLoopError):
            next(entered_outside.generate([1]))
        in_worker = await anyio.to_thread.run_sync(entered_outside.complete, [1], FOUR)
        assert len(in_worker.token_ids) == 4

    with SyncEngineClient(engine=ScriptedTwin().engine, **backend) as entered_outside:
        for own in BACKENDS:
            anyio.run(cell, **own)


@backends
def test_its_own_thread_is_refused(backend: dict[str, Any]) -> None:
    """It would wait for itself."""

    async def inside(asynchronous: EngineClient, number: int, *, named: str) -> tuple[int, str]:
        assert len((await asynchronous.complete([number], FOUR)).token_ids) == 4
        for call in (
            lambda: client.complete([1]),
            lambda: next(stream),
            lambda: client.__exit__(None, None, None),
            lambda: client.paused().__enter__(),
        ):
            with pytest.raises(WrongLoopError, match="own thread"):
                call()
        return number, named

    with SyncEngineClient(engine=ScriptedTwin().engine, **backend) as client:
        stream = client.generate([1], FOUR)
        assert client.run(inside, 3, named="x") == (3, "x")
        assert sum(len(out.token_ids) for out in stream) == 4


VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


@backends
@pytest.mark.blocking_ok
def test_calls_run_in_the_context_of_their_caller(backend: dict[str, Any]) -> None:
    """Its variables, such as the span it is in; and not its event loop, of whichever kind that is."""

    async def look(asynchronous: EngineClient) -> str:
        await anyio.lowlevel.checkpoint()
        assert (await asynchronous.complete([1], FOUR)).finish_reason == "length"
        return VARIABLE.get()

    async def elsewhere() -> None:
        VARIABLE.set("in a loop")
        assert client.run(look) == "in a loop"
        assert await anyio.to_thread.run_sync(client.run, look) == "in a loop"

    with SyncEngineClient(engine=ScriptedTwin().engine, allow_running_loop=True, **backend) as client:
        for own in BACKENDS:
            anyio.run(elsewhere, **own)
        assert copy_context().run(lambda: (VARIABLE.set("outside"), client.run(look))[1]) == "outside"
        assert client.run(look) == "unset"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@backends
def test_a_forked_process_is_refused(backend: dict[str, Any]) -> None:
    """And does no harm to the client of its parent: not by a call, nor by leaving the block."""
    with SyncEngineClient(engine=ScriptedTwin(SLOW).engine, **backend) as client:
        stream = client.generate([1], SamplingParams(max_tokens=300))
        next(stream)
        if (pid := os.fork()) == 0:
            signal.alarm(20)  # it must not hang its parent
            refusals = 0
            for call in (lambda: client.complete([1]), lambda: next(stream), lambda: client.statistics()):
                try:
                    call()
                except WrongLoopError:
                    refusals += 1
            stream.close()
            del stream
            client.__exit__(None, None, None)
            os._exit(refusals)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert stream.final().num_output_tokens == 300


@backends
def test_a_failed_start_says_why_and_leaves_nothing(backend: dict[str, Any]) -> None:
    script = Script(
        startup=(StartupStage(name="loading", end=End(exit_code=3, error="RuntimeError: no such weights")),)
    )
    client = SyncEngineClient(engine=ScriptedTwin(script).engine, **backend)
    with pytest.raises(EngineStartupError, match="no such weights") as caught, client:
        pass
    assert (caught.value.stage, caught.value.exit_code) == ("loading", 3)


def test_an_unknown_backend() -> None:
    with pytest.raises(LookupError), SyncEngineClient(engine=ScriptedTwin().engine, backend="curio"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("settings", [{"backend_options": 3}, {"allow_running_loop": 3}, {"strict": 3}])
def test_settings_of_another_kind(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ValueError, match=f"^{name}=3 must be"):
        SyncEngineClient(engine=ScriptedTwin().engine, **settings)


@backends
def test_a_context_passes_the_bodys_exception_through(backend: dict[str, Any]) -> None:
    """And resumes in every case, KeyboardInterrupt included; what entering raises is raised."""
    with SyncEngineClient(engine=ScriptedTwin().engine, **backend) as client:
        for kind in (ZeroDivisionError, KeyboardInterrupt, StopIteration, StopAsyncIteration):
            with pytest.raises(kind), client.paused():
                assert client.is_paused()
                raise kind
            assert not client.is_paused()
        with pytest.raises(ValueError, match="mode"), client.paused("never"):  # type: ignore[arg-type]
            pass


@backends
@pytest.mark.parametrize("late", [False, True])
def test_a_signal_while_a_context_is_entered_leaves_it(backend: dict[str, Any], late: bool) -> None:
    """Even one whose handler is still at work when it has been entered."""
    main, entered, left = threading.get_ident(), threading.Event(), threading.Event()

    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        signal.pthread_kill(main, signal.SIGUSR1)
        try:
            if not late:
                await anyio.sleep_forever()
            entered.set()
            yield
        finally:
            left.set()

    with SyncEngineClient(engine=ScriptedTwin().engine, **backend) as client:

        def handle(*_: object) -> None:
            if late:
                assert entered.wait(30)
                client.statistics()  # a fence: whoever entered has been told
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            with pytest.raises(KeyboardInterrupt), BlockingContext(client._running(), context()):
                raise AssertionError("the body was run")
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert left.wait(30)


def test_a_cancellation_that_func_makes_itself_is_its_callers_alone() -> None:
    """asyncio's tasks raise it natively; the client goes on."""

    async def waits_for_a_cancelled_task(client: EngineClient) -> None:
        task = asyncio.ensure_future(asyncio.sleep(60))
        task.cancel()
        await task

    with SyncEngineClient(engine=ScriptedTwin().engine, backend="asyncio") as client:
        with pytest.raises(asyncio.CancelledError):
            client.run(waits_for_a_cancelled_task)
        assert len(client.complete([1], FOUR).token_ids) == 4


def test_death_with_cancel_closes_the_client_and_is_raised_at_the_end() -> None:
    script = Script(faults=(Fault(do="exit", direction="in", kind="reset_mm_cache", exit_code=7),))
    with pytest.raises(EngineDeadError) as caught:
        with SyncEngineClient(engine=ScriptedTwin(script).engine, on_death="cancel") as client:
            with pytest.raises(EngineDeadError):
                client.reset_mm_cache()
            until(lambda: client.state is ClientState.CLOSED)
    assert caught.value.exit_code == 7
