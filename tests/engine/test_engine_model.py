"""Core and model together: greedy ids equal transformers' ``generate`` whatever the scheduler does to a request.

A budget that cuts prompts, a cache that is too small for the batch, beginnings in common, requests that come and go:
all at once, for every way that attention is computed.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_generation import assert_greedy
from tiny_models import ARCHITECTURES, VOCAB_SIZE, make_tiny_model, open_runner

from anyengine._wire import EngineCoreRequest, FinishReason, WirePoolingParams, WireSamplingParams
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.core.validation import check_request
from anyengine.engine.runner.model_runner import TransformersRunner
from anyengine.engine.runner.paged_cache import LayerShape, PagedCache

MAX_TOKENS = 16
_random = random.Random(8)
SHARED = [_random.randrange(VOCAB_SIZE) for _ in range(40)]
PROMPTS = [
    SHARED[: _random.choice((0, 20, 40))] + [_random.randrange(VOCAB_SIZE) for _ in range(_random.randrange(1, 30))]
    for _ in range(12)
]


def open_core(model_dir: Path, *, num_blocks: int, **settings: Any) -> EngineCore:
    probe = open_runner(model_dir)
    assert isinstance(probe, TransformersRunner)
    block_bytes = sum(layer[0].numel() * layer.element_size() for layer in probe._residency.cache._layers)
    config = EmbeddedEngine(
        model=str(model_dir), num_threads=1, kv_cache_memory_bytes=num_blocks * block_bytes, **settings
    )
    runner = open_runner(model_dir, kv_cache_memory_bytes=num_blocks * block_bytes, max_model_len=96)
    assert runner.num_kv_blocks == num_blocks
    return EngineCore(runner, config)


@pytest.mark.feature("F16")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_equal_generate_in_spite_of_the_scheduler(architecture: str, tmp_path: Path) -> None:
    model_dir = make_tiny_model(architecture, tmp_path / architecture)
    engine = open_core(model_dir, num_blocks=12, max_num_seqs=6, max_num_batched_tokens=24)
    tokens: dict[str, list[int]] = {}
    waiting = list(enumerate(PROMPTS))
    step = 0
    while waiting or engine.has_work():
        if waiting and step % 2 == 0:
            index, prompt = waiting.pop(0)
            sampling = WireSamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
            engine.add(EngineCoreRequest(str(index), prompt, sampling_params=sampling))
        for _, output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        step += 1
    counts, stats = engine.utility("get_engine_statistics", []), engine.scheduler_stats().prefix_cache_stats
    assert counts["num_preemptions"] > 0, "the cache is too large for this test"
    assert stats is not None and stats.hits > 0
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    for index, prompt in enumerate(PROMPTS):
        assert_greedy(f"{architecture}, prompt {index}", model, prompt, tokens[str(index)])
        assert len(tokens[str(index)]) == MAX_TOKENS


@pytest.mark.feature("R50")
@pytest.mark.parametrize("architecture", ["qwen2", "gpt_neox"])
def test_embeddings_are_the_last_hidden_state(architecture: str, tmp_path: Path) -> None:
    """Beside requests that generate, in chunks, with beginnings in common."""
    model_dir = make_tiny_model(architecture, tmp_path / architecture)
    engine = open_core(model_dir, num_blocks=60, max_num_batched_tokens=24)
    assert engine.utility("get_supported_tasks", []) == ["generate", "embed"]
    shapes: dict[str, dict[str, Any]] = {"plain": {}, "raw": {"use_activation": False}, "short": {"dimensions": 8}}
    for index, prompt in enumerate(PROMPTS[:4]):
        for name, params in shapes.items():
            pooling = WirePoolingParams(task="embed", **params)
            engine.add(EngineCoreRequest(f"{name} {index}", prompt, pooling_params=pooling))
        engine.add(EngineCoreRequest(str(index), prompt, sampling_params=WireSamplingParams(max_tokens=5)))
    found: dict[str, torch.Tensor] = {}
    while engine.has_work():
        for _, output in engine.step():
            if output.pooling_output is not None:
                assert (output.finish_reason, output.new_token_ids) == (FinishReason.STOP, [])
                found[output.request_id] = torch.frombuffer(bytearray(output.pooling_output.data), dtype=torch.float32)
    model = transformers.AutoModel.from_pretrained(model_dir, dtype="float32")
    for index, prompt in enumerate(PROMPTS[:4]):
        with torch.no_grad():
            state = model(input_ids=torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = {"plain": state / state.norm(), "raw": state, "short": state[:8] / state[:8].norm()}
        for name, vector in expected.items():
            torch.testing.assert_close(found[f"{name} {index}"], vector, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("params", "named"),
    [({"task": "classify"}, "task='classify'"), ({"task": "embed", "dimensions": 33}, "dimensions=33.*1 to 32")],
)
def test_pooling_that_it_cannot_do_is_refused(params: dict[str, Any], named: str) -> None:
    request = EngineCoreRequest("a", [1], pooling_params=WirePoolingParams(**params))
    refusal = check_request(request, vocab_size=9, max_model_len=9, pooling_tasks=("embed",), embedding_size=32)
    assert isinstance(refusal, str) and re.search(named, refusal)


def test_a_block_counts_the_bytes_that_it_takes(tmp_path: Path) -> None:
    runner = open_runner(make_tiny_model("gemma2", tmp_path / "gemma2"), max_num_seqs=1)
    assert isinstance(runner, TransformersRunner)
    layers = runner._residency.cache._layers
    shapes = [_shape(layer) for layer in layers]
    assert PagedCache.block_bytes(shapes, layers[0].dtype) * runner.num_kv_blocks == sum(map(_num_bytes, layers))


def _num_bytes(layer: torch.Tensor) -> int:
    return layer.numel() * layer.element_size()


def _shape(layer: torch.Tensor) -> LayerShape:
    return LayerShape(layer.shape[2], layer.shape[4])


def test_a_prefix_of_a_thousand_tokens_is_computed_once(tmp_path: Path) -> None:
    """What the second request says of itself is what went through the model."""
    model_dir = make_tiny_model("llama", tmp_path / "llama", max_position_embeddings=2048)
    runner = open_runner(model_dir)
    engine = EngineCore(runner, EmbeddedEngine(max_num_batched_tokens=300))
    shared = [_random.randrange(VOCAB_SIZE) for _ in range(1000)]
    computed, answers = [], []
    for number in range(2):
        prompt = [*shared, *range(number, number + 10)]
        engine.add(EngineCoreRequest("a", prompt, sampling_params=WireSamplingParams(temperature=0.0, max_tokens=4)))
        outputs = []
        while engine.has_work():
            outputs += [output for _, output in engine.step()]
        stats = outputs[0].prefill_stats
        assert stats is not None
        through_model = engine.utility("get_engine_statistics", [])["num_prefill_tokens_computed"]
        computed.append((stats.num_computed_tokens, stats.num_cached_tokens, through_model))
        answers.append((prompt, [token for output in outputs for token in output.new_token_ids]))
    whole_blocks = 1000 // 16 * 16
    assert computed == [(1010, 0, 1010), (1010 - whole_blocks, whole_blocks, 1010 + 1010 - whole_blocks)]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    for prompt, token_ids in answers:
        assert_greedy("behind a shared prefix", model, prompt, token_ids)
