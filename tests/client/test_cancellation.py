"""Second cancellations, native ones of the wrong task, and other uninvited guests. Every step of every operation is
cancelled in ``property_tests``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import psutil
import pytest
from engines import misbehaving, toy

from anyengine import (
    ClientClosedError,
    ClientFailedError,
    ClientState,
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    SamplingParams,
    WrongLoopError,
)
from anyengine._client.inputs.request_builder import RequestBuilder
from anyengine._client.requests.output_processor import OutputProcessor
from anyengine._transport.zmq_socket import ZmqSocket
from anyengine.testing.pytest_plugin import BACKENDS

pytestmark = pytest.mark.anyio

LONG = SamplingParams(max_tokens=10_000)
native = pytest.mark.parametrize("anyio_backend", [BACKENDS["asyncio"], BACKENDS["uvloop"]], ids=["asyncio", "uvloop"])


def long_toy() -> Any:
    return toy(step_delay_s=0.002, max_model_len=20_000)


class Ledger:
    """What was sent: the wire id of each ADD, and each id of each ABORT."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: list[str] = []
        self.aborted: list[str] = []
        send = ZmqSocket.send_nowait

        def spy(socket: ZmqSocket, parts: Sequence[Any]) -> None:
            if parts[1] == b"\x00":
                self.added.append(msgspec.msgpack.decode(parts[2])[0])
            elif parts[1] == b"\x01":
                self.aborted += msgspec.msgpack.decode(parts[2])
            send(socket, parts)

        monkeypatch.setattr(ZmqSocket, "send_nowait", spy)


@native
async def test_a_second_native_cancellation_cuts_the_grace_period_short() -> None:
    core = EngineCoreClient(misbehaving("record", os.devnull), shutdown_grace_s=600)
    entered = anyio.Event()
    pid = 0

    async def use() -> None:
        nonlocal pid
        async with core:
            pid = core.session.engines[0].child.pid
            os.kill(pid, signal.SIGSTOP)  # it will not hear a SIGTERM
            entered.set()
            await anyio.sleep_forever()

    with anyio.fail_after(30):
        task = asyncio.create_task(use())
        await entered.wait()
        task.cancel()
        while core.state is not ClientState.CLOSING:
            await anyio.lowlevel.checkpoint()
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()
    assert not psutil.pid_exists(pid)


@native
@pytest.mark.parametrize("including_the_owner", [True, False])
async def test_native_cancellation_of_the_sessions_own_tasks(including_the_owner: bool) -> None:
    """``asyncio.run`` cancels every task at its end. The end of the engine is awaited all the same."""
    before, entered = asyncio.all_tasks(), anyio.Event()

    async def use() -> None:
        async with EngineCoreClient(misbehaving("record", os.devnull), shutdown_grace_s=600):
            entered.set()
            await anyio.sleep_forever()

    with anyio.fail_after(30):
        owner = asyncio.create_task(use())
        await entered.wait()
        for task in asyncio.all_tasks() - before:
            if including_the_owner or task is not owner:
                task.cancel()
        await asyncio.wait([owner])
    if including_the_owner:
        assert owner.cancelled()
    else:  # the body was cut short: that must not look like its end
        assert isinstance(owner.exception(), ClientClosedError)


@native
async def test_a_handler_whose_future_was_cancelled_fails_alone() -> None:
    async def handle(_: object) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    with anyio.fail_after(30):
        async with EngineCoreClient(misbehaving("notify"), on_notification=handle) as core:
            await core.utility("any")
            while core.statistics()["notification_failures"] < 2:
                await anyio.lowlevel.checkpoint()
            answer = await core.utility("any")
    assert answer == "done"  # out here, since the block must not have been cut short in silence


@pytest.mark.parametrize("wait_for", ["utility", "stream", "outputs"])
async def test_a_shielded_body_of_a_cancelled_block_waits_for_nothing_in_vain(wait_for: str) -> None:
    """The session's tasks are cancelled with the block; nobody would ever answer."""
    with anyio.fail_after(30), anyio.CancelScope() as scope:
        if wait_for == "outputs":
            async with EngineCoreClient(toy()) as core:
                scope.cancel()
                with anyio.CancelScope(shield=True), pytest.raises(ClientClosedError):
                    await core.receive_outputs()
        else:
            async with EngineClient(engine=long_toy()) as client:
                stream = await client.submit([1], LONG)
                scope.cancel()
                with anyio.CancelScope(shield=True):
                    if wait_for == "utility":
                        with pytest.raises(ClientClosedError):
                            await client.core.utility("is_sleeping")
                    else:
                        assert [out.finish_reason async for out in stream][-1] == "abort"


