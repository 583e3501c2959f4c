"""A leaner forward pass for the Llama family: the same arithmetic as transformers', in half as many calls.

Owns the pass for models whose layers are those of Llama (Llama, SmolLM2, Mistral, Qwen2, Qwen3): one product for
query, key and value, one for gate and up, residual sums inside products. At batches of a few tokens the calls between
products cost as much as the products. Weights come from a transformers model, which is also the judge: where the two
passes do not agree on a few tokens, the runner keeps to transformers'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from anyengine.engine.runner.forward import Attention
from anyengine.engine.runner.linear import Linear, LinearPart

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.elementwise import Gate, Norm, Rotation
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["FusedForward", "can_fuse"]

_FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def can_fuse(model: Any) -> bool:
    """Whether ``model`` is one that :class:`FusedForward` knows."""
    config = model.config
    return type(model).__name__ in _FAMILY and getattr(config, "hidden_act", None) == "silu"


class _Layer:
    """One decoder layer. It takes the weights out of transformers' layer."""

    def __init__(self, index: int, layer: Any, window_tokens: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.window_tokens = window_tokens
        self.scale: float = attention.scaling
        self.head_dim: int = attention.head_dim
        self.num_heads = attention.q_proj.out_features // self.head_dim
        self.num_kv_heads = attention.k_proj.out_features // self.head_dim
        self.parts: dict[str, LinearPart] = {}
        self.qkv = self._joined("self_attn", attention, "q_proj", "k_proj", "v_proj")
        self.o = self._joined("self_attn", attention, "o_proj")
        self.gate_up = self._joined("mlp", mlp, "gate_proj", "up_proj")
        self.down = self._joined("mlp", mlp, "down_proj")
        self.norm_1, self.norm_2 = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        has_norms = hasattr(attention, "q_norm")
        self.q_norm = _Norm(attention.q_norm) if has_norms else None
        self.k_norm = _Norm(attention.k_norm) if has_norms else None
        self._rotation: Rotation | None = None
        self._gate: Gate | None = None

    def use(self, kernels: Kernels | None) -> None:
        for user in (self.norm_1, self.norm_2, self.qkv, self.o, self.gate_up, self.down):
            user.use(kernels)
        if kernels is None:
            self._rotation = self._gate = None
        else:
            self._rotation = kernels.rotation(self.num_heads + self.num_kv_heads, self.head_dim)
            self._gate = kernels.gate(self.down.in_features)

    def _joined(self, path: str, module: Any, *names: str) -> Linear:
        """One product in place of several. The originals lose their weights."""
        linears = [getattr(module, name) for name in names]
        weights = [linear.weight.detach() for linear in linears]
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        for linear in linears:
            linear.weight = None  # it is not called again
        joined = Linear(torch.cat(weights), torch.cat(biases) if biases else None)
        first = 0
        for name, weight in zip(names, weights, strict=True):
            self.parts[f"model.layers.{self.index}.{path}.{name}"] = LinearPart(joined, first, len(weight))
            first += len(weight)
        return joined

    def __call__(self, x: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor, step: Attention) -> Tensor:
        """``x`` [num_tokens, hidden] becomes the sum of ``x``, ``more`` and what attention finds. What the rest of the
        layer adds is the result: the next norm does it."""
        num_tokens = len(x)
        qkv = self.qkv(self.norm_1(x, more)).view(num_tokens, -1, self.head_dim)
        rotated = qkv[:, : self.num_heads + self.num_kv_heads]  # [num_tokens, num_heads + num_kv_heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            rotated[:, : self.num_heads] = self.q_norm(rotated[:, : self.num_heads])
            rotated[:, self.num_heads :] = self.k_norm(rotated[:, self.num_heads :])
        if self._rotation is not None and cos.shape[-1] == self.head_dim:
            self._rotation(rotated, cos, sin)
        else:
            turned = rotated.roll(self.head_dim // 2, -1).mul_(sin)
            rotated.mul_(cos).add_(turned)
        found = step.attend(
            self.index,
            qkv[:, : self.num_heads],
            qkv[:, self.num_heads :].view(num_tokens, 2, self.num_kv_heads, self.head_dim),
            scale=self.scale,
            window_tokens=self.window_tokens,
        )
        gate_up = self.gate_up(self.norm_2(x, self.o(found.reshape(num_tokens, -1))))
        if self._gate is not None:
            gated = self._gate(gate_up)
        else:
            gate, up = gate_up.chunk(2, -1)
            gated = functional.silu(gate).mul_(up)
        result: Tensor = self.down(gated)
        return result


class _Norm:
    """RMS normalisation, in float32 whatever the weights are, as in transformers."""

    def __init__(self, norm: Any) -> None:
        self._weight: Tensor = norm.weight.detach()
        self._epsilon: float = norm.variance_epsilon
        self._kernel: Norm | None = None

    def use(self, kernels: Kernels | None) -> None:
        self._kernel = None
        if kernels is not None and self._weight.dtype is kernels.dtype:
            self._kernel = kernels.norm(len(self._weight), self._epsilon)

    def __call__(self, x: Tensor, more: Tensor | None = None) -> Tensor:
        """Of ``x + more``, which ``x`` becomes."""
        if self._kernel is not None and x.dim() == 2:
            return self._kernel(x, more, self._weight)
        if more is not None:
            x.add_(more)
        wide = x.float()
        factor = (wide * wide).mean(-1, keepdim=True).add_(self._epsilon).rsqrt_()
        if x.dtype is torch.float32:
            return (wide * factor).mul_(self._weight)
        return (wide * factor).to(x.dtype).mul_(self._weight)


class FusedForward:
    """Implements :class:`~.forward.ForwardPass`. Takes ``model`` apart, so that no weight is in memory twice: it is of
    no use afterwards."""

    def __init__(self, model: Any, windows: list[int | None]) -> None:
        core = model.model
        self.kernels: Kernels | None = None
        self._embedding: Tensor = core.embed_tokens.weight.detach()
        self._layers = [
            _Layer(index, layer, window_tokens)
            for index, (layer, window_tokens) in enumerate(zip(core.layers, windows, strict=True))
        ]
        self.parts: dict[str, LinearPart] = {name: part for layer in self._layers for name, part in layer.parts.items()}
        """What each linear layer of the model computes, by its name there."""
        self._norm = _Norm(core.norm)
        self._rotary = core.rotary_emb
        self._head = Linear(model.lm_head.weight, model.lm_head.bias)

    def use(self, kernels: Kernels | None) -> None:
        """Compute what lies between the products with ``kernels``, as far as they can; ``None``: with torch."""
        self.kernels = kernels
        self._norm.use(kernels)
        self._head.use(kernels)
        for layer in self._layers:
            layer.use(kernels)

    def __call__(
        self, input_ids: Tensor, step: Attention, rows: Tensor, pooled_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        x = functional.embedding(input_ids, self._embedding)  # [num_tokens, hidden]
        cos, sin = self._rotary(x, step.positions[None])
        cos, sin = cos[0, :, None].contiguous(), sin[0, :, None].clone()  # [num_tokens, 1, head_dim]
        # cat(-x2, x1) * sin is roll(x) * (-sin, sin): the sign is in ``sin`` already.
        sin[..., : sin.shape[-1] // 2].neg_()
        more: Tensor | None = None
        for layer in self._layers:
            more = layer(x, more, cos, sin, step)
        x = x if more is None else x.add_(more)
        logits: Tensor = self._head(self._norm(x[rows])).float()
        return logits, None if pooled_rows is None else self._norm(x[pooled_rows]).float()
