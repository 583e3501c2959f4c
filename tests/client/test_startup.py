"""Start-up: what a failing, slow or senseless engine becomes, and that a cancelled start leaves nothing."""

from __future__ import annotations

import pickle
import threading
import traceback

import anyio
import pytest
from engines import misbehaving, toy

from anyengine import (
    CommandEngine,
    EmbeddedEngine,
    EngineClient,
    EngineCoreClient,
    EngineStartupError,
    SamplingParams,
    StartupTimeout,
    Status,
    VLLMEngine,
)

pytestmark = pytest.mark.anyio


@pytest.mark.feature("L03")
@pytest.mark.case("K33")
@pytest.mark.parametrize("stage", ["before_hello", "after_hello", "after_init", "before_ready"])
@pytest.mark.parametrize(("code", "exit_code", "signal"), [("3", 3, None), ("kill", None, "SIGKILL")])
async def test_death_during_start_up(stage: str, code: str, exit_code: int | None, signal: str | None) -> None:
    with anyio.fail_after(30), pytest.raises(EngineStartupError) as caught:
        async with EngineClient(engine=misbehaving("exit_at", stage, code)):
            pytest.fail("it must not become ready")
    error = caught.value
    assert (error.rank, error.exit_code, error.signal) == (0, exit_code, signal)
    assert error.pid is not None and error.pid > 0
    assert f"leaving at {stage}" in error.stderr_tail
    assert pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__


async def test_the_childs_own_exception_is_in_the_error() -> None:
    with anyio.fail_after(30), pytest.raises(EngineStartupError) as caught:
        async with EngineClient(engine=toy(fail_on_load="no room for the weights")):
            pytest.fail("it must not become ready")
    error = caught.value
    assert error.child_exception is not None
    assert "RuntimeError" in error.child_exception and "no room for the weights" in error.child_exception
    assert "no room for the weights" in str(error)
    assert (error.exit_code, error.stage) == (1, "loading")


@pytest.mark.parametrize("what", ["garbage", "remote", "ready_first", "twice"])
async def test_a_senseless_handshake_is_an_error_not_a_hang(what: str) -> None:
    with anyio.fail_after(30), pytest.raises(EngineStartupError, match="handshake"):
        async with EngineClient(engine=misbehaving("nonsense", what)):
            pytest.fail("it must not become ready")


async def test_start_up_deadline_names_stage_and_seconds() -> None:
    with anyio.fail_after(30), pytest.raises(StartupTimeout) as caught:
        async with EngineClient(engine=toy(hang_on_load=True), startup_timeout_s=2.5):
            pytest.fail("it must not become ready")
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.stage == "loading"
    assert "startup_timeout_s=2.5" in str(error)
    assert error.stage_seconds["loading"] > 0


@pytest.mark.feature("L01")
@pytest.mark.parametrize("engine", [toy(hang_on_load=True), misbehaving("silent")], ids=["loading", "deaf_to_sigterm"])
async def test_a_cancelled_start_leaves_nothing(engine: EmbeddedEngine | CommandEngine) -> None:
    """The automatic leak check sees processes, descriptors and files."""
    with anyio.fail_after(30):
        with anyio.move_on_after(0.3) as scope:
            async with EngineClient(engine=engine):
                pytest.fail("it must not become ready")
        assert scope.cancelled_caught


@pytest.mark.parametrize(
    ("engine", "remedy"),
    [
        (CommandEngine(argv=("/nonexistent/engine",)), "argv must begin with a program"),
        (VLLMEngine("m", python="/nonexistent/python"), "python must name the interpreter"),
    ],
)
async def test_a_program_that_is_not_there(engine: CommandEngine | VLLMEngine, remedy: str) -> None:
    with anyio.fail_after(30), pytest.raises(EngineStartupError, match=remedy) as caught:
        async with EngineCoreClient(engine):
            pytest.fail("it must not become ready")
    assert (caught.value.rank, caught.value.stage) == (0, "spawned")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert "/nonexistent/" in str(caught.value)


async def test_progress_is_observable_and_a_failing_callback_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    stages: list[str] = []

    def on_progress(status: Status) -> None:
        stages.append(status.stage)
        raise ZeroDivisionError("the application's own bug")

    with anyio.fail_after(30):
        async with EngineClient(engine=toy(), on_progress=on_progress):
            pass
    assert stages[0] == "spawned"
    assert "loading" in stages
    assert sum("on_progress" in record.message for record in caplog.records) == len(stages)


@pytest.mark.feature("L26")
async def test_public_errors_are_single_typed_and_leave_the_body_alone() -> None:
    """The client never raises a group of its own, and never wraps one of the body's."""
    with anyio.fail_after(30):
        with pytest.raises(EngineStartupError) as single:
            async with EngineClient(engine=misbehaving("exit_at", "after_hello", "3")):
                pytest.fail("it must not become ready")
        assert not isinstance(single.value, BaseExceptionGroup)

        plain = ZeroDivisionError("the body's own")
        with pytest.raises(ZeroDivisionError) as left:
            async with EngineClient(engine=toy()):
                raise plain
        assert left.value is plain
        assert not hasattr(plain, "__notes__")

        group = ExceptionGroup("the body's own", [ValueError("a"), OSError("b")])
        with pytest.raises(ExceptionGroup) as left_group:
            async with EngineClient(engine=toy()):
                raise group
        assert left_group.value is group


@pytest.mark.feature("L26")
async def test_a_background_cause_becomes_a_note_of_the_bodys_error() -> None:
    with anyio.fail_after(30), pytest.raises(ZeroDivisionError) as caught:
        async with EngineClient(engine=misbehaving("dead_after_ready")) as client:
            await client.wait_dead()
            raise ZeroDivisionError
    assert "EngineDeadError" in "".join(traceback.format_exception(caught.value))


@pytest.mark.feature("L39")
async def test_start_from_a_process_with_many_threads() -> None:
    def named() -> set[str]:
        return {thread.name for thread in threading.enumerate()}

    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait, name=f"busy {i}") for i in range(20)]
    for thread in threads:
        thread.start()
    before = named()
    try:
        with anyio.fail_after(30):
            async with EngineClient(engine=toy()) as client:
                assert named() == before  # the client adds no thread of its own
                out = [out async for out in client.generate([1], SamplingParams(max_tokens=2))]
        assert out[-1].finish_reason == "length"
    finally:
        stop.set()
