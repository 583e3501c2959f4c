"""What pooling requests want of a prompt: an embedding, or how likely each label is.

Owns the meaning of their parameters (``vllm.model_executor.layers.pooler``, 0.32). An embedding is the last token's
hidden state, cut to ``dimensions``, then made a vector of length one; labels get probabilities. Both stay as the model
gives them if ``use_activation`` is false. Pure. Must not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from anyengine import _wire
from anyengine._wire import WirePoolingParams
from anyengine.engine.interfaces import PooledPrompt

__all__ = ["classify", "embed"]


def embed(hidden_states: Tensor, params: Sequence[WirePoolingParams]) -> list[PooledPrompt]:
    """One embedding for each of ``hidden_states`` [num_prompts, hidden], float32."""
    found: list[PooledPrompt] = []
    for state, wanted in zip(hidden_states, params, strict=True):
        vector = state if wanted.dimensions is None else state[: wanted.dimensions]
        if wanted.use_activation is not False:
            vector = functional.normalize(vector, dim=-1)
        found.append(_pooled(vector))
    return found


def classify(scores: Tensor, params: Sequence[WirePoolingParams], problem_type: str | None) -> list[PooledPrompt]:
    """Probabilities for each of ``scores`` [num_prompts, num_labels], float32."""
    return [
        _pooled(row if wanted.use_activation is False else _probabilities(row, problem_type))
        for row, wanted in zip(scores, params, strict=True)
    ]


def _probabilities(scores: Tensor, problem_type: str | None) -> Tensor:
    if problem_type == "regression":
        return scores
    if problem_type == "multi_label_classification" or len(scores) == 1:
        return torch.sigmoid(scores)
    return scores.softmax(dim=-1)


def _pooled(vector: Tensor) -> PooledPrompt:
    return PooledPrompt(_wire.Tensor("float32", tuple(vector.shape), vector.cpu().numpy().tobytes()))
