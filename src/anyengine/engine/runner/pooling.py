"""What pooling requests want of a prompt: an embedding.

Owns the meaning of their parameters (``vllm.model_executor.layers.pooler``, 0.32: the last token's hidden state, cut to
``dimensions``, then made a vector of length one unless ``use_activation`` is false). Pure. Must not know the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from anyengine import _wire
from anyengine._wire import WirePoolingParams
from anyengine.engine.interfaces import PooledPrompt

__all__ = ["embed"]


def embed(hidden_states: Tensor, params: Sequence[WirePoolingParams]) -> list[PooledPrompt]:
    """One embedding for each of ``hidden_states`` [num_prompts, hidden], float32."""
    found: list[PooledPrompt] = []
    for state, wanted in zip(hidden_states, params, strict=True):
        vector = state if wanted.dimensions is None else state[: wanted.dimensions]
        if wanted.use_activation is not False:
            vector = functional.normalize(vector, dim=-1)
        found.append(PooledPrompt(_wire.Tensor("float32", tuple(vector.shape), vector.cpu().numpy().tobytes())))
    return found
