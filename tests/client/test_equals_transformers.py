"""Through the whole client: greedy ids equal transformers' ``generate``, alone and in a staggered batch of eight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from reference_generation import Reference, assert_agrees, reference_of
from tiny_models import VOCAB_SIZE, make_tiny_model

from anyengine import EmbeddedEngine, EngineClient, SamplingParams
from anyengine.testing.pytest_plugin import BACKENDS

MAX_TOKENS = 16
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)

rng = random.Random(7)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 24))] for _ in range(20)]


@pytest.fixture(scope="module")
def model_and_references(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Reference]]:
    path = make_tiny_model(architecture, tmp_path_factory.mktemp(architecture))
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    with torch.no_grad():
        return path, [reference_of(model, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.anyio
@pytest.mark.parametrize(  # each architecture on one loop: a token is the same on all
    ("architecture", "anyio_backend"),
    [("gpt_neox", BACKENDS["trio"]), ("gemma2", BACKENDS["asyncio"])],
    ids=["gpt_neox-trio", "gemma2-asyncio"],
    scope="module",
)
async def test_greedy_ids(model_and_references: tuple[Path, list[Reference]], record_property: Any) -> None:
    path, references = model_and_references
    alone: dict[int, list[int]] = {}
    together: dict[int, list[int]] = {}

    async def consume(client: EngineClient, i: int, started: anyio.Event) -> None:
        together[i] = []
        async for out in client.generate(PROMPTS[i], PARAMS):
            together[i] += out.token_ids
            started.set()

    with anyio.fail_after(120):
        async with EngineClient(engine=EmbeddedEngine(model=str(path), num_threads=1, max_num_seqs=8)) as client:
            for i, prompt in enumerate(PROMPTS):
                alone[i] = [t async for out in client.generate(prompt, PARAMS) for t in out.token_ids]
            async with anyio.create_task_group() as tasks:
                for i in range(len(PROMPTS)):  # each joins when the one before it has begun: no two start together
                    started = anyio.Event()
                    tasks.start_soon(consume, client, i, started)
                    await started.wait()
    for answers, name in ((alone, "alone"), (together, "together")):
        for i, reference in enumerate(references):
            if note := assert_agrees(f"{path.name} {name} prompt {i}", answers[i], reference):
                record_property("too close to call", note)
                print(note)


@pytest.fixture
def model_and_logprobs(tmp_path: Path) -> tuple[Path, list[int], torch.Tensor]:
    """A model, a prompt, and the log-probabilities of the token behind each of its positions: [num_tokens, vocab]."""
    path = make_tiny_model("qwen2", tmp_path / "model")
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    with torch.no_grad():
        return path, prompt, model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(dim=-1)


@pytest.mark.anyio
@pytest.mark.feature("R14")
@pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]])
async def test_named_ids_of_a_prompt_have_transformers_scores(
    model_and_logprobs: tuple[Path, list[int], torch.Tensor],
) -> None:
    """Position by position from the start on, padding included, behind a prefix that is cached."""
    path, prompt, expected = model_and_logprobs
    start = 3
    ids = [[token, -1, 7] for token in prompt[start + 1 :]]
    params = SamplingParams(max_tokens=2, prompt_logprob_token_ids=ids, prompt_logprob_start=start)
    with anyio.fail_after(120):
        async with EngineClient(engine=EmbeddedEngine(model=str(path), num_threads=1)) as client:
            await client.complete(prompt, SamplingParams(max_tokens=2))
            out = await client.complete(prompt, params)
    assert out.prompt_token_id_logprobs is not None
    found = torch.tensor(out.prompt_token_id_logprobs.tolist())
    expected = expected[start:-1]
    assert found.shape == (len(prompt) - 1 - start, 3) and found[:, 1].eq(-torch.inf).all()
    named = torch.stack((expected[range(len(ids)), prompt[start + 1 :]], expected[:, 7]), dim=-1)
    torch.testing.assert_close(found[:, [0, 2]], named, atol=1e-4, rtol=1e-4)
