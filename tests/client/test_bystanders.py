"""Whichever way a client's block ends, only processes that it started are signalled; the host's own ones live on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from anyengine import (
    EngineClient,
    EngineDeadError,
    EngineStartupError,
    RankState,
    RequestStream,
    RestartPolicy,
    SamplingParams,
)
from anyengine._process.child import ChildProcess
from anyengine.testing.scripted import End, Fault, Script, ScriptedProcess, StartupStage

pytestmark = pytest.mark.anyio

LIMIT_S = 30.0
DIES = (Fault(do="kill", direction="in", kind="profile"),)
BASE = Script(grandchildren=1)  # which ignores SIGTERM: force is needed on every route


class Signals:
    """``sent`` are the signals that were sent, and ``strangers`` those to somebody whom no client has started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: set[int] = set()
        self.sent: list[int] = []
        self.strangers: list[int] = []
        start, pidfd_signal = ChildProcess.__init__, signal.pidfd_send_signal

        def started(child: ChildProcess, *args: Any, **kwargs: Any) -> None:
            start(child, *args, **kwargs)
            self.started.add(child.pid)

        def watched(send: Callable[[int, int], None], group_of: Callable[[int], int]) -> Callable[[int, int], None]:
            def sending(target: int, number: int) -> None:
                if number:
                    self.sent.append(number)
                    if group_of(target) not in self.started:
                        self.strangers.append(target)
                send(target, number)

            return sending

        monkeypatch.setattr(ChildProcess, "__init__", started)
        monkeypatch.setattr(os, "kill", watched(os.kill, os.getpgid))
        monkeypatch.setattr(os, "killpg", watched(os.killpg, int))
        monkeypatch.setattr(signal, "pidfd_send_signal", watched(pidfd_signal, _group_of_pidfd))


def _group_of_pidfd(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(os.getpgid(int(line.split()[1])) for line in lines if line.startswith("Pid:"))


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Signals:
    return Signals(monkeypatch)


@pytest.fixture
def bystanders() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One in the host's process group, and one in a session of its own, as the engines are."""
    sleepers = [subprocess.Popen(["sleep", "1000"], start_new_session=apart) for apart in (False, True)]
    yield sleepers
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()


def client_of(script: Script = BASE, **settings: Any) -> EngineClient:
    return EngineClient(engine=ScriptedProcess(script).engine, **{"shutdown_grace_s": 0.1} | settings)


def but(**fields: Any) -> Script:
    return Script(grandchildren=1, **fields)


async def open_stream(client: EngineClient) -> RequestStream:
    stream = await client.submit([1], SamplingParams(max_tokens=2000))
    await anext(stream)
    return stream


async def the_end() -> None:
    async with client_of() as client:
        _stream = await open_stream(client)


async def an_exception() -> None:
    with pytest.raises(ZeroDivisionError):
        async with client_of() as client:
            _stream = await open_stream(client)
            raise ZeroDivisionError


async def a_cancellation() -> None:
    with anyio.CancelScope() as scope:
        async with client_of() as client:
            _stream = await open_stream(client)
            scope.cancel()
            await anyio.lowlevel.checkpoint()


async def a_native_cancellation() -> None:
    ready = anyio.Event()

    async def main() -> None:
        async with client_of():
            ready.set()
            await anyio.sleep_forever()

    task = asyncio.create_task(main())
    await ready.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def an_early_close() -> None:
    async with client_of() as client:
        await client.aclose()


async def deaf_to_sigterm() -> None:
    async with client_of(but(ignore_sigterm=True)):
        pass


async def a_start_that_fails() -> None:
    with pytest.raises(EngineStartupError):
        async with client_of(but(startup=(StartupStage(name="loading", end=End(exit_code=3)),))):
            pass


async def a_start_that_is_late() -> None:
    hang = (StartupStage(name="loading", hang=True),)
    with pytest.raises(TimeoutError):
        async with client_of(but(startup=hang, ignore_sigterm=True), startup_timeout_s=0.5):
            pass


async def a_start_that_is_cancelled() -> None:
    with anyio.CancelScope() as scope:
        hang = (StartupStage(name="loading", hang=True),)
        async with client_of(
            but(startup=hang), on_progress=lambda status: status.stage == "loading" and scope.cancel()
        ):
            pass
    assert scope.cancelled_caught


async def a_death() -> None:
    async with client_of(but(faults=DIES)) as client:
        with pytest.raises(EngineDeadError):
            await client.core.utility("profile")


async def a_restart() -> None:
    async with client_of(but(faults=DIES), restart=RestartPolicy(backoff_s=0)) as client:
        with pytest.raises(EngineDeadError):
            await client.core.utility("profile")
        async for event in client.events():
            if event.ranks[0] is RankState.READY and client.statistics()["restarts"]:
                break


async def a_death_that_cancels() -> None:
    with pytest.raises(EngineDeadError):
        async with client_of(but(faults=DIES), on_death="cancel") as client:
            await client.core.utility("profile")


ROUTES = (
    the_end,
    an_exception,
    a_cancellation,
    a_native_cancellation,
    an_early_close,
    deaf_to_sigterm,
    a_start_that_fails,
    a_start_that_is_late,
    a_start_that_is_cancelled,
    a_death,
    a_restart,
    a_death_that_cancels,
)


@pytest.mark.case("K20")
@pytest.mark.parametrize(
    ("anyio_backend", "route"),
    [(("asyncio" if route is a_native_cancellation else "trio", {}), route) for route in ROUTES],
    ids=[route.__name__ for route in ROUTES],
)
async def test_no_way_out_hurts_a_child_of_the_host(
    route: Callable[[], Awaitable[None]], signals: Signals, bystanders: list[subprocess.Popen[bytes]]
) -> None:
    with anyio.fail_after(LIMIT_S):
        await route()
    assert [sleeper.poll() for sleeper in bystanders] == [None, None]
    assert signals.strangers == []
    assert signals.sent or not signals.started
