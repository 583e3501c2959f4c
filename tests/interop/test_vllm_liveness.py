"""Real vLLM engine cores that are stopped, deaf, mute or stuck, alone and as ranks of one client.

What makes an engine deaf or mute cannot be sent through the client: it goes to the socket directly.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import TaskStatus
from vllm_engines import Holdings, make_vllm_model, on_asyncio, on_trio, one_process, tiny_vllm

from anyengine import ClientState, EngineClient, EngineDeadError, EngineUnresponsiveError, SamplingParams

pytestmark = pytest.mark.anyio

MALFORMED_ADD = [b"\x00", b"\xc1"]
ANSWER_ELSEWHERE = [b"\x03", msgspec.msgpack.encode([5, 1, "is_sleeping", []])]  # there is no client 5

SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


def pid_of(client: EngineClient, rank: int) -> int:
    return next(child.child.pid for child in client.core.session.children if child.rank == rank)


def send_raw(client: EngineClient, rank: int, frames: list[bytes]) -> None:
    client.core.session.endpoints.inputs.send_nowait([rank.to_bytes(2, "little"), *frames])


async def tokens(client: EngineClient) -> list[int]:
    return [token async for output in client.generate([1, 2, 3], SHORT) for token in output.token_ids]


class Consumers:
    """One long request on each of two ranks, and how each of them ends."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.errors: dict[int, EngineDeadError] = {}
        self.ended = {rank: anyio.Event() for rank in client.ranks}

    async def consume(self, *, task_status: TaskStatus[None]) -> None:
        async with self.client.generate([1, 2, 3], LONG) as stream:
            await anext(stream)
            assert stream.rank is not None
            task_status.started()
            try:
                async for _ in stream:
                    pass
            except EngineDeadError as exc:
                self.errors[stream.rank] = exc
                self.ended[stream.rank].set()


@pytest.mark.feature("L07", "D03")
@on_trio
async def test_stopped_deaf_and_stuck_among_two_ranks(vllm_python: str, model: Path) -> None:
    engines = [tiny_vllm(vllm_python, model, env=one_process)] * 2
    with anyio.fail_after(200):
        async with EngineClient(engine=engines, shutdown_grace_s=20, liveness_timeout_s=5) as client:
            first, second = await tokens(client), await tokens(client)
            assert client.ranks == (0, 1) and first == second and len(first) == 8
            holdings = [Holdings.of(pid_of(client, rank)) for rank in (0, 1)]

            os.kill(pid_of(client, 0), signal.SIGSTOP)
            with pytest.raises(EngineUnresponsiveError):
                await client.ping(0.5, rank=0)
            assert await client.ping(rank=1) >= 0
            os.kill(pid_of(client, 0), signal.SIGCONT)
            assert await client.ping() >= 0 and await tokens(client) == first

            consumers = Consumers(client)
            async with anyio.create_task_group() as tasks:
                await tasks.start(consumers.consume)
                await tasks.start(consumers.consume)
                send_raw(client, 1, MALFORMED_ADD)
                with anyio.fail_after(2):
                    await consumers.ended[1].wait()
                assert consumers.errors[1].rank == 1 and "input connection is gone" in str(consumers.errors[1])
                assert client.ranks == (0,) and not consumers.ended[0].is_set()
                assert await tokens(client) == first

                os.kill(pid_of(client, 0), signal.SIGSTOP)
                with anyio.fail_after(7):
                    await consumers.ended[0].wait()
                assert type(consumers.errors[0]) is EngineUnresponsiveError
                assert client.state is ClientState.DEAD
    assert not [left for held in holdings for left in held.left()]


@on_asyncio
async def test_mute(vllm_python: str, model: Path) -> None:
    with anyio.fail_after(120):
        async with EngineClient(engine=tiny_vllm(vllm_python, model, env=one_process), shutdown_grace_s=20) as client:
            assert len(await tokens(client)) == 8
            holdings = Holdings.of(pid_of(client, 0))
            stream = await client.submit([1, 2, 3], LONG)
            await anext(stream)
            send_raw(client, 0, ANSWER_ELSEWHERE)
            with anyio.fail_after(2), pytest.raises(EngineDeadError, match="lives, but its output connection is gone"):
                async for _ in stream:
                    pass
    assert not holdings.left()
