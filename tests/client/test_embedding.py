"""Living inside somebody's program: interpreter exit, host death, pytest, signal handlers, threads, repeated use."""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import psutil
import pytest
from engines import RUNNER, toy

from anyengine import ClientState, EmbeddedEngine, EngineClient, EngineDeadError, RequestStream, SamplingParams
from anyengine.testing.toy_runner import expected_tokens

PROGRAM = """
    import anyio, faulthandler, os, signal, sys
    from anyengine import EmbeddedEngine, EngineClient, SamplingParams

    async def main():
        engine = EmbeddedEngine(runner=RUNNER, runner_options={"step_delay_s": 0.01, "max_model_len": 100000})
        try:
            async with EngineClient(engine=engine) as client:
                print(client.core.session.engines[0].child.pid, flush=True)
                BODY
        finally:
            print("left", flush=True)

    try:
        anyio.run(main, backend=sys.argv[1])
    finally:
        faulthandler.dump_traceback_later(1, exit=True)  # the bound of K18: the interpreter ends by then, or is ended
"""


def program(body: str) -> str:
    indented = textwrap.indent(textwrap.dedent(body).strip(), " " * 16).strip()
    return textwrap.dedent(PROGRAM.replace("RUNNER", repr(RUNNER)).replace("BODY", indented))


def start(body: str, backend: str) -> tuple[subprocess.Popen[str], int]:
    """A host program and the pid of its engine."""
    host = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program(body), backend],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert host.stdout is not None
    return host, int(host.stdout.readline())


def finish(host: subprocess.Popen[str], within_s: float) -> str:
    """Wait for the end of a host program; what it has written to standard error."""
    try:
        return host.communicate(timeout=within_s)[1]
    finally:
        host.kill()  # if it is too late
        host.wait()


def await_end(pid: int, within_s: float) -> None:
    """Wait until ``pid`` is gone (a zombie that its new parent has not reaped counts as gone)."""
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} survived its host"
        time.sleep(0.01)


backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@pytest.mark.feature("L18", budget_s=2)
@backends
@pytest.mark.parametrize("moment", ["idle", "streaming"])
def test_a_killed_host_takes_its_engine_along(backend: str, moment: str, private_temp_dir: Path) -> None:
    body = "await anyio.sleep_forever()"
    if moment == "streaming":
        body = """
            async for out in client.generate([1], SamplingParams(max_tokens=50000)):
                print("token", flush=True)
        """
    host, engine_pid = start(body, backend)
    if moment == "streaming":
        assert host.stdout is not None and host.stdout.readline() == "token\n"
    host.kill()
    await_end(engine_pid, within_s=2)
    host.communicate(timeout=10)
    for directory in private_temp_dir.glob("anyengine-*"):
        shutil.rmtree(directory)  # a killed host cannot remove its sockets' directory


@pytest.mark.case("K18", budget_s=1)
@backends
@pytest.mark.parametrize(
    "route", ["raise ZeroDivisionError", "sys.exit(3)", "signal.raise_signal(signal.SIGINT)", "return"]
)
def test_every_route_out_ends_the_interpreter_promptly(backend: str, route: str) -> None:
    """With requests running and frames queued to the engine; -W error makes a leftover ZMQ object or task visible."""
    body = f"""
        streams = [await client.submit([n], SamplingParams(max_tokens=50000)) for n in range(5)]
        os.kill(client.core.session.engines[0].child.pid, signal.SIGSTOP)
        for n in range(20):
            streams.append(await client.submit([1] * 90_000, SamplingParams(max_tokens=1)))
        os.kill(client.core.session.engines[0].child.pid, signal.SIGKILL)
        {route}
    """
    host, engine_pid = start(body, backend)
    assert host.stdout is not None and host.stdout.readline() == "left\n"
    errors = finish(host, within_s=1)
    assert not psutil.pid_exists(engine_pid)
    assert "ResourceWarning" not in errors
    assert "Timeout (" not in errors, "the interpreter had to be ended"
    expected = {"return": 0, "sys.exit(3)": 3, "raise ZeroDivisionError": 1}.get(route)
    if expected is not None:
        assert host.returncode == expected, errors
    else:
        assert "KeyboardInterrupt" in errors


