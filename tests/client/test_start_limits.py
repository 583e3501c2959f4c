"""A start that fails, takes too long or is interrupted, at every stage: one error, in time, and nothing left."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio
import psutil
import pytest
from engines import RUNNER, misbehaving, toy

from anyengine import EmbeddedEngine, EngineClient, EngineSettings, EngineStartupError, StartupTimeout, Status
from anyengine.config import InMemoryEngine

STAGES = ["spawned", "importing", "handshake", "loading"]

FAMILY = """
import subprocess, sys, time
from anyengine._process.status import Status

class NoSuchWeights(LookupError):
    pass

def _family():
    grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=sys.stderr)
    for number in range(60):
        print("line", number, file=sys.stderr)
    print("grandchild", grandchild.pid, file=sys.stderr, flush=True)

def create_failing(config, report):
    report(Status("loading"))
    _family()
    raise NoSuchWeights("tensor lm_head.weight is missing")

def create_hanging(config, report):
    _family()
    report(Status("loading"))
    time.sleep(60)
"""


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of model runners that start a process of their own while they load."""
    (tmp_path / "family.py").write_text(FAMILY)
    path = f"{tmp_path}:{Path(__file__).parents[2] / 'src'}"
    monkeypatch.setenv("PYTHONPATH", path)


def grandchildren(lines: tuple[str, ...]) -> list[int]:
    return [int(line.split()[1]) for line in lines if line.startswith("grandchild")]


@pytest.mark.anyio
@pytest.mark.blocking_ok
@pytest.mark.case("K33", budget_s=5)
async def test_a_failed_start_tells_all_and_leaves_no_grandchild(family: None) -> None:
    """Within 5 s of the failure, which comes right behind the stage's name."""

    def on_progress(status: Status) -> None:
        if status.stage == "loading":
            limit.deadline = anyio.current_time() + 5

    client = EngineClient(engine=EmbeddedEngine(runner="family:create_failing"), on_progress=on_progress)
    with anyio.fail_after(60) as limit:
        with pytest.raises(EngineStartupError) as caught:
            async with client:
                pytest.fail("it must not become ready")
        await anyio.lowlevel.checkpoint()  # what was shielded may have overrun the limit
    error = caught.value
    assert (error.rank, error.stage, error.exit_code, error.signal) == (0, "loading", 1, None)
    assert error.child_exception == "family.NoSuchWeights: tensor lm_head.weight is missing"
    assert "NoSuchWeights" in str(error)
    assert len(error.stderr_tail) == 50
    [pid] = grandchildren(error.stderr_tail)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.anyio
@pytest.mark.feature("L01", budget_s=1)
@pytest.mark.case("K34", budget_s=1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_start_that_is_cancelled_at_any_stage_leaves_nothing(family: None, stage: str) -> None:
    seen: list[str] = []

    def on_progress(status: Status) -> None:
        seen.append(status.stage)
        if status.stage == stage:
            scope.cancel()
            limit.deadline = anyio.current_time() + 1

    client = EngineClient(engine=EmbeddedEngine(runner="family:create_hanging"), on_progress=on_progress)
    with anyio.fail_after(60) as limit:
        with anyio.CancelScope() as scope:
            async with client:
                pytest.fail("it must not become ready")
        assert scope.cancelled_caught
        await anyio.lowlevel.checkpoint()  # what was shielded may have overrun the limit
    assert stage in seen and "ready" not in seen


@pytest.mark.anyio
@pytest.mark.case("K34")
@pytest.mark.case("K35")
@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        (misbehaving("silent"), "spawned"),
        (toy(hang_on_load=True), "loading"),
        (EmbeddedEngine(runner="family:create_hanging"), "loading"),
    ],
    ids=["deaf", "loading", "grandchild"],
)
@pytest.mark.parametrize("timeout_s", [0.0, 0.3])
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_any_deadline_bounds_the_start(
    family: None, engine: EngineSettings, stage: str, timeout_s: float
) -> None:
    with anyio.fail_after(timeout_s + 2), pytest.raises(StartupTimeout) as caught:
        async with EngineClient(engine=engine, startup_timeout_s=timeout_s):
            pytest.fail("it must not become ready")
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert f"startup_timeout_s={timeout_s:g}" in str(error)
    assert error.stage in ("spawned", "importing", "handshake", stage)
    assert list(error.stage_seconds_by_rank[0]) == list(error.stage_seconds)
    assert list(error.stage_seconds)[-1] == error.stage


@pytest.mark.anyio
@pytest.mark.case("K35")
async def test_the_seconds_of_every_stage_of_every_rank() -> None:
    async def never(link, rank, host) -> None:
        link.connect_handshake()
        for stage in ("importing", "loading")[: rank + 1]:
            host.report(Status(stage))
            await anyio.sleep(0.01)
        await anyio.sleep_forever()

    ranks = [InMemoryEngine(serve=never), InMemoryEngine(serve=never)]
    progress: list[str] = []
    with anyio.fail_after(5), pytest.raises(StartupTimeout, match="2 of 2 are not: 0, 1") as caught:
        client = EngineClient(
            engine=ranks, startup_timeout_s=0.1, on_progress=lambda status: progress.append(status.stage)
        )
        async with client:
            pytest.fail("it must not become ready")
    seconds = caught.value.stage_seconds_by_rank
    assert {rank: list(stages) for rank, stages in seconds.items()} == {
        0: ["spawned", "importing"],
        1: ["spawned", "importing", "loading"],
    }
    assert all(value >= 0 for stages in seconds.values() for value in stages.values())
    assert sorted(progress) == ["importing", "importing", "loading", "spawned", "spawned"]


@pytest.mark.anyio
@pytest.mark.case("K35")
async def test_no_deadline_at_all() -> None:
    with anyio.fail_after(20):
        async with EngineClient(engine=toy(), startup_timeout_s=math.inf):
            pass


HOST = f"""
import anyio, signal, sys
from anyengine import EmbeddedEngine, EngineClient

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it

def on_progress(status):
    if status.stage == sys.argv[1]:
        print("there", flush=True)

async def main():
    engine = EmbeddedEngine(runner={RUNNER!r}, runner_options={{"hang_on_load": True}})
    async with EngineClient(engine=engine, on_progress=on_progress):
        pass

anyio.run(main, backend=sys.argv[2])
"""


@pytest.mark.case("K34", budget_s=5)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("stage", "backend"), [("spawned", "asyncio"), ("loading", "asyncio"), ("loading", "trio")])
def test_a_signal_while_it_starts(stage: str, backend: str, number: signal.Signals) -> None:
    """Ctrl-C is one KeyboardInterrupt; SIGTERM has no handler in Python, and ends the host: the engine follows."""
    with (
        subprocess.Popen(
            [sys.executable, "-c", HOST, stage, backend], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as host,
        ExitStack() as ended,
    ):
        ended.callback(host.kill)  # before it is waited for
        assert host.stdout is not None
        assert host.stdout.readline() == "there\n"
        family = psutil.Process(host.pid).children(recursive=True)
        deadline_s = time.monotonic() + 5  # of K34
        host.send_signal(number)
        _, errors = host.communicate(timeout=5)
        assert ("KeyboardInterrupt" in errors) is (number == signal.SIGINT)
        assert "ResourceWarning" not in errors
        for process in family:
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline_s, f"{process} was left"
                time.sleep(0.01)


@pytest.fixture(autouse=True)
def temporary_files(private_temp_dir: Path) -> Iterator[None]:
    """A host that SIGTERM has ended cannot remove its directory; the next one does."""
    from anyengine._owned_directories import remove_leftovers

    yield
    remove_leftovers(private_temp_dir)
