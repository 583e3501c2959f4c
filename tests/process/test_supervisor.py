"""A supervised engine: what its process says and how it ends, as a user is told of it."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator

import anyio
import pytest
from child_scripts import PATIENCE_S, Start, watching

from anyengine._process.child import ChildProcess
from anyengine._process.status import ChildError, Status, encode_status
from anyengine._process.supervisor import SupervisedEngine
from anyengine.exceptions import EngineDeadError, EngineStartupError, StartupTimeout

pytestmark = pytest.mark.anyio

STATUSES = [
    Status(stage="importing"),
    Status(stage="loading", fraction=0.25),
    Status(stage="loading", fraction=1.0, model_dir="/models/m"),
    Status(stage="ready", detail="up"),
]
FAILURE = Status(stage="failed", error=ChildError(type="builtins.ValueError", message="no such model", traceback="..."))


def saying(*lines: Status | bytes, then: str = "") -> str:
    """A script that writes these lines to its standard output, then does something."""
    text = b"".join(encode_status(line) if isinstance(line, Status) else line for line in lines)
    return f"import os, signal\nview = memoryview({text!r})\nwhile view: view = view[os.write(1, view):]\n{then}"


@pytest.fixture
def start() -> Iterator[Start]:
    with watching() as start:
        yield start


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "anyengine.engine")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "anyengine.engine"]


async def supervised(
    child: ChildProcess, rank: int = 3, on_status: Callable[[Status], None] | None = None
) -> SupervisedEngine:
    """An engine, after the end of its process."""
    engine = SupervisedEngine(rank, child, on_status)
    with anyio.fail_after(PATIENCE_S):
        await engine.supervise()
    return engine


# -------------------------------------------------------------------------------------------------------------- status


async def test_every_status_is_reported_in_order(start: Start) -> None:
    seen: list[Status] = []
    engine = await supervised(start(saying(*STATUSES)), on_status=seen.append)
    assert seen == [Status(stage="spawned"), *STATUSES]
    assert engine.status == STATUSES[-1]
    assert engine.model_dir == "/models/m"  # later statuses do not repeat it


@pytest.mark.feature("F11")
async def test_other_output_goes_to_the_log_with_the_rank(start: Start, log: Callable[[], list[str]]) -> None:
    noise = [b"Loading: 50%\n", b"{}\n", b'{"stage": 3}\n', b"\n", b'"ready"\n', b"\xff\n"]
    child = start(saying(STATUSES[0], *noise, STATUSES[-1], then="os.write(2, b'on stderr\\n')"))
    engine = await supervised(child)
    assert engine.status == STATUSES[-1]
    prefix = f"(engine 3 pid={child.pid}) "
    expected = ["Loading: 50%", "{}", '{"stage": 3}', "", '"ready"', "\\xff", "on stderr"]
    assert sorted(log()) == sorted(prefix + line for line in expected)
    assert child.stderr_tail() == ("on stderr",)


@pytest.mark.parametrize(
    "line",
    [
        b'{"stage": "ready", "x": ' + b"[" * 100_000,
        b'{"stage": "\xff\xfe"}',
        b'{"stage": "ready", "fraction": ' + b"9" * 5000 + b"}",
        b'{"stage": "ready"',
        b"\x00" * 1000,
    ],
    ids=["nested beyond reason", "no UTF-8", "a huge number", "cut", "zeros"],
)
async def test_no_line_stops_supervision(start: Start, log: Callable[[], list[str]], line: bytes) -> None:
    seen: list[Status] = []
    engine = await supervised(start(saying(line + b"\n", STATUSES[1], b"after\n")), on_status=seen.append)
    assert engine.status == STATUSES[1]
    assert log()[-1].endswith("after")


async def test_a_callback_that_fails_is_logged_and_called_again(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[str] = []

    def explode(status: Status) -> None:
        calls.append(status.stage)
        raise ArithmeticError("the user's own")

    engine = await supervised(start(saying(*STATUSES, then="raise SystemExit(2)")), on_status=explode)
    assert calls == ["spawned", "importing", "loading", "loading", "ready"]
    assert engine.status == STATUSES[-1]
    assert engine.death().exit_code == 2
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(failures) == len(calls)
    assert all("the user's own" in str(record.exc_info) and "engine 3" in record.getMessage() for record in failures)


async def test_the_seconds_of_each_stage(start: Start) -> None:
    engine = await supervised(start(saying(*STATUSES)))
    seconds = engine.stage_seconds
    assert list(seconds) == ["spawned", "importing", "loading", "ready"]
    assert all(value >= 0 for value in seconds.values())
    await anyio.sleep(0.01)
    later = engine.stage_seconds
    assert later["ready"] > seconds["ready"]  # the present stage goes on
    assert {**later, "ready": 0} == {**seconds, "ready": 0}


# -------------------------------------------------------------------------------------------------------------- errors


async def test_a_failed_start_carries_the_childs_exception(start: Start) -> None:
    child = start(saying(*STATUSES[:3], FAILURE, then="raise SystemExit(1)"))
    error = (await supervised(child)).startup_error()
    assert type(error) is EngineStartupError
    assert error.child_exception == "builtins.ValueError: no such model"
    assert (error.rank, error.pid, error.exit_code, error.signal) == (3, child.pid, 1, None)
    assert error.stage == "loading"  # where it was when it failed
    assert str(error) == (
        f"engine 3 (pid {child.pid}) exited with code 1 at stage 'loading': builtins.ValueError: no such model"
    )


async def test_the_stage_of_a_failure_is_the_last_one_even_if_it_was_there_before(start: Start) -> None:
    stages = [Status(stage="resolving"), Status(stage="downloading"), Status(stage="resolving"), FAILURE]
    engine = await supervised(start(saying(*stages, then="raise SystemExit(1)")))
    assert engine.startup_error().stage == "resolving"
    assert set(engine.stage_seconds) == {"spawned", "resolving", "downloading", "failed"}


@pytest.mark.feature("F11")
async def test_a_crash_during_start_up_shows_the_end_of_its_traceback(start: Start) -> None:
    child = start(saying(STATUSES[1], then="def load(): raise RuntimeError('the weights are wrong')\nload()"))
    error = (await supervised(child)).startup_error()
    assert (error.exit_code, error.stage, error.child_exception) == (1, "loading", None)
    assert error.stderr_tail[0] == "Traceback (most recent call last):"
    assert error.stderr_tail[-1] == "RuntimeError: the weights are wrong"
    assert "exited with code 1 at stage 'loading', without saying why" in str(error)
    assert str(error).endswith("RuntimeError: the weights are wrong")


async def test_a_start_that_was_killed(start: Start) -> None:
    engine = await supervised(start("import os; os.kill(os.getpid(), 9)"))
    error = engine.startup_error()
    assert (error.signal, error.exit_code, error.stage) == ("SIGKILL", None, "spawned")
    assert "was killed by SIGKILL at stage 'spawned'" in str(error)


async def test_a_start_that_takes_too_long(start: Start) -> None:
    child = start(saying(*STATUSES[:2], then="os.write(2, b'still here\\n'); signal.pause()"))
    loading = anyio.Event()
    engine = SupervisedEngine(3, child, lambda status: loading.set() if status.stage == "loading" else None)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.supervise)
            await loading.wait()
            error = engine.startup_timeout(2.5)
            child.kill()
    assert isinstance(error, StartupTimeout)
    assert isinstance(error, TimeoutError)
    assert (error.rank, error.pid, error.stage, error.exit_code, error.signal) == (3, child.pid, "loading", None, None)
    assert list(error.stage_seconds) == ["spawned", "importing", "loading"]
    assert f"engine 3 (pid {child.pid}) is not ready after startup_timeout_s=2.5" in str(error)
    assert "stage reached: 'loading' (spawned " in str(error)


@pytest.mark.feature("F11")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
async def test_a_death_carries_pid_signal_and_last_words(start: Start, number: signal.Signals) -> None:
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for i in range(100): os.write(2, b"step %d\\n" % i)
os.write(2, b"CUDA error")
os.kill(os.getpid(), {int(number)})
"""
    child = start(saying(STATUSES[-1], then=script))
    error = (await supervised(child)).death()
    assert type(error) is EngineDeadError
    assert (error.rank, error.pid, error.signal, error.exit_code) == (3, child.pid, number.name, None)
    assert error.stderr_tail[-2:] == ("step 99", "CUDA error")
    assert str(error).startswith(f"engine 3 (pid {child.pid}) was killed by {number.name}\n")
    assert str(error).endswith("CUDA error")


