"""However and whenever the host dies, nothing of its engines outlives it, and the next start finds a clean place."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import psutil
import pytest
from engines import RUNNER, toy

from anyengine import EngineClient, SamplingParams
from anyengine._owned_directories import remove_leftovers
from anyengine.testing.toy_runner import expected_tokens

HOST = """
import anyio, ctypes, multiprocessing, os, signal, sys
from anyengine import EmbeddedEngine, EngineClient, SamplingParams

how, stage, start = sys.argv[1:4]
kin, stage = stage.startswith("kin "), stage.removeprefix("kin ")

def die():
    print("dying", flush=True)
    sys.stdin.readline()  # the test has looked at our children
    if how == "exit":
        os._exit(3)
    elif how == "segfault":
        ctypes.string_at(0)
    else:
        os.kill(os.getpid(), signal.SIGKILL)

def engine():
    options = {"step_delay_s": 0.01, "hang_on_load": stage == "loading"}
    return EmbeddedEngine(runner="kin:create" if kin else "RUNNER", runner_options=options)

def on_progress(status):
    if status.stage == stage:
        die()

async def main():
    engines = [engine(), engine()] if stage == "two ranks" else engine()
    async with EngineClient(engine=engines, on_progress=on_progress) as client:
        if stage == "two clients":
            async with EngineClient(engine=engine()) as other:
                await other.submit([1], SamplingParams(max_tokens=2000))
                die()
        if stage != "idle":
            stream = await client.submit([1], SamplingParams(max_tokens=2000))
            await anext(stream)
        die()

def run():
    sys.stdin = open(0)  # multiprocessing gives its children another one
    anyio.run(main)

if __name__ == "__main__":
    if start == "direct":
        run()
    else:
        host = multiprocessing.get_context(start).Process(target=run)
        host.start()
        host.join()
""".replace("RUNNER", RUNNER)

KIN = """
import subprocess, sys
from MODULE import NAME

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

def create(config, report):
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=sys.stderr)
    return NAME(config, report)
""".replace("MODULE", RUNNER.partition(":")[0]).replace("NAME", RUNNER.partition(":")[2])

LIMIT_S = 5  # of K10


def die(tmp_path: Path, how: str, stage: str, start: str = "direct") -> None:
    """Run a host to its death; every process that it had started is gone within the limit."""
    program = tmp_path / "host.py"
    program.write_text(HOST)
    (tmp_path / "kin.py").write_text(KIN)
    with subprocess.Popen(
        [sys.executable, str(program), how, stage, start],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"},
    ) as host:  # fmt: skip
        assert host.stdin is not None and host.stdout is not None
        assert host.stdout.readline() == "dying\n"
        family = psutil.Process(host.pid).children(recursive=True)
        assert len(family) >= (3 if stage.startswith("kin") else 2 if stage.startswith("two") else 1)
        host.stdin.write("\n")
        host.stdin.close()
        deadline_s = time.monotonic() + LIMIT_S
        host.wait(LIMIT_S)
        for process in family:
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline_s, f"{process} survived its host"
                time.sleep(0.01)


@pytest.mark.feature("L18")
@pytest.mark.case("K10", budget_s=5)
@pytest.mark.parametrize(
    ("how", "stage"),
    [("kill", stage) for stage in ("spawned", "importing", "loading", "idle", "streaming")]
    + [("exit", stage) for stage in ("spawned", "loading", "streaming")]
    + [("segfault", stage) for stage in ("importing", "loading", "idle")]
    + [("kill", f"kin {stage}") for stage in ("loading", "idle", "streaming")],
)
def test_no_engine_outlives_its_host(tmp_path: Path, private_temp_dir: Path, how: str, stage: str) -> None:
    die(tmp_path, how, stage)
    left = list(private_temp_dir.glob("anyengine-*"))
    assert remove_leftovers(private_temp_dir) == left
    assert len(left) == 1


@pytest.mark.feature("L18")
@pytest.mark.case("K10", budget_s=5)
@pytest.mark.parametrize(
    ("stage", "start"),
    [("two ranks", "direct"), ("two clients", "direct"), ("streaming", "fork"), ("streaming", "spawn")],
)
def test_nor_do_several_of_them_or_those_of_a_worker_process(
    tmp_path: Path, private_temp_dir: Path, stage: str, start: str
) -> None:
    die(tmp_path, "kill", stage, start)
    remove_leftovers(private_temp_dir)


@pytest.mark.case("K14")
@pytest.mark.case("K10")
def test_the_next_client_starts_and_finds_nothing_of_the_former(tmp_path: Path, private_temp_dir: Path) -> None:
    async def main() -> list[int]:
        with anyio.fail_after(30):
            async with EngineClient(engine=toy()) as client:
                return [t async for out in client.generate([1], SamplingParams(max_tokens=5)) for t in out.token_ids]

    die(tmp_path, "kill", "streaming")
    [left] = private_temp_dir.glob("anyengine-*")
    assert anyio.run(main) == expected_tokens([1], 5)
    assert not left.exists()
