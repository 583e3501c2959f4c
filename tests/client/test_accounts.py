"""What a client holds, and that it holds nothing in the end, however often it is opened and closed."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import anyio
import anyio.lowlevel
import psutil
import pytest
import sniffio
import trio.lowlevel
import zmq
from engines import toy
from memory_engines import in_loop
from remote_peers import RemotePeers

from anyengine import ClientFailedError, EngineClient, EngineCoreClient, RemoteEngine, RetryPolicy, SamplingParams
from anyengine._protocol.requests import RequestRegistry
from anyengine.testing.scripted import Fault, RequestRule, Script, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio


@pytest.mark.feature("L43")
async def test_a_snapshot_names_what_is_held() -> None:
    answers_nothing = Script(
        requests=(RequestRule(silent=True),), utilities=(UtilityRule(method="is_sleeping", do="never"),)
    )
    with anyio.fail_after(10):
        async with EngineClient(engine=ScriptedTwin(answers_nothing).engine, strict=True) as client:
            idle = client.debug_snapshot()
            assert (idle.state, idle.requests, idle.utility_calls) == ("ready", (), ())
            assert idle.tasks["Session.drain_outputs"] == 1
            stream = await client.submit([1], SamplingParams(max_tokens=2000), request_id="mine")
            await anyio.wait_all_tasks_blocked()  # the engine is in its step
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.ping)
                await anyio.wait_all_tasks_blocked()
                held = client.debug_snapshot()
                tasks.cancel_scope.cancel()
            assert [name.startswith("'mine' on rank 0 (") for name in held.requests] == [True]
            assert [name.startswith("is_sleeping on rank 0 (") for name in held.utility_calls] == [True]
            await stream.aclose()
            assert client.debug_snapshot().requests == ()
        left = client.debug_snapshot()
    assert (left.state, left.tasks, left.requests, left.utility_calls, left.queued_items) == ("closed", {}, (), (), 0)


@pytest.mark.feature("L43")
@pytest.mark.parametrize("strict", [True, False])
async def test_strict_names_the_request_that_is_left(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient(engine=in_loop(step_s=0.05), strict=strict)

    async def live() -> None:
        async with client:
            async with client.generate([1], SamplingParams(max_tokens=2000), request_id="lost") as stream:
                await anext(stream)
                # The planted bug: nothing removes an entry any more.
                monkeypatch.setattr(RequestRegistry, "close", lambda requests, name, **_: requests.live.get(name))

    with anyio.fail_after(10):
        if strict:
            with pytest.raises(ClientFailedError, match="still holds: request 'lost' on rank 0"):
                await live()
        else:
            await live()


async def test_a_snapshot_names_what_may_be_sent_again() -> None:
    retries = RetryPolicy()
    with anyio.fail_after(10):
        async with EngineClient(engine=in_loop(step_s=0.05), retries=retries) as client:
            async with client.generate([1], SamplingParams(max_tokens=2000), request_id="mine"):
                assert [name.startswith("'mine' on rank 0 (") for name in client.debug_snapshot().requests] == [True]


async def test_a_doubt_that_the_end_overtakes_leaves_no_call() -> None:
    """A connection has gone, and everybody would be asked a moment later; the engine would not answer."""
    hangs = Fault(do="hang", direction="in", kind="utility")
    with anyio.fail_after(10):
        async with EngineClient(
            engine=ScriptedTwin(Script(faults=(hangs,), shutdown_delay_s=0.1)).engine, strict=True, shutdown_grace_s=0.1
        ) as client:
            stranger = client.core.session.endpoints.inputs.connect(b"stranger")
            await anyio.wait_all_tasks_blocked()
            stranger.close()
            while "Liveness._ask_all" not in client.debug_snapshot().tasks:
                await anyio.lowlevel.checkpoint()


async def test_an_engine_of_somebody_elses_that_hangs_leaves_no_call() -> None:
    """Leaving asks it whether it has taken the aborts."""
    with anyio.fail_after(30), RemotePeers("serve") as peers:
        engine = RemoteEngine(handshake="tcp://127.0.0.1:*")
        async with EngineClient(engine=engine, strict=True, shutdown_grace_s=0.1, on_progress=peers.joining):
            peers.processes[0].send_signal(signal.SIGSTOP)


@pytest.mark.feature("L17")
@pytest.mark.case("K12")
@pytest.mark.blocking_ok  # counts descriptors
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"debug": True})])
async def test_opened_and_closed_under_load_without_a_sound(caplog: pytest.LogCaptureFixture, deep: bool) -> None:
    """100 times (1,000 in the deep profile). Warnings are errors, asyncio is in debug mode."""
    caplog.set_level(logging.DEBUG)
    descriptors: int | None = None
    with anyio.fail_after(600):
        for number in range(1000 if deep else 100):
            async with EngineClient(engine=in_loop(step_s=0.002), strict=True) as client:
                streams = [await client.submit([n], SamplingParams(max_tokens=1000)) for n in range(20)]
                await anext(streams[number % 20])
            assert [[out.finish_reason async for out in stream][-1] for stream in streams] == ["abort"] * 20
            descriptors = psutil.Process().num_fds() if descriptors is None else descriptors
    assert psutil.Process().num_fds() == descriptors
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING and record.name != "asyncio"]
    assert loud == []


@pytest.mark.case("K18")
async def test_no_zmq_object_is_left_for_the_collector() -> None:
    """With a megabyte queued for a peer that is gone."""

    def open_objects() -> list[object]:
        kinds = (zmq.Socket, zmq.Context)
        return [found for found in gc.get_objects() if issubclass(type(found), kinds) and not found.closed]

    before = len(open_objects())
    client = EngineCoreClient(toy(step_delay_s=0.01))
    with anyio.fail_after(30):
        async with client:
            assert len(open_objects()) > before
            inputs = client.session.endpoints.inputs
            client.session.engines[0].child.kill()
            with suppress(anyio.BrokenResourceError):  # it has been noticed
                for _ in range(10):
                    inputs.send_nowait([b"\x00\x00", b"\x02", bytes(100_000)])
        assert len(open_objects()) == before


@pytest.mark.case("K75")
async def test_a_process_is_idle_after_any_cancellation() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=in_loop(step_s=0.2)) as client:
            for cancel_after_s in (0.0, 0.001, 0.01):
                with anyio.move_on_after(cancel_after_s):
                    async for _ in client.generate([1], SamplingParams(max_tokens=1000)):
                        pass
                with anyio.move_on_after(cancel_after_s):
                    await client.ping()
            await client.ping()
            await _assert_idle()
        with anyio.CancelScope() as scope:
            async with EngineClient(engine=in_loop(step_s=0.2), drain_timeout_s=60) as other:
                stream = await other.submit([1], SamplingParams(max_tokens=1000))
                scope.cancel()
        await _assert_idle()
        await stream.aclose()


class _Stubborn:
    """An await of somebody else's that cannot be cancelled, until :meth:`relent`."""

    def __init__(self) -> None:
        self._relents: Callable[[], object] | None = None

    async def wait(self) -> None:
        if self.is_awaited:
            return  # once is enough
        if sniffio.current_async_library() == "trio":
            task = trio.lowlevel.current_task()
            self._relents = lambda: trio.lowlevel.reschedule(task)
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        else:
            future = _StubbornFuture()
            self._relents = lambda: future.set_result(None)
            await future

    @property
    def is_awaited(self) -> bool:
        return self._relents is not None

    def relent(self) -> None:
        assert self._relents is not None
        self._relents()