async def test_another_thread_is_refused_before_anything_is_touched() -> None:
    async def refused(call: Callable[[], Awaitable[object]]) -> None:
        def elsewhere() -> None:
            with pytest.raises(WrongLoopError):
                anyio.run(call)

        await anyio.to_thread.run_sync(elsewhere)

    async def close() -> None:
        stream.close_nowait()

    async def abort() -> None:
        stream.abort()

    async def iterate() -> None:
        while True:
            await anext(stream)

    with anyio.fail_after(30):
        async with EngineClient(engine=long_toy()) as client:
            stream = await client.submit([1], LONG)
            for call in (close, abort, iterate, client.wait_dead, client.core.receive_outputs):
                await refused(call)
            assert client.statistics()["requests_in_flight"] == 1
            await anext(stream)
            stream.abort()
            assert [out.finish_reason async for out in stream][-1] == "abort"
            statistics = await client.core.utility("get_engine_statistics")
            assert (statistics["aborts_received"], statistics["num_running_requests"]) == (1, 0)


async def test_a_stream_used_by_others_while_its_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed meanwhile, it is never sent; submitted twice, it is sent once."""
    gate, encode = anyio.Event(), RequestBuilder.encode

    async def gated(builder: RequestBuilder, prompt: Any, *options: Any) -> Any:
        await gate.wait()
        return await encode(builder, prompt, *options)

    monkeypatch.setattr(RequestBuilder, "encode", gated)
    with anyio.fail_after(30):
        async with EngineClient(engine=long_toy()) as client:
            closed, twice = client.generate([1], LONG), client.generate([2], LONG)

            async def iterate_closed() -> None:
                assert [out async for out in closed] == []

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(iterate_closed)
                tasks.start_soon(twice.__aenter__)
                tasks.start_soon(twice.__aenter__)
                await anyio.wait_all_tasks_blocked()
                closed.close_nowait()
                gate.set()
            assert client.statistics()["requests_in_flight"] == 1
            twice.close_nowait()
            assert client.statistics()["requests_in_flight"] == 0
            assert (await client.core.utility("get_engine_statistics"))["adds_received"] == 1


async def test_a_failure_of_our_own_reaches_every_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with anyio.fail_after(30):
        async with EngineClient(engine=long_toy()) as client:
            stream = await client.submit([1], LONG)
            ledger = Ledger(monkeypatch)
            monkeypatch.setattr(OutputProcessor, "take", broken)
            for _ in range(2):
                with pytest.raises(ClientFailedError):
                    while True:
                        await anext(stream)
            assert len(ledger.aborted) == 1  # the engine lives: it must not go on
            assert isinstance(await client.wait_dead(), ClientFailedError)
            monkeypatch.undo()


async def test_the_error_of_a_first_use_stays() -> None:
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            client.core.session.engines[0].child.kill()
            await client.wait_dead()
            stream = client.generate([1])
            for _ in range(2):
                with pytest.raises(EngineDeadError):
                    await anext(stream)


class _Interrupt(BaseException):
    """As unfriendly as KeyboardInterrupt, and harmless to the loops."""


@pytest.mark.parametrize("stage", ["spawned", "handshake"])
async def test_a_callback_that_raises_a_base_exception_leaves_no_process(stage: str) -> None:
    def interrupt(status: Any) -> None:
        if status.stage == stage:
            raise _Interrupt

    with anyio.fail_after(30), pytest.raises(_Interrupt):  # plain, not in a group
        async with EngineClient(engine=toy(), on_progress=interrupt):
            raise AssertionError


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ctrl_c_in_one_of_the_sessions_own_tasks(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On trio KeyboardInterrupt strikes whatever task is running; it leaves the block plain."""
    take = OutputProcessor.take

    def interrupted(client: EngineClient, item: Any) -> None:
        monkeypatch.setattr(OutputProcessor, "take", take)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(OutputProcessor, "take", interrupted)

    async def main() -> None:
        with anyio.fail_after(30):
            async with EngineClient(engine=toy()) as client:
                await anext(client.generate([1]))

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main, backend=backend)


async def test_before_it_is_entered_a_client_says_so() -> None:
    client = EngineClient(engine=toy())
    with pytest.raises(ClientClosedError):
        _ = client.tokenizer
    with pytest.raises(ClientClosedError):
        await client.submit([1])
