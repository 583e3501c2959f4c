"""Loads a model for the runner: weights, device, dtype, and what it says of its limits and its attention.

Owns the calls into transformers that load. Must not know requests. Code from a model's repository is
never run, and weights in pickle files are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

from anyengine._process.status import Status
from anyengine.config import EmbeddedEngine
from anyengine.engine.models import ResolvedModel
from anyengine.engine.models.convert import load_gguf_weights
from anyengine.engine.runner.forward import attention_windows, learn_layers
from anyengine.engine.runner.paged_cache import LayerShape

__all__ = ["LoadedModel", "WeightFiles", "load_model"]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Weights without a configuration: a directory of safetensors, or one of them, for models of ``model_class``."""

    path: Path
    model_class: Any


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and the facts a runner needs about it."""

    model: Any
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    windows: list[int | None]
    """How far back each layer sees, in tokens."""
    layers: list[LayerShape]
    """What each layer stores of a token."""
    like: torch.Tensor
    """Of the model's dtype and on its device."""
    num_labels: int | None = None
    """Of a model with a head that classifies, which does not generate."""
    problem_type: str | None = None
    """What its labels are to each other, in transformers' words."""


def load_model(
    resolved: ResolvedModel,
    config: EmbeddedEngine,
    report: Callable[[Status], None],
    update: WeightFiles | None = None,
) -> LoadedModel:
    """Load the weights, the model's own or those of an update.

    Raises:
        ValueError: the architecture cannot be served, or the weights are in a format that is not read.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    report(Status("loading", detail=f"{config.model} on {device}", fraction=0.0))
    model = (
        (_from_pretrained(resolved, dtype) if update is None else _from_files(resolved, update, dtype))
        .to(device)
        .eval()
        .requires_grad_(False)
    )
    model_config = model.config.get_text_config(decoder=True)
    windows = attention_windows(model_config)
    loaded = LoadedModel(
        model=model,
        vocab_size=int(model_config.vocab_size),
        hidden_size=int(model_config.hidden_size),
        max_position_embeddings=getattr(model_config, "max_position_embeddings", None),
        eos_token_ids=_eos_token_ids(resolved.model_dir, model_config),
        windows=windows,
        layers=learn_layers(model, windows),
        like=torch.empty(0, dtype=model.dtype, device=model.device),
        num_labels=model.config.num_labels if hasattr(model, "score") else None,
        problem_type=getattr(model.config, "problem_type", None),
    )
    report(Status("loading", detail=f"{config.model} on {device}", fraction=1.0))
    return loaded


def _device(asked: str) -> torch.device:
    if asked == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(asked)


def _dtype(asked: str, device: torch.device) -> str:
    """CPUs are fastest and exact in float32; on an accelerator the checkpoint knows best ("auto")."""
    return "float32" if asked == "auto" and device.type == "cpu" else asked


def _from_pretrained(resolved: ResolvedModel, dtype: str) -> Any:
    transformers.utils.logging.disable_progress_bar()
    weights = resolved.weights
    if weights.is_file():  # a GGUF file that was too large to be unpacked beforehand
        config = AutoConfig.from_pretrained(resolved.model_dir, trust_remote_code=False)
        return load_gguf_weights(weights, config, "bfloat16" if dtype == "auto" else dtype)
    _refuse_pickles(weights)
    config = AutoConfig.from_pretrained(weights, trust_remote_code=False, local_files_only=True)
    classifies = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    family = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    return family.from_pretrained(
        weights, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )


def _from_files(resolved: ResolvedModel, update: WeightFiles, dtype: str) -> Any:
    """The model of ``resolved`` with other weights.

    Raises:
        ValueError: these are not the weights of this model, all of them and no others.
    """
    path = update.path
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except Exception as exc:
            raise ValueError(f"{file}: {exc}") from exc
    if not weights:
        raise ValueError(f"{path} has no *.safetensors file")
    config = AutoConfig.from_pretrained(resolved.model_dir, trust_remote_code=False, local_files_only=True)
    model, found = update.model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(map(str, found.get(kind) or ())):
            raise ValueError(f"{path} does not have the weights of this model: {kind} {', '.join(names[:3])}")
    return model


def _refuse_pickles(model_dir: Path) -> None:
    if not any(model_dir.glob("*.safetensors")):
        raise ValueError(
            f"{model_dir} has no *.safetensors file. Weights in pickle files (*.bin, *.pt) are not read, since "
            f"loading them can run code: convert them, e.g. with transformers' save_pretrained"
        )


def _eos_token_ids(model_dir: Path, config: Any) -> tuple[int, ...]:
    """All ids that end a generation, the first one being *the* EOS.

    The generation configuration's, else the model's.
    """
    eos = None
    if (model_dir / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
