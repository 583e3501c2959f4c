"""An engine core in the client's own loop: the whole client, without a process, a socket or a thread."""

from __future__ import annotations

import anyio
import pytest
from engines import toy
from memory_engines import in_loop

from anyengine import EmbeddedEngine, EngineClient, EngineDeadError, EngineStartupError, SamplingParams
from anyengine.config import MemoryEngine
from anyengine.testing.toy_runner import expected_tokens

pytestmark = pytest.mark.anyio


async def test_generate_and_call() -> None:
    with anyio.fail_after(10):
        async with EngineClient(engine=in_loop()) as client:
            tokens = [t async for out in client.generate([1, 2], SamplingParams(max_tokens=9)) for t in out.token_ids]
            assert tokens == expected_tokens([1, 2], 9)
            await client.ping()


async def test_several_ranks_share_a_client() -> None:
    with anyio.fail_after(10):
        async with EngineClient(engine=[in_loop(), in_loop()]) as client:
            streams = [await client.submit([n], SamplingParams(max_tokens=5)) for n in range(4)]
            assert {stream.rank for stream in streams} == {0, 1}
            for n, stream in enumerate(streams):
                assert [t async for out in stream for t in out.token_ids] == expected_tokens([n], 5)


async def test_its_end_is_a_death_with_its_exit_code_and_last_words() -> None:
    async def main(link, process) -> int:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine.main, link, process)
            await release.wait()
            process.log("out of luck")
            tasks.cancel_scope.cancel()
        return -11

    engine, release = in_loop(step_s=0.01), anyio.Event()
    with anyio.fail_after(10):
        async with EngineClient(engine=MemoryEngine(main=main)) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=2000))
            await anext(stream)
            release.set()
            with pytest.raises(EngineDeadError) as caught:
                [out async for out in stream]
    assert (caught.value.signal, caught.value.pid, caught.value.stderr_tail) == ("SIGSEGV", None, ("out of luck",))


async def test_its_failure_before_it_is_ready_is_a_failed_start() -> None:
    async def main(link, process) -> int:
        link.connect_handshake()
        raise LookupError("no such model")

    with anyio.fail_after(10), pytest.raises(EngineStartupError) as caught:
        async with EngineClient(engine=MemoryEngine(main=main)):
            pytest.fail("it must not become ready")
    assert caught.value.exit_code == 1
    assert "LookupError: no such model" in caught.value.stderr_tail


async def test_engines_of_two_kinds_cannot_be_ranks_of_one_client() -> None:
    with pytest.raises(ValueError, match="ranks of one client"):
        EngineClient(engine=[toy(), EmbeddedEngine(in_process=True)])
    with pytest.raises(ValueError, match="main="):
        MemoryEngine(main=None)  # type: ignore[arg-type]
