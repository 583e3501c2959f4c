"""Signals end the job through its own scope, on every event loop."""

from __future__ import annotations

import os
import subprocess
import sys
from signal import SIGINT, SIGTERM, Signals

import anyio
import anyio.lowlevel
import pytest

from anyengine.cli.run import until_signal


@pytest.mark.anyio
async def test_without_a_signal_the_job_runs_to_its_end() -> None:
    ran: list[str] = []

    async def job() -> None:
        await anyio.lowlevel.checkpoint()
        ran.append("end")

    with anyio.fail_after(5):
        assert await until_signal(job) is None
    assert ran == ["end"]


@pytest.mark.anyio
@pytest.mark.feature("L38")
@pytest.mark.parametrize("number", [SIGINT, SIGTERM])
async def test_a_signal_cancels_the_job_and_lets_it_clean_up(number: Signals) -> None:
    cleaned: list[str] = []

    async def job() -> None:
        try:
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):  # clean-up with awaits, as a client's is
                os.kill(os.getpid(), number)  # an impatient user
                await anyio.wait_all_tasks_blocked()
                cleaned.append("up")

    with anyio.fail_after(5):
        assert await until_signal(job) == number
    assert cleaned == ["up"]


@pytest.mark.anyio
async def test_what_the_job_raises_comes_out_as_it_is() -> None:
    async def job() -> None:
        raise LookupError("as it is")

    with anyio.fail_after(5), pytest.raises(LookupError, match="as it is"):
        await until_signal(job)


@pytest.mark.anyio
async def test_the_outer_scope_is_obeyed() -> None:
    with anyio.fail_after(5), anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_signal, anyio.sleep_forever)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
    assert scope.cancelled_caught


LAST_MOMENT = """
import os, signal, sys, anyio
from anyengine.cli.run import until_signal
async def job():
    os.kill(os.getpid(), signal.SIGINT)
try:
    number = anyio.run(until_signal, job, backend=sys.argv[1])
except KeyboardInterrupt:
    number = signal.SIGINT
assert number in (None, signal.SIGINT)
print("over")
"""


@pytest.mark.blocking_ok
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signal_at_the_last_moment_is_no_group(backend: str) -> None:
    """trio raises what its receiver did not take; in a process of its own, lest it ends the tests."""
    command = [sys.executable, "-c", LAST_MOMENT, backend]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.stdout, result.stderr) == ("over\n", "")
