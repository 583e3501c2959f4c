"""The scripted engine as a process and as its twin in memory: the same script, the same session, the same log."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from anyengine import (
    ClientState,
    EngineClient,
    EngineDeadError,
    EngineStartupError,
    SamplingParams,
    StartupTimeout,
    Status,
)
from anyengine.testing.scripted import (
    End,
    Fault,
    Script,
    ScriptedEngine,
    ScriptedProcess,
    ScriptedTwin,
    StartupStage,
    expected_tokens,
)

pytestmark = pytest.mark.anyio

Make = Callable[[Script], ScriptedEngine]


@pytest.fixture(params=["process", "twin"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "twin":
        return ScriptedTwin
    return lambda script: ScriptedProcess(script, log=tmp_path / "log")


async def test_the_same_session_leaves_the_same_log(make: Make) -> None:
    """Start-up, a stream, an abort, a pause, an end: what a behaving engine says and hears."""
    scripted = make(Script(max_running=1, log_outputs=True))
    with anyio.fail_after(20):
        async with EngineClient(engine=scripted.engine) as client:
            outputs = [out async for out in client.generate([1, 2], SamplingParams(max_tokens=3))]
            assert [token for out in outputs for token in out.token_ids] == expected_tokens([1, 2], 3)
            async with client.generate([3], SamplingParams(max_tokens=2000)) as stream:
                await anext(stream)
            await client.pause_generation()
            await client.resume_generation()
    kinds = [(one.direction, one.kind) for one in scripted.records()]
    assert kinds[:4] == [("out", "hello"), ("in", "init"), ("out", "registration"), ("out", "ready")]
    assert len(scripted.received("add")) == 2 == len(scripted.scheduled())
    ((aborted,),) = scripted.received("abort")
    assert aborted == scripted.received("add")[1][0]
    methods = [call[2] for call in scripted.received("utility")]
    assert methods.index("pause_generation") < methods.index("resume_scheduler")


async def test_start_ups_that_fail(make: Make) -> None:
    """At every stage, in each way: stage, exit code or signal, the exception and the log are in the error."""
    ways = [
        End(exit_code=3, log="Traceback: no driver"),
        End(signal="SIGKILL"),
        End(error="RuntimeError: out of memory", log="oom"),
    ]
    stages = ("importing", "configuring", "hello", "loading", "register", "ready")
    for number, name in enumerate(stages):
        end = ways[number % len(ways)]
        scripted = make(Script(startup=(StartupStage(name=name, end=end),)))
        with anyio.fail_after(20), pytest.raises(EngineStartupError) as caught:
            async with EngineClient(engine=scripted.engine):
                pass
        assert caught.value.signal == end.signal
        assert caught.value.exit_code == (None if end.signal else end.exit_code)
        assert caught.value.child_exception == end.error
        assert caught.value.stderr_tail == tuple(filter(None, [end.log]))


async def test_start_ups_that_hang(make: Make) -> None:
    """They can be left at any stage."""
    for name in ("importing", "loading"):
        scripted = make(Script(startup=(StartupStage(name=name, hang=True),)))
        with anyio.fail_after(20), anyio.CancelScope() as scope:

            def leave(status: Status, name: str = name, scope: anyio.CancelScope = scope) -> None:
                if status.stage == name:
                    scope.cancel()

            async with EngineClient(engine=scripted.engine, on_progress=leave):
                raise AssertionError("it must not become ready")
        assert scope.cancelled_caught


async def test_a_stage_that_takes_too_long() -> None:
    scripted = ScriptedTwin(Script(startup=(StartupStage(name="loading", delay_s=60),)))
    with anyio.fail_after(20), pytest.raises(StartupTimeout) as caught:
        async with EngineClient(engine=scripted.engine, startup_timeout_s=0.05):
            pass
    assert caught.value.stage == "loading"


async def test_a_lock_stands_for_a_device(make: Make, tmp_path: Path) -> None:
    """Who comes second does not start; it is free as soon as the block has ended, however often."""
    scripted = make(Script(lock_file=str(tmp_path / "gpu")))
    with anyio.fail_after(20):
        for _ in range(2):
            async with EngineClient(engine=scripted.engine) as client:
                with pytest.raises(EngineStartupError, match="somebody else has locked"):
                    async with EngineClient(engine=scripted.engine):
                        pass
                assert await client.ping() >= 0


@pytest.mark.blocking_ok
async def test_a_segment_goes_with_an_orderly_end_only(make: Make) -> None:
    name = f"anyengine-test-{os.getpid()}"
    segment = Path("/dev/shm") / name
    script = Script(shared_memory=name, shared_memory_bytes=4096)
    try:
        with anyio.fail_after(20):
            async with EngineClient(engine=make(script).engine):
                assert segment.stat().st_size == 4096
            assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


async def test_a_death_of_one_rank_leaves_the_other() -> None:
    """Two ranks of different scripts."""
    dying = ScriptedTwin(Script(faults=(Fault(do="exit", exit_code=4, direction="in", kind="add"),)))
    good = ScriptedTwin()
    with anyio.fail_after(20):
        async with EngineClient(engine=[dying.engine, good.engine]) as client:
            with pytest.raises(EngineDeadError) as caught:
                async for _ in client.generate([1]):
                    pass
            assert (caught.value.rank, caught.value.exit_code) == (0, 4)
            assert [out async for out in client.generate([1])]
            assert client.state is ClientState.READY


# ----------------------------------------------------------------------------- of a process alone, on one loop


def test_sigterm_ignored_and_a_grandchild_left() -> None:
    """The block ends with the grace period, and with everything that the engine started (leak check)."""

    async def main() -> None:
        scripted = ScriptedProcess(Script(ignore_sigterm=True, grandchildren=1))
        with anyio.fail_after(20):
            async with EngineClient(engine=scripted.engine, shutdown_grace_s=0.1) as client:
                child = client.core.session.engines[0].child
                found = await anyio.run_process(["pgrep", "-P", str(child.pid)])
                assert len(found.stdout.split()) == 1
        assert child.poll().signal == "SIGKILL"

    anyio.run(main, backend="trio")


@pytest.mark.parametrize("stages", [(), (StartupStage(name="loading", delay_s=60),)])
def test_a_host_that_goes_takes_it_along(stages: tuple[StartupStage, ...]) -> None:
    scripted = ScriptedProcess(Script(startup=stages))
    host = subprocess.Popen(scripted.engine.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert host.stdin is not None
    with host:
        host.stdin.write(b'{"handshake_address": "ipc:///nowhere/at/all", "rank": 0}\n')
        host.stdin.close()
        assert host.wait(10) == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no grandchildren"):
        ScriptedTwin(Script(grandchildren=1))
    with pytest.raises(ValueError, match="log=path"):
        ScriptedProcess().records()
    assert ScriptedProcess(log=Path("/nowhere")).records() == []
