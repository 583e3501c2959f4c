"""200 concurrent streams on a real (tiny, random) model, a third of them cancelled at random."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest
from tiny_models import VOCAB_SIZE, make_tiny_model

from anyengine import EmbeddedEngine, EngineClient, SamplingParams

pytestmark = pytest.mark.anyio

NUM_STREAMS = 200
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("tiny"), eos_token_id=2)


@pytest.mark.feature("L08")
async def test_a_third_is_cancelled_and_the_rest_is_unchanged(tiny_model: Path) -> None:
    rng = random.Random(20)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))] for _ in range(NUM_STREAMS)]
    victims = set(rng.sample(range(NUM_STREAMS), NUM_STREAMS // 3))
    alone: dict[int, list[int]] = {}
    crowd: dict[int, list[int]] = {i: [] for i in range(NUM_STREAMS)}
    aborted = 0

    async def consume(client: EngineClient, i: int) -> None:
        nonlocal aborted
        async with client.generate(prompts[i], PARAMS) as stream:
            with anyio.CancelScope() as scope:
                if i in victims and rng.random() < 0.3:
                    scope.cancel()  # before its first token
                async for out in stream:
                    crowd[i] += out.token_ids
                    if i in victims and rng.random() < 0.8 and not out.finished:
                        scope.cancel()
            aborted += stream._completions is not None and bool(stream._completions.running())

    with anyio.fail_after(120):
        engine = EmbeddedEngine(model=str(tiny_model), max_num_seqs=32, num_threads=1)
        async with EngineClient(engine=engine) as client:
            for i in range(0, NUM_STREAMS, 10):
                alone[i] = [t async for out in client.generate(prompts[i], PARAMS) for t in out.token_ids]
            async with anyio.create_task_group() as tasks:
                for i in range(NUM_STREAMS):
                    tasks.start_soon(consume, client, i)
            statistics = await client.core.utility("get_engine_statistics")
            # An abort may cross the request's last output: then the engine does not know the id any more.
            assert statistics["aborts_received"] == aborted
            assert aborted > NUM_STREAMS // 10
            assert statistics["num_running_requests"] + statistics["num_waiting_requests"] == 0
            left = {k: v for k, v in client.statistics().items() if k not in ("late_outputs", "unread_bytes")}
            assert left == dict.fromkeys(left, 0)
    for i, tokens in crowd.items():
        if i not in victims:
            assert len(tokens) == 32
        if i in alone:
            assert tokens == alone[i][: len(tokens)]
