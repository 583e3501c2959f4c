"""How an engine process starts, fails, stops and dies: exit codes, last words, and no orphan whatever happens to the
host."""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from foreign_frontend import ABORT, DEAD, DEADLINE_S, ForeignFrontend, assert_gone, tokens

import anyengine.engine
from anyengine.testing.toy_runner import expected_tokens

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[ForeignFrontend]:
    with ForeignFrontend(tmp_path) as frontend:
        yield frontend


def stages(frontend: ForeignFrontend) -> list[str]:
    return [line["stage"] for line in frontend.status_lines()]


@contextmanager
def own_runner(directory: Path, module: str, source: str) -> Iterator[None]:
    """Engines started inside can import ``module``."""
    (directory / f"{module}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(directory), os.environ["PYTHONPATH"]]))
        yield


def test_a_failing_step_sends_the_dead_sentinel_last_to_every_client(tmp_path: Path) -> None:
    with ForeignFrontend(tmp_path, num_clients=2) as frontend:
        frontend.start(fail_at_step=3)
        frontend.add("a", PROMPT, max_tokens=9)
        *outputs, _last = frontend.receive_until(lambda message: message is DEAD)
        assert len(outputs) == 2
        assert frontend.receive(client=1) is DEAD
        assert frontend.wait_exit() == 1
        assert not any(socket.poll(0) for socket in frontend.outputs)
        assert "RuntimeError: the toy fails at step 3, as told" in frontend.stderr
        assert frontend.status_lines()[-1]["error"]["message"] == "the toy fails at step 3, as told"


def test_a_failing_load_is_reported_with_its_own_exception(frontend: ForeignFrontend) -> None:
    frontend.launch(fail_on_load="no such weights")
    frontend.answer_hello()
    assert frontend.wait_exit() == 1
    *_, loading, failed = frontend.status_lines()
    assert (loading["stage"], failed["stage"]) == ("loading", "failed")
    assert (failed["error"]["type"], failed["error"]["message"]) == ("RuntimeError", "no such weights")
    assert "create_runner" in failed["error"]["traceback"]
    assert "RuntimeError: no such weights" in frontend.stderr


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"runner": "no_such_module:f"}, "No module named 'no_such_module'"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"runner_options": {"unknown": 1}}, "unknown"),
    ],
)
def test_bad_settings_are_reported(frontend: ForeignFrontend, engine: dict[str, object], text: str) -> None:
    frontend.launch(engine)
    if "max_num_seqs" not in engine:
        frontend.answer_hello()
    assert frontend.wait_exit() == 1
    assert text in frontend.status_lines()[-1]["error"]["message"]


def test_sigterm_ends_every_request_with_abort_and_exits_0(frontend: ForeignFrontend) -> None:
    process = frontend.start({"max_num_seqs": 1}, step_delay_s=0.01).process
    assert process is not None
    frontend.add("running", PROMPT, max_tokens=2000)
    frontend.receive()
    frontend.add("waiting", PROMPT, max_tokens=2000)
    pending_call = frontend.call_nowait("pause_scheduler", "wait")
    assert frontend.statistics()["num_waiting_requests"] == 1
    process.terminate()
    messages = frontend.receive_until(lambda message: bool(message[4]))
    finished = {output[0]: output[5] for message in messages for output in message[1] if output[5] is not None}
    assert finished == {"running": ABORT, "waiting": ABORT}
    assert messages[-1][4] == [pending_call, "Server shutting down", None]
    assert frontend.wait_exit() == 0
    assert not frontend.outputs[0].poll(0)  # in particular no ENGINE_CORE_DEAD
    assert stages(frontend) == ["importing", "handshake", "loading", "ready"]


def test_an_idle_engine_stops_on_sigterm(frontend: ForeignFrontend) -> None:
    process = frontend.start().process
    assert process is not None
    process.terminate()
    assert frontend.wait_exit() == 0
    assert not frontend.outputs[0].poll(0)


@pytest.mark.parametrize("answer", [True, False], ids=["while loading", "while waiting for INIT"])
def test_sigterm_during_start_up_exits_at_once(frontend: ForeignFrontend, answer: bool) -> None:
    process = frontend.launch(hang_on_load=True)
    assert process.stdout is not None
    if answer:
        frontend.answer_hello()
    wanted = b'"loading"' if answer else b'"handshake"'
    while wanted not in process.stdout.readline():
        pass
    process.terminate()
    assert frontend.wait_exit() == 0


