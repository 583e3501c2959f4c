"""A tiny model with a tokenizer that can end a text, an adapter for it, and what both should compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from vllm_engines import make_vllm_model

__all__ = ["EOS", "adapted", "log_probs", "make_adapter", "make_request_model"]

EOS = 256
"""The first id after the bytes of ``make_vllm_model``'s tokenizer."""

_RANK, _ALPHA = 4, 16


def make_request_model(directory: Path) -> Path:
    """``make_vllm_model`` with an end-of-sequence token, which grammars need."""
    make_vllm_model(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    assert tokenizer.token_to_id("</s>") == EOS
    tokenizer.save(str(directory / "tokenizer.json"))
    _update(directory / "tokenizer_config.json", eos_token="</s>")
    _update(directory / "config.json", eos_token_id=EOS)
    _update(directory / "generation_config.json", eos_token_id=EOS)
    return directory


def _update(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def make_adapter(directory: Path, model: Path) -> Path:
    """A LoRA adapter in PEFT's layout, strong enough to change answers."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // heads * config["num_key_value_heads"]}
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator) * 0.2
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, _RANK, generator=generator) * 0.2
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(outputs),
        "base_model_name_or_path": str(model),
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def adapted(model: Path, adapter: Path) -> Any:
    """transformers' model with the adapter merged into its weights, by the formula."""
    from safetensors.torch import load_file

    merged = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, a in parts.items():
        if name.endswith("lora_A.weight"):
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = parts[name.replace("lora_A", "lora_B")]
            merged.get_submodule(path).weight.data += _ALPHA / _RANK * b @ a
    return merged


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    """Row i: the log-probabilities of what may follow ``ids[: i + 1]``: [num_ids, vocab]."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
