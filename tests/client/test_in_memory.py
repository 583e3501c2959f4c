"""A session over the in-memory transport: an engine that is a task of the client, with the life of a process."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec
import pytest

from anyengine import CommandEngine, EngineClient, EngineDeadError, EngineStartupError, SamplingParams
from anyengine._process.status import Status
from anyengine._process.task_child import TaskExit, TaskHost
from anyengine._transport.memory import MemoryLink
from anyengine.config import InMemoryEngine

pytestmark = pytest.mark.anyio

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
READY = {"max_model_len": 64, "num_gpu_blocks": 1, "block_size": 16, "dtype": "float32", "vllm_version": "0.33.0"}


async def serve(link: MemoryLink, rank: int, host: TaskHost) -> None:
    """One token for each request; a call named "die" is the end."""
    handshake = link.connect_handshake()
    handshake.send_nowait([pack({"status": "HELLO", "local": True, "headless": False})])
    await handshake.drain(1)
    inputs, outputs = link.connect_inputs(), link.connect_outputs()
    inputs.send_nowait([pack(READY)])
    handshake.send_nowait([pack({"status": "READY", "local": True, "headless": False})])
    while True:
        for kind, payload in await inputs.drain():
            message = unpack(payload)
            if kind == b"\x00":
                outputs.send_nowait([pack([rank, [[message[0], [5], None, None, None, 1]], None, 0.0, None])])
            elif kind == b"\x03" and message[2] == "die":
                host.log("it was told to")
                raise TaskExit(7)
            elif kind == b"\x03":
                result = ["generate"] if message[2] == "get_supported_tasks" else False
                outputs.send_nowait([pack([rank, [], None, 0.0, [message[1], None, [None, result]]])])


async def test_it_serves_and_dies_as_a_process_does() -> None:
    """Exit code and log are in the error, which every waiter gets; a second block starts afresh."""
    client = EngineClient(engine=InMemoryEngine(serve=serve))
    for _ in range(2):
        with anyio.fail_after(10):
            async with client:
                outputs = [out async for out in client.generate([1], SamplingParams(max_tokens=1))]
                assert [token for out in outputs for token in out.token_ids] == [5]
                with pytest.raises(EngineDeadError) as caught:
                    await client.core.utility("die", unchecked=True)
                assert (caught.value.exit_code, caught.value.pid) == (7, None)
                assert caught.value.stderr_tail == ("it was told to",)
                with pytest.raises(EngineDeadError):
                    await client.submit([1])


async def test_it_is_killed_if_it_does_not_stop() -> None:
    """It takes no notice of SIGTERM; the block ends with the grace period."""
    with anyio.fail_after(10):
        async with EngineClient(engine=InMemoryEngine(serve=serve), shutdown_grace_s=0.05) as client:
            child = client.core.session.engines[0].child
        assert (child.poll().signal, str(child.poll())) == ("SIGKILL", "was killed by SIGKILL")


async def test_its_exception_fails_the_start() -> None:
    """Its type and text are the cause, as what a process reports."""

    async def explodes(link: MemoryLink, rank: int, host: TaskHost) -> None:
        host.report(Status("loading"))
        raise RuntimeError("no such weights")

    with anyio.fail_after(10):
        with pytest.raises(EngineStartupError) as caught:
            async with EngineClient(engine=InMemoryEngine(serve=explodes)):
                pass
    assert (caught.value.stage, caught.value.exit_code) == ("loading", 1)
    assert caught.value.child_exception == "RuntimeError: no such weights"


async def test_a_cancelled_start_ends_it() -> None:
    """It hangs before its handshake."""
    ended = False

    async def hangs(link: MemoryLink, rank: int, host: TaskHost) -> None:
        nonlocal ended
        try:
            await anyio.sleep_forever()
        finally:
            ended = True

    with anyio.fail_after(10):
        with anyio.move_on_after(0.02):
            async with EngineClient(engine=InMemoryEngine(serve=hangs), shutdown_grace_s=0):
                pass
    assert ended


def test_bad_settings_are_refused() -> None:
    not_callable: Any = 5
    with pytest.raises(ValueError, match="async function"):
        InMemoryEngine(serve=not_callable)
    with pytest.raises(ValueError, match="in memory too"):
        EngineClient(engine=[InMemoryEngine(serve=serve), CommandEngine(argv=("true",))])
