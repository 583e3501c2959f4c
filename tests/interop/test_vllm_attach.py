"""Unmodified ``vllm serve`` that we have not started: ``--headless`` engines that join, are taken over, and die."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
import transformers
from anyio.streams.buffered import BufferedByteReceiveStream
from reference_generation import Reference, assert_agrees, reference_of
from tiny_models import VOCAB_SIZE
from vllm_engines import make_vllm_model, on_asyncio, on_trio
from vllm_serve import Launcher, headless

from anyengine import EngineClient, EngineDeadError, RemoteEngine, RunningEngine, SamplingParams, Status
from anyengine._wire import engine_identity

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

MAX_TOKENS = 12
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)
LOOPBACK = "tcp://127.0.0.1:*"

rng = random.Random(6)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 30))] for _ in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    reference_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    with torch.no_grad():
        return [reference_of(reference_model, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.fixture
def launchers() -> Iterator[ExitStack]:
    """Where a launcher is entered as soon as its address is known; it outlives the clients."""
    with ExitStack() as stack:
        yield stack


async def check_answers(client: EngineClient, references: list[Reference]) -> None:
    answers: dict[int, list[int]] = {}

    async def ask(i: int) -> None:
        answers[i] = [token async for out in client.generate(PROMPTS[i], GREEDY) for token in out.token_ids]

    async with anyio.create_task_group() as tasks:
        for i in range(len(PROMPTS)):
            tasks.start_soon(ask, i)
    for i, reference in enumerate(references):
        assert_agrees(f"prompt {i}", answers[i], reference)


async def holds_no_request(client: EngineClient, rank: int = 0) -> bool:
    """vLLM clears its prefix cache only while no request has a block of it."""
    return bool(await client.core.utility("reset_prefix_cache", rank=rank))


# -------------------------------------------------------------------------------------- one rank, and its second client

HOST = """
import sys, anyio, msgspec
from anyengine import EngineClient, RemoteEngine, SamplingParams

async def main():
    engine = msgspec.json.decode(sys.argv[1], type=RemoteEngine)
    listening = lambda status: print(status.detail, flush=True)
    async with EngineClient(engine=engine, startup_timeout_s=200, on_progress=listening) as client:
        stream = await client.submit([1, 2, 3], SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True))
        await anext(stream)
        print(msgspec.json.encode(client.core.running_engine).decode(), flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend=sys.argv[2])
"""


@pytest.fixture
def sockets(private_temp_dir: Path) -> Iterator[Path]:
    (directory := private_temp_dir / "s").mkdir()
    yield directory
    assert list(directory.iterdir()) == []
    directory.rmdir()


@pytest.mark.feature("D02", "F15")
@on_asyncio
async def test_one_headless_engine_and_two_clients_in_turn(
    vllm_python: str,
    model: Path,
    references: list[Reference],
    launchers: ExitStack,
    sockets: Path,
    anyio_backend_name: str,
) -> None:
    """The first client is killed in the middle of a request; the next one takes over; the third finds nothing of it."""
    remote = RemoteEngine(
        handshake=LOOPBACK, inputs=f"ipc://{sockets}/i", outputs=f"ipc://{sockets}/o", model_dir=str(model)
    )
    command = [sys.executable, "-c", HOST, msgspec.json.encode(remote).decode(), anyio_backend_name]
    with anyio.fail_after(240):
        async with await anyio.open_process(command, stderr=None) as host:
            assert host.stdout is not None
            lines = BufferedByteReceiveStream(host.stdout)
            address = (await lines.receive_until(b"\n", 1000)).decode()
            launcher = launchers.enter_context(headless(vllm_python, model, address))
            stored = await lines.receive_until(b"\n", 100_000)
            host.kill()
        running = msgspec.json.decode(stored, type=RunningEngine)
        async with EngineClient(engine=running, startup_timeout_s=20) as client:
            await check_answers(client, references)
            assert client.statistics()["late_outputs"] > 0
            assert client.tokenizer.decode(client.tokenizer.encode("taken over")) == "taken over"
            assert not await holds_no_request(client)  # the dead client's
            await client.pause_generation(mode="abort")
            await client.resume_generation()
            assert await holds_no_request(client)
            ours = await client.submit([1, 2, 3], LONG)
            await anext(ours)
        (engine,) = launcher.engines()
        assert engine.is_running()
        async with EngineClient(engine=running, startup_timeout_s=20) as client:
            assert await holds_no_request(client)
            await check_answers(client, references)


# ------------------------------------------------------------------------------------------------------------ two ranks


@asynccontextmanager
async def two_ranks(python: str, model: Path, launchers: ExitStack) -> AsyncIterator[tuple[EngineClient, Launcher]]:
    started: list[Launcher] = []

    def on_progress(status: Status) -> None:
        started.append(launchers.enter_context(headless(python, model, status.detail, ranks=2)))

    engine = RemoteEngine(handshake=LOOPBACK, ranks=2, model_dir=str(model))
    async with EngineClient(engine=engine, startup_timeout_s=240, on_progress=on_progress) as client:
        yield client, started[0]


@pytest.mark.feature("D02", "L06")
@on_trio
async def test_two_headless_ranks(
    vllm_python: str, model: Path, references: list[Reference], launchers: ExitStack, anyio_backend_name: str
) -> None:
    """Both work. One is killed, the other goes on; it then goes mute, or deaf, and that is its end too."""
    with anyio.fail_after(300):
        async with two_ranks(vllm_python, model, launchers) as (client, launcher):
            await check_answers(client, references)
            streams = [await client.submit(PROMPTS[0], LONG) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            assert [await holds_no_request(client, rank) for rank in range(2)] == [False, False]  # one each

            engines = launcher.engines()
            launcher.freeze()  # else it would end the other engine, too
            engines[0].kill()
            with anyio.fail_after(2), pytest.raises(EngineDeadError) as caught:
                async for _ in streams[0]:
                    pass
            assert caught.value.rank == 0
            assert client.ranks == (1,)
            for _ in range(3):
                await anext(streams[1])
            await check_answers(client, references)

            link = {"asyncio": "input", "trio": "output"}[anyio_backend_name]
            client.core.session.endpoints.inputs.send_nowait([engine_identity(1), *POISON[link]])
            # The engine has to read it first, on a machine that runs other engines.
            with anyio.fail_after(10), pytest.raises(EngineDeadError, match=f"its {link} connection is gone") as caught:
                async for _ in streams[1]:
                    pass
            assert caught.value.rank == 1
            with pytest.raises(EngineDeadError):
                await client.ping()
        assert engines[1].is_running()  # it is not ours to end
        launcher.thaw()


POISON = {  # what ends one thread of a vLLM engine core: its input thread, or its output thread
    "input": [b"\x00", b"\xc1"],
    "output": [b"\x03", msgspec.msgpack.encode([99, 1, "is_sleeping", []])],
}
