"""The same behaviour, whatever is between client and engine: a thread and queues, a process and pipes, or TCP."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from engines import RUNNER, toy

from anyengine import (
    ClientState,
    EmbeddedEngine,
    EngineClient,
    EngineDeadError,
    EngineStartupError,
    OutputKind,
    RemoteEngine,
    SamplingParams,
    Status,
    UtilityError,
)
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio

ATTACHED = """
import json, sys
from anyengine.config import EmbeddedEngine
from anyengine.engine.serving.server import Attachment
from anyengine.engine.start import run_attached_engine
attachment = Attachment(handshake_address=sys.argv[1], local=False, headless=True)
engine = EmbeddedEngine(runner=sys.argv[2], runner_options=json.loads(sys.argv[3]))
run_attached_engine(attachment, engine, report=lambda status: None, on_stop=lambda stop: None)
"""


def in_thread(**options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(runner=RUNNER, runner_options=options, max_num_seqs=256, in_process=True)


@asynccontextmanager
async def client_of(kind: str, **options: Any) -> AsyncIterator[EngineClient]:
    """A client of the toy engine, which is a thread, a process of the client's, or somebody else's."""
    if kind != "remote":
        async with EngineClient(engine=in_thread(**options) if kind == "thread" else toy(**options)) as client:
            yield client
        return
    engines: list[subprocess.Popen[bytes]] = []

    def join(status: Status) -> None:
        arguments = (status.detail, RUNNER, str(options).replace("'", '"'))
        engines.append(subprocess.Popen([sys.executable, "-c", ATTACHED, *arguments], stderr=subprocess.DEVNULL))

    try:
        remote = RemoteEngine(handshake="tcp://127.0.0.1:*")
        async with EngineClient(engine=remote, on_progress=join) as client:
            yield client
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()


HELD = """
import threading
from anyengine._process.status import Status
from anyengine.testing.toy_runner import ToyOptions, ToyRunner

release, stepping = threading.Event(), threading.Event()

class HeldRunner(ToyRunner):
    def step(self, scheduled):
        stepping.set()
        release.wait(20)
        return super().step(scheduled)

def create_runner(config, report):
    return HeldRunner(ToyOptions(), seed=0, max_model_len=2048)

def create_loading_runner(config, report):
    report(Status("loading"))
    release.wait(20)
    report(Status("loading", fraction=0.5))
    raise AssertionError("nobody wants the rest")
"""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of model runners that wait for its ``release``, in a step or while they load."""
    (tmp_path / "held.py").write_text(HELD)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("held")
    del sys.modules["held"]


kinds = pytest.mark.parametrize("kind", ["thread", "process", "remote"])


@pytest.mark.feature("L40")
@kinds
async def test_a_client_s_whole_life(kind: str) -> None:
    with anyio.fail_after(60):
        async with client_of(kind, step_delay_s=0.001) as client:
            for output_kind in OutputKind:
                params = SamplingParams(max_tokens=9, output_kind=output_kind)
                outputs = [out async for out in client.generate([4, 5], params)]
                tokens = [t for out in outputs for t in out.token_ids]
                assert (tokens if output_kind is OutputKind.DELTA else outputs[-1].token_ids) == expected_tokens(
                    [4, 5], 9
                )
            many = [await client.submit([n], SamplingParams(max_tokens=20)) for n in range(50)]
            for n, stream in enumerate(many):
                assert [t async for out in stream for t in out.token_ids] == expected_tokens([n], 20)

            endless = SamplingParams(max_tokens=2000)
            stream = await client.submit([1], endless, request_id="mine")
            await anext(stream)
            assert len(await client.abort("mine")) == 1
            assert [out.finish_reason async for out in stream][-1] == "abort"
            async with client.generate([1], endless) as other:
                await anext(other)
            with anyio.move_on_after(0.02):
                [out async for out in client.generate([1], endless)]
            await client.ping()
            statistics = await client.core.utility("get_engine_statistics")
            assert statistics["num_running_requests"] == 0

            with pytest.raises(UtilityError):
                await client.core.utility("no_such_method", unchecked=True)
            async with client.paused():
                assert await client.is_paused()
            last = await client.submit([1], endless)
        assert [out.finish_reason async for out in last][-1] == "abort"


@pytest.mark.feature("L40")
@kinds
async def test_a_failing_step_is_a_death(kind: str) -> None:
    with anyio.fail_after(60):
        async with client_of(kind, fail_at_step=7) as client:
            with pytest.raises(EngineDeadError) as caught:
                [out async for out in client.generate([1], SamplingParams(max_tokens=100))]
            with pytest.raises(EngineDeadError):
                await client.submit([1])
    if kind != "remote":
        assert "the toy fails at step 7" in str(caught.value)
        assert client.shutdown_report is not None
        assert [one.exit_code for one in client.shutdown_report.exits] == [1]


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("anyengine")]


@pytest.mark.feature("L40")
async def test_one_thread_that_ends_with_the_block() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=[in_thread(), in_thread()]) as client:
            assert sorted(engine_threads()) == ["anyengine-engine-0", "anyengine-engine-1"]
            streams = [await client.submit([n], SamplingParams(max_tokens=2000)) for n in range(2)]
        assert engine_threads() == []
        assert [[out.finish_reason async for out in stream][-1] for stream in streams] == ["abort", "abort"]


async def test_cancellation_waits_for_the_step_and_never_abandons_the_thread(held: ModuleType) -> None:
    seen: list[list[str]] = []

    async def release() -> None:
        async for event in client.events():
            if event.state is ClientState.CLOSING:
                await anyio.sleep(0.05)  # beyond the grace
                seen.append(engine_threads())
                held.release.set()
                return

    client = EngineClient(engine=EmbeddedEngine(runner="held:create_runner", in_process=True), shutdown_grace_s=0.01)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(release)
            with anyio.CancelScope() as scope:
                async with client:
                    stream = await client.submit([1], SamplingParams(max_tokens=2000))
                    while not held.stepping.is_set():  # noqa: ASYNC110 - it is another thread's
                        await anyio.sleep(0.001)
                    scope.cancel()
                    await anyio.sleep_forever()
            assert scope.cancelled_caught
            assert (seen, engine_threads()) == ([["anyengine-engine-0"]], [])
            assert [out.finish_reason async for out in stream] == ["abort"]
    report = client.shutdown_report
    assert report is not None and [killed.pid for killed in report.killed] == [None]


async def test_a_failed_load_is_a_failed_start() -> None:
    with anyio.fail_after(30), pytest.raises(EngineStartupError, match="no room") as caught:
        async with EngineClient(engine=in_thread(fail_on_load="no room for the weights")):
            pytest.fail("it must not become ready")
    assert caught.value.stage == "loading"
    assert engine_threads() == []


async def test_a_cancelled_load_ends_at_its_next_report(held: ModuleType) -> None:
    loading = anyio.Event()

    def on_progress(status: Status) -> None:
        if status.stage == "loading":
            loading.set()

    async def cancel(scope: anyio.CancelScope) -> None:
        await loading.wait()
        scope.cancel()
        await anyio.lowlevel.cancel_shielded_checkpoint()
        held.release.set()

    engine = EmbeddedEngine(runner="held:create_loading_runner", in_process=True)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                tasks.start_soon(cancel, scope)
                async with EngineClient(engine=engine, on_progress=on_progress):
                    pytest.fail("it must not become ready")
            assert scope.cancelled_caught
    assert engine_threads() == []
