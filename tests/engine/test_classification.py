"""Models with a head that classifies: the probabilities of transformers' own, in chunks and in company."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from tiny_models import VOCAB_SIZE, make_tiny_model, open_runner

from anyengine import EngineClient, PoolingParams, RequestRejected
from anyengine._wire import EngineCoreRequest, FinishReason, WirePoolingParams, WireSamplingParams
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore

PROMPTS = [[(seed * 31 + 7 * i) % VOCAB_SIZE for i in range(5 + 9 * seed)] for seed in range(6)]


def make_classifier(architecture: str, directory: Path, **settings: Any) -> Path:
    config = transformers.AutoConfig.from_pretrained(make_tiny_model(architecture, directory / "base"))
    for name, value in settings.items():
        setattr(config, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(directory)
    return directory


def classify(engine: EngineCore, prompts: list[list[int]], **params: Any) -> list[list[float]]:
    for number, prompt in enumerate(prompts):
        pooling = WirePoolingParams(task="classify", **params)
        engine.add(EngineCoreRequest(str(number), prompt, pooling_params=pooling))
    found: dict[int, list[float]] = {}
    while engine.has_work():
        for _, output in engine.step():
            assert output.finish_reason is FinishReason.STOP, output.error
            data = output.pooling_output
            assert data is not None
            found[int(output.request_id)] = list(struct.unpack(f"<{data.shape[0]}f", data.data))
    return [found[number] for number in range(len(prompts))]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier("llama", tmp_path_factory.mktemp("models") / "llama", num_labels=3)


def raw_scores(model_dir: Path, prompts: list[list[int]]) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(model_dir, dtype="float32")
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([prompt])).logits for prompt in prompts])


@pytest.mark.feature("R50")
@pytest.mark.parametrize(
    ("architecture", "settings", "activation"),
    [
        ("llama", {"num_labels": 3}, "softmax"),
        ("qwen3", {"num_labels": 1}, "sigmoid"),
        ("gemma2", {"num_labels": 4, "problem_type": "multi_label_classification"}, "sigmoid"),
        ("mistral", {"num_labels": 1, "problem_type": "regression"}, "none"),
    ],
)
def test_probabilities_equal_transformers(
    architecture: str, settings: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    model_dir = make_classifier(architecture, tmp_path / architecture, **settings)
    engine = EngineCore(open_runner(model_dir), EmbeddedEngine(max_num_batched_tokens=16))
    assert engine.utility("get_supported_tasks", []) == ["classify"]
    scores = raw_scores(model_dir, PROMPTS)
    expected = {"softmax": scores.softmax(-1), "sigmoid": scores.sigmoid(), "none": scores}[activation]
    torch.testing.assert_close(torch.tensor(classify(engine, PROMPTS)), expected, atol=1e-4, rtol=1e-4)
    raw = classify(engine, PROMPTS, use_activation=False)
    torch.testing.assert_close(torch.tensor(raw), scores, atol=1e-3, rtol=1e-3)


def test_a_classifier_refuses_to_generate_and_to_embed(tmp_path: Path) -> None:
    engine = EngineCore(open_runner(make_classifier("llama", tmp_path / "llama", num_labels=2)), EmbeddedEngine())
    requests = {
        "does not generate": {"sampling_params": WireSamplingParams()},
        "task='embed'": {"pooling_params": WirePoolingParams(task="embed")},
        "dimensions=2": {"pooling_params": WirePoolingParams(task="classify", dimensions=2)},
    }
    for reason, fields in requests.items():
        engine.add(EngineCoreRequest(reason, [1, 2], **fields))
    for _, output in engine.step():
        assert output.error is not None and output.request_id in output.error.message


@pytest.mark.anyio
@pytest.mark.feature("R50")
async def test_a_client_asks_the_engine_what_it_can_do(classifier: Path) -> None:
    engine = EmbeddedEngine(model=str(classifier), num_threads=1, in_process=True)
    with anyio.fail_after(60):
        async with EngineClient(engine=engine) as client:
            found = [await client.encode(prompt, PoolingParams(task="classify")) for prompt in PROMPTS[:2]]
            with pytest.raises(RequestRejected, match="does not generate"):
                await client.generate([1, 2]).final()
    for output in found:
        assert output.data.shape == (3,)
        assert sum(struct.unpack("<3f", output.data.data)) == pytest.approx(1.0)