async def test_a_death_by_exit_code_needs_no_symptom(start: Start) -> None:
    child = start("raise SystemExit(6)")
    error = (await supervised(child)).death("it sent ENGINE_CORE_DEAD")
    assert (error.exit_code, error.signal) == (6, None)
    assert str(error) == f"engine 3 (pid {child.pid}) exited with code 6"


async def test_an_engine_that_is_given_up_while_its_process_lives(start: Start) -> None:
    child = start("import signal; signal.pause()")
    error = SupervisedEngine(0, child).death("its connection is gone")
    assert (error.pid, error.exit_code, error.signal) == (child.pid, None, None)
    assert str(error) == f"engine 0 (pid {child.pid}) lives, but its connection is gone"


async def test_supervision_survives_cancellation_until_the_process_has_ended(
    start: Start, log: Callable[[], list[str]]
) -> None:
    """The session is cancelled first and its engines end next: what they say meanwhile is read all the same."""
    script = """
def stop(*_):
    os.write(2, b"stopping in order\\n")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
os.write(1, b'{"stage": "ready"}\\n')
while True: signal.pause()
"""
    child = start(saying(then=script))
    ready = anyio.Event()
    engine = SupervisedEngine(3, child, lambda status: ready.set() if status.stage == "ready" else None)
    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.supervise)
            await ready.wait()
            tasks.cancel_scope.cancel()
            child.terminate()
    assert child.exited.is_set()
    assert child.stderr_tail() == ("stopping in order",)
    assert log() == [f"(engine 3 pid={child.pid}) stopping in order"]