@pytest.mark.feature("L38")
def test_sigint_is_the_hosts_business(frontend: ForeignFrontend) -> None:
    process = frontend.start(step_delay_s=0.005).process
    assert process is not None
    frontend.add("a", PROMPT, max_tokens=20)
    first = frontend.receive()[1]
    process.send_signal(signal.SIGINT)
    assert tokens([*first, *frontend.collect("a")["a"]]) == expected_tokens(PROMPT, 20)


def test_the_end_of_standard_input_is_the_end_of_the_engine(frontend: ForeignFrontend) -> None:
    process = frontend.start(step_delay_s=0.005).process
    assert process is not None
    assert process.stdin is not None
    frontend.add("a", PROMPT, max_tokens=2000)
    frontend.receive()
    process.stdin.close()
    frontend.wait_exit()


def test_the_end_of_standard_input_ends_a_loading_engine(frontend: ForeignFrontend) -> None:
    process = frontend.launch(hang_on_load=True)
    assert process.stdin is not None
    frontend.answer_hello()
    process.stdin.close()
    frontend.wait_exit()


def test_a_stuck_engine_ends_with_its_standard_input(frontend: ForeignFrontend, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step")
    source = f"""
from anyengine.testing import toy_runner
class StuckRunner(toy_runner.ToyRunner):
    def step(self, scheduled):
        with open({str(tmp_path / "step")!r}, "w"):
            while True:
                pass
def create_runner(config, report):
    return StuckRunner(toy_runner.ToyOptions(), seed=0, max_model_len=99)
"""
    with own_runner(tmp_path, "stuck", source):
        process = frontend.start({"runner": "stuck:create_runner"}).process
        assert process is not None
        assert process.stdin is not None
        frontend.add("a", PROMPT)
        with (tmp_path / "step").open():  # opens when the step has begun
            process.stdin.close()
            assert frontend.wait_exit() == 1


HOST = """
import os, subprocess, sys
line, engine_stdin = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
engine = subprocess.Popen([sys.executable, "-m", "anyengine.engine"], stdin=engine_stdin, stdout=subprocess.DEVNULL)
print(engine.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.feature("L18")
@pytest.mark.case("K10")
@pytest.mark.parametrize("loading", [True, False], ids=["while loading", "while serving"])
def test_a_killed_host_takes_its_engine_along(frontend: ForeignFrontend, loading: bool) -> None:
    line = frontend.launch_line({}, hang_on_load=loading, step_delay_s=0.005)
    reader, writer = os.pipe()  # we keep the engine's standard input open: the parent-death signal alone must do it
    command = [sys.executable, "-c", HOST, line.hex(), str(reader)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[reader]) as host:
        try:
            os.write(writer, line)
            assert host.stdout is not None
            engine_pid = int(host.stdout.readline())
            if loading:
                frontend.answer_hello()
            else:
                frontend.shake_hands()
                frontend.add("a", PROMPT, max_tokens=2000)
                frontend.receive()
            host.kill()
            host.wait(DEADLINE_S)
            assert_gone(engine_pid)
        finally:
            host.kill()
            os.close(reader)
            os.close(writer)


def test_standard_output_carries_status_lines_only_and_standard_input_is_private(
    frontend: ForeignFrontend, tmp_path: Path
) -> None:
    source = """
import os, sys
from anyengine.testing import toy_runner
def create_runner(config, report):
    print("a library prints")
    os.system("echo a child prints")
    assert sys.stdin.read() == ""
    return toy_runner.create_runner(config, report)
"""
    with own_runner(tmp_path, "chatty", source):
        process = frontend.start({"runner": "chatty:create_runner"}).process
        assert process is not None
        process.terminate()
        assert frontend.wait_exit() == 0
        assert stages(frontend) == ["importing", "handshake", "loading", "ready"]
        assert "a library prints" in frontend.stderr
        assert "a child prints" in frontend.stderr


@pytest.mark.feature("F06")
def test_the_engine_and_the_wire_import_no_pickle() -> None:
    root = Path(anyengine.engine.__file__).parents[1]
    for source in [*root.glob("engine/**/*.py"), *root.glob("_wire/*.py"), *root.glob("_process/*.py")]:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}


def test_a_toy_engine_loads_no_torch(frontend: ForeignFrontend) -> None:
    process = frontend.start().process
    assert process is not None
    assert importlib.util.find_spec("torch") is None or "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
