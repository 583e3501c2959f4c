"""Real vLLM engine cores publish what their KV caches take in; each rank at an address of its own."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import anyio
import pytest
from vllm_engines import Holdings, make_vllm_model, on_trio, one_process, tiny_vllm

from anyengine import AllBlocksCleared, BlockStored, EngineClient, EngineDeadError, SamplingParams

pytestmark = pytest.mark.anyio

SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
PUBLISHES = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}


def two_free_ports() -> int:
    """The first of two: vLLM adds the rank to what it is given."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@on_trio
@pytest.mark.feature("C32")
async def test_each_rank_tells_of_its_own_blocks(vllm_python: str, tmp_path: Path) -> None:
    port = two_free_ports()
    config = {**PUBLISHES, "endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port + 1000}"}
    engine = tiny_vllm(
        vllm_python, make_vllm_model(tmp_path), env=one_process, data_parallel_size=2, kv_events_config=config
    )
    with anyio.fail_after(300):
        async with EngineClient(engine=engine, shutdown_grace_s=20) as client:
            sources = client.get_kv_event_sources()
            assert {rank: one.endpoint for rank, one in sources.items()} == {
                0: f"tcp://*:{port}",
                1: f"tcp://*:{port + 1}",
            }
            assert (sources[1].replay_endpoint, sources[1].topic) == (f"tcp://*:{port + 1001}", "kv")
            ready = client.core.registrations[1]
            assert ready is not None and ready.block_size is not None
            async with client.kv_events(1) as events:
                length, number = 3 * ready.block_size + 1, 0
                batch = None
                while batch is None:  # until the subscription has arrived
                    number += 1
                    prompt = [number] * length
                    await client.complete(prompt, SHORT, data_parallel_rank=1)
                    await client.complete(prompt, SHORT, data_parallel_rank=0)  # of whose blocks nothing is told here
                    with anyio.move_on_after(0.5):
                        batch = await anext(events)
                (stored,) = batch.events
                assert isinstance(stored, BlockStored), stored
                assert len(stored.block_hashes) == 3 and stored.parent_block_hash is None
                assert stored.token_ids == [stored.token_ids[0]] * (3 * ready.block_size)
                assert (stored.block_size, stored.medium) == (ready.block_size, "GPU")
                assert (batch.missed, batch.unread_events, batch.topic) == (0, 0, "kv")
                assert batch.rank == batch.data_parallel_rank == 1
                await client.reset_prefix_cache()
                await client.complete([200] * length, SHORT, data_parallel_rank=1)
                while not any(isinstance(event, AllBlocksCleared) for event in batch.events):
                    last, batch = batch, await anext(events)
                    assert (batch.sequence_number, batch.missed) == (last.sequence_number + 1, 0)
                pid = next(one.child.pid for one in client.core.session.children if one.rank == 1)
                held = Holdings.of(pid)
                os.kill(pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError):
                    while True:
                        await anext(events)
                assert events.malformed_messages == 0
                await client.complete([1], SHORT)
    assert not held.left()
