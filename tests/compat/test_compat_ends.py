"""How ``AsyncLLM`` starts and ends, seen from outside of any event loop: errors, and the end of the interpreter."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from test_async_llm import SCRIPT, num_client_threads

from anyengine import EngineStartupError
from anyengine.compat import AsyncLLM
from anyengine.compat.async_llm import _stop_all
from anyengine.sync.client_thread import ClientThread
from anyengine.testing.scripted import End, Script, ScriptedTwin, StartupStage

pytestmark = pytest.mark.blocking_ok  # AsyncLLM's constructor and shutdown() block, as vLLM's do


def test_all_are_stopped_at_the_end_whatever_one_of_them_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = [AsyncLLM(ScriptedTwin(SCRIPT).engine) for _ in range(2)]
    interrupted: list[ClientThread] = []
    stop = ClientThread.stop

    def stop_and_be_interrupted(self: ClientThread, *, in_hurry: bool = False) -> None:
        stop(self, in_hurry=in_hurry)
        if not interrupted:
            interrupted.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(ClientThread, "stop", stop_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        _stop_all()
    assert interrupted
    assert all(engine._thread.has_ended for engine in engines)


def test_a_failed_start_is_raised_by_the_constructor() -> None:
    script = Script(startup=(StartupStage(name="loading", end=End(error="RuntimeError: no such weights")),))
    with pytest.raises(EngineStartupError, match="no such weights"):
        AsyncLLM(ScriptedTwin(script).engine)
    assert num_client_threads() == 0


@pytest.mark.parametrize("keeps", [True, False], ids=["global", "local"])
def test_a_program_that_forgets_it_ends_in_order(keeps: bool) -> None:
    """The engine is told to stop, and has time to: at the end of the interpreter at the latest."""
    program = f"""
        import asyncio, faulthandler
        from anyengine.compat import AsyncLLM, SamplingParams
        from anyengine.testing.scripted import Script, ScriptedProcess

        async def main():
            {"global engine" if keeps else ""}
            engine = AsyncLLM(ScriptedProcess(Script(step_interval_s=0.001, shutdown_delay_s=0.05)).engine)
            async for item in engine.generate([1], SamplingParams(max_tokens=500), "r"):
                break

        asyncio.run(main())
        faulthandler.dump_traceback_later(5, exit=True)
        print("ended", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")
