"""The embedded default model, for real: resolved by its alias, equal to transformers reading the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from reference_generation import Reference, assert_agrees, reference_of
from tiny_models import generate_staggered, make_sequence, open_runner

from anyengine.engine.interfaces import ModelRunner
from anyengine.engine.models import ResolvedModel, resolve_model
from anyengine.engine.models.convert import load_gguf_weights
from anyengine.engine.models.resolve import ALIASES

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m"
MAX_TOKENS = 16
PROMPTS = [
    "The capital of France is",
    "What is the capital of France?",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 5, 8, 13,",
    "The opposite of hot is",
    "In 1969, the first human",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "Q: How many legs does a spider have?\nA:",
    "The quick brown fox",
    "To make pancakes, you need",
    "Die Hauptstadt von Deutschland ist",
    "She opened the door and saw",
    "The largest planet in the solar system is",
    "import numpy as np\n\nx = np.",
    "Roses are red, violets are",
]


@pytest.fixture(scope="module")
def resolved() -> ResolvedModel:
    return resolve_model(MODEL, lambda _status: None)


@pytest.fixture(scope="module")
def tokenizer(resolved: ResolvedModel) -> Any:
    return transformers.AutoTokenizer.from_pretrained(resolved.model_dir)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text).input_ids for text in PROMPTS]


@pytest.fixture(scope="module")
def runner(resolved: ResolvedModel) -> ModelRunner:
    return open_runner(MODEL, max_num_seqs=8)


@pytest.fixture(scope="module")
def references(resolved: ResolvedModel, prompts: list[list[int]]) -> list[Reference]:
    """From the GGUF file itself where that is the source, so that our unpacking of it is under test as well."""
    torch.set_num_threads(1)
    gguf = ALIASES[MODEL].cached_file
    if gguf.is_file():
        config = transformers.AutoConfig.from_pretrained(resolved.model_dir)
        model = load_gguf_weights(gguf, config, "float32")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(resolved.weights, dtype="float32")
    return [reference_of(model, prompt, MAX_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("batch_size", [1, 8], ids=["alone", "batch of 8"])
def test_greedy_ids_equal_generate(
    runner: ModelRunner,
    prompts: list[list[int]],
    references: list[Reference],
    batch_size: int,
    record_property: Callable[[str, object], None],
) -> None:
    seqs = [make_sequence(str(index), prompt, max_tokens=MAX_TOKENS) for index, prompt in enumerate(prompts)]
    generate_staggered(runner, seqs, batch_size=batch_size)
    for seq, reference in zip(seqs, references, strict=True):
        if note := assert_agrees(f"prompt {seq.request_id}", seq.output_token_ids, reference):
            record_property("note", note)
            print(note)


def test_it_knows_paris_and_stops(runner: ModelRunner, tokenizer: Any) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    seq = make_sequence("question", prompt, max_tokens=64)
    generate_staggered(runner, [seq], batch_size=1)
    assert "Paris" in tokenizer.decode(seq.output_token_ids)
    assert seq.output_token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
