"""A client, and what it made, used from another loop, thread or backend than the one that entered it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
import trio
from engines import toy
from memory_engines import in_loop

from anyengine import EngineClient, RequestStream, SamplingParams, WrongLoopError
from anyengine.testing.scripted import ScriptedTwin
from anyengine.testing.toy_runner import expected_tokens

Use = Callable[[EngineClient, RequestStream], Awaitable[Any]]


async def take(client: EngineClient, stream: RequestStream) -> None:
    await anext(stream)


USES: dict[str, Use] = {
    "submit": lambda client, stream: client.submit([1]),
    "generate": lambda client, stream: anext(client.generate([1])),
    "take": take,
    "utility": lambda client, stream: client.core.utility("is_sleeping"),
    "ping": lambda client, stream: client.ping(),
    "abort": lambda client, stream: client.abort("x"),
    "wait_dead": lambda client, stream: client.wait_dead(),
    "aclose": lambda client, stream: client.aclose(),
    "outputs": lambda client, stream: client.core.receive_outputs(),
}


class Entered:
    """A client that was entered in an asyncio loop, which is not running now; its stream has nothing to take."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = EngineClient(engine=in_loop(step_s=1000))
        self._leave: asyncio.Event
        self._entered = asyncio.Event()
        self._task = self.loop.create_task(self._live())
        self.loop.run_until_complete(self._entered.wait())

    async def _live(self) -> None:
        self._leave = asyncio.Event()
        async with self.client:
            self.stream = await self.client.submit([1], SamplingParams(max_tokens=10))
            self._entered.set()
            await self._leave.wait()

    def close(self) -> None:
        self._leave.set()
        self.loop.run_until_complete(self._task)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


@pytest.fixture
def entered() -> Iterator[Entered]:
    entered = Entered()
    yield entered
    entered.close()


@pytest.mark.case("K37")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_another_loop_of_the_same_thread_is_refused_at_once(entered: Entered, use: Use, backend: str) -> None:
    async def main() -> None:
        with anyio.fail_after(1), pytest.raises(WrongLoopError):
            await use(entered.client, entered.stream)

    if backend == "trio":
        trio.run(main)
    else:
        other = asyncio.new_event_loop()
        other.run_until_complete(main())
        other.close()


@pytest.mark.case("K37")
@pytest.mark.anyio
@pytest.mark.parametrize("use", USES.values(), ids=USES)
async def test_another_thread_is_refused_at_once(use: Use) -> None:
    def elsewhere(client: EngineClient, stream: RequestStream) -> None:
        async def main() -> None:
            with anyio.fail_after(1), pytest.raises(WrongLoopError):
                await use(client, stream)

        anyio.run(main)

    with anyio.fail_after(20):
        async with EngineClient(engine=in_loop(step_s=1000)) as client:
            stream = await client.submit([1], SamplingParams(max_tokens=10))
            await anyio.to_thread.run_sync(elsewhere, client, stream)
            await client.core.wait_room()  # nothing is broken by it
            await stream.aclose()


@pytest.mark.case("K37")
def test_successive_runs_of_every_pair_of_backends() -> None:
    client = EngineClient(engine=in_loop())
    process = EngineClient(engine=toy())

    async def main(client: EngineClient) -> list[int]:
        with anyio.fail_after(30):
            async with client:
                return [t async for out in client.generate([3], SamplingParams(max_tokens=5)) for t in out.token_ids]

    loops: list[tuple[str, dict[str, Any]]] = [("asyncio", {}), ("asyncio", {"use_uvloop": True}), ("trio", {})]
    for first in loops:
        for second in loops:
            for backend, options in (first, second):
                assert anyio.run(main, client, backend=backend, backend_options=options) == expected_tokens([3], 5)
    for backend, options in (*loops, loops[0]):
        assert anyio.run(main, process, backend=backend, backend_options=options) == expected_tokens([3], 5)


def test_a_client_of_a_host_loop_beside_a_trio_guest() -> None:
    """Where trio runs as a guest of asyncio, the thread is in both: which loop it is, is the present task's."""

    async def host() -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[object] = loop.create_future()
        runs, leave = asyncio.Event(), trio.CancelScope()

        async def guest() -> None:
            with leave:
                async with EngineClient(engine=ScriptedTwin().engine) as client:
                    assert len((await client.complete([2], SamplingParams(max_tokens=3))).token_ids) == 3
                    runs.set()
                    await trio.sleep_forever()

        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=ended.set_result,
            host_uses_signal_set_wakeup_fd=True,
        )
        with anyio.fail_after(30):
            await runs.wait()
            async with EngineClient(engine=ScriptedTwin().engine) as client:
                assert len((await client.complete([1], SamplingParams(max_tokens=3))).token_ids) == 3
            leave.cancel()
            await ended

    asyncio.run(host())
