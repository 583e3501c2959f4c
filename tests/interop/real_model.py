"""The embedded default model behind front ends of vLLM: its directory, some prompts, and what transformers answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from reference_generation import Reference, reference_of
from tokenizers import Tokenizer

from anyengine.engine.models import resolve_model

__all__ = ["SMOLLM2_TEXTS", "SmolLM2"]

SMOLLM2_TEXTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "The opposite of hot is",
    "Water boils at a temperature of",
]


@dataclass(frozen=True)
class SmolLM2:
    directory: Path
    prompts: list[list[int]]
    """Of :data:`SMOLLM2_TEXTS`."""

    @classmethod
    def found(cls) -> SmolLM2:
        directory = Path(resolve_model("smollm2-135m", lambda _status: None).weights)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        return cls(directory, [tokenizer.encode(text).ids for text in SMOLLM2_TEXTS])

    def references(self, max_tokens: int) -> list[Reference]:
        """What transformers answers, end tokens ignored."""
        model = transformers.AutoModelForCausalLM.from_pretrained(self.directory, dtype="float32")
        model.generation_config.eos_token_id = None
        with torch.no_grad():
            return [reference_of(model, prompt, max_tokens) for prompt in self.prompts]

    def text(self, token_ids: list[int]) -> str:
        return str(Tokenizer.from_file(str(self.directory / "tokenizer.json")).decode(token_ids))