async def test_a_logging_filter_that_fails_does_not_end_supervision(start: Start) -> None:
    class Failing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise ZeroDivisionError

    logger = logging.getLogger("anyengine.engine")
    failing = Failing()
    logger.addFilter(failing)
    try:
        engine = await supervised(start("import sys; print('hello', file=sys.stderr); sys.exit(3)"))
    finally:
        logger.removeFilter(failing)
    assert engine.death().exit_code == 3
    assert engine.child.stderr_tail() == ("hello",)


async def test_a_death_tells_what_the_child_reported_before_it_went(start: Start) -> None:
    error = (await supervised(start(saying(*STATUSES, FAILURE, then="raise SystemExit(1)")))).death()
    assert str(error).startswith(f"engine 3 (pid {error.pid}) exited with code 1: builtins.ValueError: no such model")


async def test_a_cause_that_is_only_in_the_log_is_shown_with_it(start: Start) -> None:
    vague = Status(stage="failed", error=ChildError(type="RuntimeError", message="it failed. See root cause above."))
    script = "import sys; print('CUDA is on fire', file=sys.stderr)\n" + saying(vague, then="raise SystemExit(1)")
    assert "CUDA is on fire" in str((await supervised(start(script))).startup_error())
    told = "import sys; print('a traceback', file=sys.stderr)\n" + saying(FAILURE, then="raise SystemExit(1)")
    assert "a traceback" not in str((await supervised(start(told))).startup_error())