@pytest.mark.case("K17", budget_s=5)
@backends
def test_a_bodys_exception_ends_the_program_as_it_is(backend: str) -> None:
    """From the exception, with requests running, to the end of the interpreter."""
    body = """
        streams = [await client.submit([n], SamplingParams(max_tokens=50000)) for n in range(5)]
        print("raising", flush=True)
        raise ZeroDivisionError("the body's own")
    """
    host, engine_pid = start(body, backend)
    assert host.stdout is not None and host.stdout.readline() == "raising\n"
    errors = finish(host, within_s=5)
    assert not psutil.pid_exists(engine_pid)
    assert host.returncode == 1
    assert errors.endswith("\nZeroDivisionError: the body's own\n")
    assert "Group" not in errors and "Warning" not in errors


@pytest.mark.feature("L38")
@backends
def test_the_hosts_own_ctrl_c_handler_runs_and_the_client_drains(backend: str) -> None:
    """A terminal's Ctrl-C goes to the whole foreground process group; the engine is not in it."""
    body = """
        received = anyio.Event()
        async def watch(*, task_status=anyio.TASK_STATUS_IGNORED):
            with anyio.open_signal_receiver(signal.SIGINT) as signals:
                task_status.started()
                async for number in signals:
                    received.set()
                    return
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch)
            stream = await client.submit([1], SamplingParams(max_tokens=30))
            os.killpg(0, signal.SIGINT)
            await received.wait()
            tokens = [t async for out in stream for t in out.token_ids]
        print(len(tokens), flush=True)
    """
    host = subprocess.Popen(
        [sys.executable, "-c", program(body), backend],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    out, errors = host.communicate(timeout=30)
    assert host.returncode == 0, errors
    assert out.split()[1] == "30"


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


@pytest.mark.anyio
@pytest.mark.feature("L38")
@pytest.mark.case("K39")
async def test_signal_handlers_are_untouched() -> None:
    """Neither before, during nor after: those of the loop, and one that the application has set."""
    starting: list[dict[int, Any]] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        before = handlers()
        client = EngineClient(engine=toy(), on_progress=lambda status: starting.append(handlers()))
        with anyio.fail_after(30):
            async with client:
                assert handlers() == before
                [out async for out in client.generate([1], SamplingParams(max_tokens=3))]
            assert handlers() == before
    finally:
        signal.signal(signal.SIGTERM, former)
    assert starting and all(seen == before for seen in starting)


LOCKING = """
import fcntl
from anyengine.testing import toy_runner

def create_runner(config, report):
    lock = open("LOCK", "w")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another engine has it, as a device would
    runner = toy_runner.create_runner(config, report)
    runner.lock = lock
    return runner
"""


@pytest.fixture
def exclusive_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EmbeddedEngine:
    (tmp_path / "locking.py").write_text(LOCKING.replace("LOCK", str(tmp_path / "lock"), 1))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return EmbeddedEngine(runner="locking:create_runner")


@pytest.mark.anyio
@pytest.mark.case("K15")
async def test_twenty_times_in_a_row(exclusive_engine: EmbeddedEngine) -> None:
    """Each engine process is reaped before the next statement, even while outputs and tracebacks are still
    referenced: the next one needs what it held."""
    kept: list[object] = []
    with anyio.fail_after(120):
        for round_ in range(20):
            try:
                async with EngineClient(engine=exclusive_engine) as client:
                    pid = client.core.session.engines[0].child.pid
                    kept.append([out async for out in client.generate([round_], SamplingParams(max_tokens=2))])
                    kept.append(await client.submit([1], SamplingParams(max_tokens=1000)))
                    if round_ % 5 == 4:
                        raise ZeroDivisionError
            except ZeroDivisionError as exc:
                kept.append(exc)
            assert pid is not None and not psutil.pid_exists(pid)


@pytest.mark.anyio
@pytest.mark.case("K07")
async def test_after_a_fatal_error_a_fresh_client_works_at_once(exclusive_engine: EmbeddedEngine) -> None:
    """Every pending stream raises within 2 s, and so does every later call; nothing of the first is left."""
    failing = msgspec.structs.replace(exclusive_engine, runner_options={"fail_at_step": 100, "step_delay_s": 0.01})
    errors: list[EngineDeadError] = []

    async def consume(stream: RequestStream) -> None:
        with pytest.raises(EngineDeadError) as caught:
            [out async for out in stream]
        errors.append(caught.value)

    with anyio.fail_after(60) as limit:
        async with EngineClient(engine=failing) as client:
            async with anyio.create_task_group() as consumers:
                for n in range(20):
                    consumers.start_soon(consume, await client.submit([n], SamplingParams(max_tokens=2000)))
                await client.wait_dead()
                limit.deadline = anyio.current_time() + 2
            limit.deadline = anyio.current_time() + 60
            assert len(errors) == 20
            with pytest.raises(EngineDeadError):
                await client.submit([1])
        async with EngineClient(engine=exclusive_engine) as fresh:
            tokens = [t async for out in fresh.generate([1], SamplingParams(max_tokens=5)) for t in out.token_ids]
            assert tokens == expected_tokens([1], 5)


@pytest.mark.case("K17", budget_s=5)
def test_a_failing_test_leaves_nothing_for_the_next(pytester: pytest.Pytester) -> None:
    """An assertion fails inside the block; the next test finds the engine's exclusive lock free; the interpreter
    exits in time."""
    pytester.makeconftest(
        """
        import faulthandler
        import sys

        def pytest_unconfigure():
            faulthandler.dump_traceback_later(5, exit=True, file=sys.__stderr__)
        """
    )
    pytester.makepyfile(
        f"""
        import os
        import psutil
        import pytest
        from anyengine import EmbeddedEngine, EngineClient

        pids = []
        engine = EmbeddedEngine(runner={RUNNER!r})

        @pytest.mark.anyio
        async def test_fails():
            async with EngineClient(engine=engine) as client:
                pids.append(client.core.session.engines[0].child.pid)
                assert 1 == 2

        @pytest.mark.anyio
        async def test_next():
            assert pids and not any(psutil.pid_exists(pid) for pid in pids)
            async with EngineClient(engine=engine):
                pass
        """
    )
    result = pytester.runpytest_subprocess("-p", "anyio", "-p", "no:cacheprovider", timeout=60)
    result.assert_outcomes(failed=2, passed=2)  # asyncio and trio
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    result.stderr.no_fnmatch_line("*Timeout (*")


@pytest.mark.case("K39")
def test_use_in_a_thread_with_its_own_loop() -> None:
    """The basic run in a non-main thread, on every loop, one after the other; signals are the main thread's."""
    results: list[list[int]] = []
    before = handlers()

    async def main() -> None:
        with anyio.fail_after(30):
            async with EngineClient(engine=toy()) as client:
                results.append(
                    [t async for out in client.generate([3], SamplingParams(max_tokens=5)) for t in out.token_ids]
                )

    for backend, options in (("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})):
        thread = threading.Thread(
            target=anyio.run, args=(main,), kwargs={"backend": backend, "backend_options": options}
        )
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        assert handlers() == before
    assert results == [expected_tokens([3], 5)] * 3


@pytest.mark.case("K40")
def test_cells_of_a_notebook_need_no_patch_of_its_loop() -> None:
    """A kernel's loop runs already, with tasks of its own, and runs one cell after the other, each in a task, with a
    top-level await; the last four share one client."""
    cells = [
        """
        async with EngineClient(engine=EmbeddedEngine(runner=RUNNER, in_process=True)) as client:
            first = [t async for out in client.generate([3], SamplingParams(max_tokens=5)) for t in out.token_ids]
        """,
        """
        client = EngineClient(engine=EmbeddedEngine(runner=RUNNER))
        async with client, client.generate([4], SamplingParams(max_tokens=5)) as stream:
            second = [t async for out in stream for t in out.token_ids]
        """,
        """
        import asyncio
        client, leave = EngineClient(engine=EmbeddedEngine(runner=RUNNER, in_process=True)), asyncio.Event()

        async def own():
            async with client:
                await leave.wait()

        owner = asyncio.create_task(own())
        async for event in client.events():
            if event.state is ClientState.READY:
                break
        """,
        "third = [t async for out in client.generate([5], SamplingParams(max_tokens=5)) for t in out.token_ids]",
        "fourth = [t async for out in client.generate([6], SamplingParams(max_tokens=5)) for t in out.token_ids]",
        "leave.set(); await owner",
    ]
    names: dict[str, Any] = {
        "EngineClient": EngineClient,
        "EmbeddedEngine": EmbeddedEngine,
        "ClientState": ClientState,
        "SamplingParams": SamplingParams,
        "RUNNER": RUNNER,
    }

    async def kernel() -> None:
        async with anyio.create_task_group() as own:
            own.start_soon(anyio.sleep_forever)
            for cell in cells:
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                code = compile(textwrap.dedent(cell), "<cell>", "exec", flags=flags)
                with anyio.fail_after(30):
                    await asyncio.create_task(eval(code, names))
            own.cancel_scope.cancel()

    anyio.run(kernel)
    for prompt, name in enumerate(("first", "second", "third", "fourth"), 3):
        assert names[name] == expected_tokens([prompt], 5)
    assert names["client"].state is ClientState.CLOSED


def test_one_client_object_in_successive_runs_of_different_backends() -> None:
    client = EngineClient(engine=toy())

    async def main() -> list[int]:
        with anyio.fail_after(30):
            async with client:
                return [t async for out in client.generate([3], SamplingParams(max_tokens=5)) for t in out.token_ids]

    for backend in ("asyncio", "trio", "asyncio"):
        assert anyio.run(main, backend=backend) == expected_tokens([3], 5)


@pytest.mark.anyio
@pytest.mark.feature("L23")
@pytest.mark.case("K42")
async def test_two_clients_nested_and_concurrent() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as outer:
            outer_stream = await outer.submit([1], SamplingParams(max_tokens=30))
            async with EngineClient(engine=toy(vocab_size=50)) as inner:
                tokens = [t async for out in inner.generate([1], SamplingParams(max_tokens=5)) for t in out.token_ids]
                assert tokens == expected_tokens([1], 5, vocab_size=50)
                os.kill(inner.core.session.engines[0].child.pid, signal.SIGKILL)
                await inner.wait_dead()
            assert [t async for out in outer_stream for t in out.token_ids] == expected_tokens([1], 30)


@pytest.mark.anyio
@pytest.mark.feature("L23")
@pytest.mark.case("K42")
async def test_concurrent_clients_share_nothing() -> None:
    """Different models, each with its own addresses, ids and counters; a death is one client's."""

    async def live(vocab_size: int, dies: bool) -> None:
        engine = toy(vocab_size=vocab_size, step_delay_s=0.002)
        async with EngineClient(engine=engine) as client:
            entered[vocab_size] = client
            if len(entered) == 3:
                everybody.set()
            await everybody.wait()
            endless = await client.submit([2], SamplingParams(max_tokens=2000), request_id="same label")
            if dies:
                await anext(endless)
                os.kill(client.core.session.engines[0].child.pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError):
                    [out async for out in endless]
                return
            await entered[50].wait_dead()
            tokens = [t async for out in client.generate([1], SamplingParams(max_tokens=9)) for t in out.token_ids]
            assert tokens == expected_tokens([1], 9, vocab_size=vocab_size)
            assert client.statistics()["requests_in_flight"] == 1
            await client.abort("same label")

    entered: dict[int, EngineClient] = {}
    everybody = anyio.Event()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as clients:
            for vocab_size in (50, 500, 900):
                clients.start_soon(live, vocab_size, vocab_size == 50)
    sessions = [client.core.session for client in entered.values()]
    assert len({session.endpoints.input_address for session in sessions}) == 3
    assert len({session.connection.utilities.prefix for session in sessions}) == 3


@pytest.mark.feature("L39")
def test_under_pytest_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import pytest
        from anyengine import EmbeddedEngine, EngineClient, SamplingParams

        @pytest.mark.anyio
        @pytest.mark.parametrize("in_process", [False, True])
        async def test_generates(in_process):
            async with EngineClient(engine=EmbeddedEngine(runner={RUNNER!r}, in_process=in_process)) as client:
                assert len([out async for out in client.generate([1], SamplingParams(max_tokens=3))]) > 0
        """
    )
    result = pytester.runpytest_subprocess("-n", "2", "-p", "anyio", "-p", "no:cacheprovider", timeout=60)
    result.assert_outcomes(passed=4)  # asyncio and trio


@pytest.mark.anyio
async def test_a_clean_exit_makes_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    with anyio.fail_after(60):
        for _ in range(10):
            async with EngineClient(engine=toy(step_delay_s=0.001)) as client:
                streams = [await client.submit([n], SamplingParams(max_tokens=1000)) for n in range(5)]
            assert [out.finish_reason async for out in streams[0]][-1] == "abort"
    loud = [record for record in caplog.records if record.levelname not in ("DEBUG", "INFO")]
    assert [record for record in loud if record.name != "asyncio"] == []  # which tells of a slow machine