class _StubbornFuture(asyncio.Future[None]):
    def cancel(self, msg: object = None) -> bool:
        return False


@pytest.mark.case("K75")
@pytest.mark.parametrize("how", ["refused", "swallowed"])
async def test_a_process_is_idle_after_a_cancellation_that_somebody_would_not_have(how: str) -> None:
    """While it is refused the loop may spin, which is the loop's business; then all is over at once."""
    stubborn, scope = _Stubborn(), anyio.CancelScope()
    scripted = ScriptedTwin(Script(step_interval_s=0.2))

    async def third_party() -> None:
        if how == "refused":
            await stubborn.wait()
        else:
            with suppress(anyio.get_cancelled_exc_class()):
                await anyio.sleep_forever()

    async def live() -> None:
        with scope:
            async with EngineClient(engine=scripted.engine) as client:
                async with client.generate([1], SamplingParams(max_tokens=2000)) as stream:
                    async for _ in stream:
                        await third_party()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live)
            while not scripted.received("add"):
                await anyio.lowlevel.checkpoint()
            while how == "refused" and not stubborn.is_awaited:
                await anyio.lowlevel.checkpoint()
            scope.cancel()
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            if how == "refused":
                stubborn.relent()
        assert scope.cancelled_caught
        await _assert_idle()
    assert len(scripted.received("abort")) == 1


async def _assert_idle() -> None:
    used_s = time.process_time()
    await anyio.sleep(0.4)
    assert time.process_time() - used_s < 0.05 * 0.4
