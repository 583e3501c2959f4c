"""The embedded engine on a GPU, where there is one: the same ids as transformers' ``generate``, with CUDA graphs and
without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import transformers
from reference_generation import assert_greedy
from tiny_models import ARCHITECTURES, VOCAB_SIZE, generate_staggered, make_sequence, make_tiny_model, open_runner

from anyengine.engine.runner.model_runner import TransformersRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

rng = random.Random(3)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 17, 40, 150)))] for _ in range(10)]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_equal_generate(
    architecture: str, enforce_eager: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_tiny_model(architecture, tmp_path / architecture)
    runner = open_runner(path, device="cuda", dtype="float32", enforce_eager=enforce_eager)
    assert isinstance(runner, TransformersRunner)
    seqs = [make_sequence(str(number), prompt, max_tokens=12) for number, prompt in enumerate(PROMPTS)]
    generate_staggered(runner, seqs, batch_size=6, chunk_tokens=30)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    for seq in seqs:
        assert_greedy(f"{architecture}, {seq.request_id}", model, seq.prompt_token_ids, seq.output_token_ids)
    graphs = runner._residency.graphs
    assert (graphs is None) == enforce_eager
    assert graphs is None or graphs._graphs, "none was recorded: see the log"
    assert not [record.getMessage() for record in caplog.records if "without recordings" in record.getMessage()]


@pytest.mark.parametrize("leave", ["sleep 1", "sleep 2", "reload"])
def test_weights_and_cache_come_back(leave: str, tmp_path: Path) -> None:
    runner = open_runner(make_tiny_model("llama", tmp_path / "model"), device="cuda")
    assert isinstance(runner, TransformersRunner)
    answers: list[list[int]] = []
    for name in "ab":
        seqs = [make_sequence(name + str(number), prompt, max_tokens=12) for number, prompt in enumerate(PROMPTS[:4])]
        generate_staggered(runner, seqs, batch_size=4)
        answers.append([token for seq in seqs for token in seq.output_token_ids])
        if leave == "reload":
            runner.reload_weights()
        else:
            runner.sleep(int(leave[-1]))
            runner.wake_up()
    assert answers[0] == answers[1]
