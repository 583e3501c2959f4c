"""Loads a model for the runner: weights, device, dtype, and what its configuration says about limits and attention.

Owns the calls into transformers that load. Must not know requests or the cache. Code from a model's repository is
never run, and weights in pickle files are never read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from anyengine._process.status import Status
from anyengine.config import EmbeddedEngine
from anyengine.engine.models import ResolvedModel
from anyengine.engine.models.convert import load_gguf_weights

__all__ = ["AttentionLayout", "LoadedModel", "load_model"]

_FULL, _SLIDING = "full_attention", "sliding_attention"  # as transformers names them


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    """Which earlier tokens a layer sees, and in what form its attention wants to be told.

    ``window_tokens`` is the reach of sliding layers. A model of one kind of layer takes one mask, one of both kinds a
    mask for each.
    """

    layer_types: frozenset[str]
    window_tokens: int
    additive_dtype: torch.dtype | None
    """``None``: boolean masks (sdpa); else masks are added to the scores (eager)."""

    def masks(self, positions: Tensor, view_tokens: int) -> Tensor | dict[str, Tensor]:
        """Masks for queries at ``positions`` [num_rows, num_new_tokens] over the first ``view_tokens`` of each row."""
        keys = torch.arange(view_tokens, device=positions.device)
        queries = positions[:, None, :, None]  # [num_rows, 1, num_new_tokens, 1]
        visible = {_FULL: keys <= queries}  # [num_rows, 1, num_new_tokens, view_tokens], bool
        if _SLIDING in self.layer_types:
            visible[_SLIDING] = visible[_FULL] & (keys > queries - self.window_tokens)
        masks = {layer_type: self._form(visible[layer_type]) for layer_type in self.layer_types}
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _form(self, visible: Tensor) -> Tensor:
        if self.additive_dtype is None:
            return visible
        lowest = torch.finfo(self.additive_dtype).min
        zeros = torch.zeros(visible.shape, dtype=self.additive_dtype, device=visible.device)
        return zeros.masked_fill(~visible, lowest)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, and the facts a runner needs about it."""

    model: Any
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]
    attention: AttentionLayout


def load_model(resolved: ResolvedModel, config: EmbeddedEngine, report: Callable[[Status], None]) -> LoadedModel:
    """Load the weights.

    Raises:
        ValueError: the architecture cannot be served, or the weights are in a format that is not read.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    report(Status("loading", detail=f"{config.model} on {device}", fraction=0.0))
    model = _from_pretrained(resolved, dtype).to(device).eval().requires_grad_(False)
    model_config = model.config.get_text_config(decoder=True)
    loaded = LoadedModel(
        model=model,
        vocab_size=int(model_config.vocab_size),
        max_position_embeddings=getattr(model_config, "max_position_embeddings", None),
        eos_token_ids=_eos_token_ids(resolved.model_dir, model_config),
        attention=_attention_layout(model_config, model.dtype),
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
    return AutoModelForCausalLM.from_pretrained(
        weights, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )


def _refuse_pickles(model_dir: Path) -> None:
    if not any(model_dir.glob("*.safetensors")):
        raise ValueError(
            f"{model_dir} has no *.safetensors file. Weights in pickle files (*.bin, *.pt) are not read, since "
            f"loading them can run code: convert them, e.g. with transformers' save_pretrained"
        )


def _attention_layout(config: Any, dtype: torch.dtype) -> AttentionLayout:
    window_tokens = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    layer_types = frozenset(getattr(config, "layer_types", None) or [_FULL if window_tokens is None else _SLIDING])
    if unknown := layer_types - {_FULL, _SLIDING}:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; "
            f"the embedded engine serves models of {_FULL} and {_SLIDING} layers only"
        )
    if getattr(config, "alibi", False) or config.model_type in {"bloom", "mpt"}:
        raise ValueError(f"{config.model_type} uses ALiBi position biases, which the embedded engine does not serve")
    additive = None if config._attn_implementation == "sdpa" else dtype  # it has no public name
    return AttentionLayout(layer_types, window_tokens or 0, additive)


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
