"""A real vLLM engine core that does not start, dies, or is killed: the right error in time, and nothing left behind.

The automatic leak check sees processes and the files of vLLM's private directory; shared memory is looked at here.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import psutil
import pytest
from anyio.abc import TaskStatus
from vllm_engines import Holdings, make_vllm_model, on_asyncio, on_trio, one_process, tiny_vllm

from anyengine import (
    EngineClient,
    EngineDeadError,
    EngineError,
    EngineStartupError,
    RequestFailed,
    SamplingParams,
    Status,
    VLLMEngine,
)

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


def client_of(engine: VLLMEngine, on_progress: Callable[[Status], None] | None = None) -> EngineClient:
    return EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30, on_progress=on_progress)


# ------------------------------------------------------------------------------------------------------------ start-up


async def start_up_error(engine: VLLMEngine, on_progress: Callable[[Status], None] | None = None) -> EngineStartupError:
    with pytest.raises(EngineStartupError) as caught:
        async with client_of(engine, on_progress):
            pytest.fail("it must not become ready")
    return caught.value


@pytest.mark.feature("F01", "L03")
@on_asyncio
async def test_vllms_own_exception_is_in_the_error(vllm_python: str, model: Path) -> None:
    """At the same time, since most of it is importing vLLM."""
    errors: dict[str, EngineStartupError] = {}

    async def start(name: str, engine: VLLMEngine) -> None:
        errors[name] = await start_up_error(engine)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start, "model", tiny_vllm(vllm_python, "/no/such/model"))
            tasks.start_soon(start, "argument", tiny_vllm(vllm_python, model, no_such_argument=1))
            tasks.start_soon(start, "value", tiny_vllm(vllm_python, model, max_model_len=10**6))
    assert {(error.exit_code, error.signal, error.stage) for error in errors.values()} == {(1, None, "configuring")}
    expected = {
        "model": "/no/such/model",
        "argument": "TypeError: AsyncEngineArgs.__init__() got an unexpected keyword argument 'no_such_argument'",
        "value": "1000000",
    }
    for name, words in expected.items():
        assert words in (errors[name].child_exception or "")
        assert words in str(errors[name])
        assert errors[name].stderr_tail


@pytest.mark.feature("L03")
@on_trio
async def test_killed_while_loading(vllm_python: str, model: Path) -> None:
    """When it has a worker that is loading, too."""
    loading = anyio.Event()
    holdings: list[Holdings] = []

    def on_progress(status: Status) -> None:
        if status.stage == "loading":
            loading.set()

    async def kill() -> None:
        await loading.wait()
        # Not the only child: the codec tests keep one of their own.
        (engine,) = [child for child in psutil.Process().children() if "launcher.py" in " ".join(child.cmdline())]
        while len(engine.children()) < 2:  # noqa: ASYNC110 - its worker, and multiprocessing's resource tracker
            await anyio.sleep(0.02)
        holdings.append(Holdings.of(engine.pid))
        engine.kill()

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            error = await start_up_error(tiny_vllm(vllm_python, model), on_progress)
    assert (error.signal, error.stage) == ("SIGKILL", "loading")
    assert not holdings[0].left()


# --------------------------------------------------------------------------------------------------------------- death


class Victim:
    """An engine in the middle of a request, and what the request's consumer is told."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.pid = client.core.session.engines[0].child.pid
        self.holdings = Holdings.of(self.pid)
        self.error: EngineError | None = None

    async def generate(self, *, task_status: TaskStatus[None]) -> None:
        try:
            async with self.client.generate([1, 2, 3], LONG) as stream:
                await anext(stream)
                task_status.started()
                async for out in stream:
                    if out.finish_reason is not None:
                        pytest.fail(f"the request was not failed, but finished: {out.finish_reason}")
        except EngineError as exc:
            self.error = exc

    async def suffer(self, act: Callable[[], None], limit_s: float) -> EngineDeadError:
        """Act while it generates; how the client ends, within ``limit_s``."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.generate)
            act()
            with anyio.fail_after(limit_s):
                return await self.client.wait_dead()


@pytest.mark.feature("L05")
async def test_kill_9(vllm_python: str, model: Path) -> None:
    with anyio.fail_after(120):
        async with client_of(tiny_vllm(vllm_python, model)) as client:
            victim = Victim(client)
            assert victim.holdings.workers and victim.holdings.shared_memory
            cause = await victim.suffer(lambda: os.kill(victim.pid, signal.SIGKILL), limit_s=2)
    assert (cause.pid, cause.signal, cause.rank) == (victim.pid, "SIGKILL", 0)
    assert type(victim.error) is EngineDeadError
    assert not victim.holdings.left()


@on_asyncio
async def test_sigterm_from_outside(vllm_python: str, model: Path) -> None:
    """vLLM aborts what runs, and goes with exit code 0."""
    with anyio.fail_after(120):
        async with client_of(tiny_vllm(vllm_python, model, env=one_process)) as client:
            victim = Victim(client)
            cause = await victim.suffer(lambda: os.kill(victim.pid, signal.SIGTERM), limit_s=30)
    assert (cause.pid, cause.exit_code, cause.signal) == (victim.pid, 0, None)
    assert isinstance(victim.error, RequestFailed) and victim.error.partial.token_ids
    assert not victim.holdings.left()


@pytest.mark.feature("L05")
@on_trio
async def test_a_killed_worker_takes_the_engine_with_it(vllm_python: str, model: Path) -> None:
    """vLLM says ENGINE_CORE_DEAD, and exits in its own time."""
    with anyio.fail_after(120):
        async with client_of(tiny_vllm(vllm_python, model)) as client:
            victim = Victim(client)
            (worker,) = victim.holdings.workers
            cause = await victim.suffer(worker.kill, limit_s=5)
    assert cause.pid == victim.pid
    # On a full machine its sockets may close before its last word is read, and long before it ends.
    assert "ENGINE_CORE_DEAD" in str(cause) or cause.exit_code == 1 or "connection is gone" in str(cause)
    assert type(victim.error) is EngineDeadError
    assert not victim.holdings.left()


# -------------------------------------------------------------------------------------------------- death of the host

HOST = """
import sys, anyio, msgspec
from anyengine import EngineClient, VLLMEngine

async def main():
    async with EngineClient(engine=msgspec.json.decode(sys.argv[1], type=VLLMEngine)) as client:
        print(client.core.session.engines[0].child.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[2])
"""


def remove_leftovers(directory: Path) -> None:
    """The host's own sockets: nobody was left to remove them."""
    for path in directory.iterdir():
        shutil.rmtree(path)


@on_trio
async def test_an_engine_ends_with_its_host(
    vllm_python: str, model: Path, private_temp_dir: Path, anyio_backend_name: str
) -> None:
    engine = tiny_vllm(vllm_python, model)
    directory = private_temp_dir / "t"
    directory.mkdir()
    env = {**os.environ, "TMPDIR": str(directory)}
    command = [sys.executable, "-c", HOST, msgspec.json.encode(engine).decode(), anyio_backend_name]
    with anyio.fail_after(120):
        async with await anyio.open_process(command, env=env, stderr=None) as host:
            assert host.stdout is not None
            holdings = Holdings.of(int(await host.stdout.receive()))
            assert list(directory.iterdir())
            host.kill()
    with anyio.fail_after(15):
        while holdings.left():  # noqa: ASYNC110 - they are not our children: nothing else tells
            await anyio.sleep(0.05)
    assert not list(directory.iterdir())
    remove_leftovers(private_temp_dir)
