"""One forward pass over the tokens of many sequences, through a transformers model.

Owns how transformers' attention is led to the paged cache (its attention interface), and what a model must be like for
that. Any decoder-only model that computes attention through the interface will do; those that a leaner pass of our own
knows are :mod:`.fused`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from anyengine.engine.runner.linear import Linear
from anyengine.engine.runner.paged_cache import LayerShape

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["Attention", "ClassifyingForward", "ForwardPass", "RoutedForward", "attention_windows", "learn_layers"]

_NAME = "anyengine_paged"
_FULL, _SLIDING = "full_attention", "sliding_attention"  # as transformers names them


class Attention(Protocol):
    """What the tokens of a step see."""

    positions: Tensor
    """[num_tokens]"""

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys_values: Tensor,
        *,
        scale: float,
        window_tokens: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store the new keys and values [num_tokens, 2, num_kv_heads, head_dim]; what ``queries`` [num_tokens,
        num_heads, head_dim] find: [num_tokens, num_heads, head_dim]."""


class ForwardPass(Protocol):
    """A model, as the runner uses it."""

    kernels: Kernels | None
    """What attention may use in its steps."""

    def use(self, kernels: Kernels | None) -> None:
        """Compute with ``kernels`` as far as they can; ``None``: with torch alone."""

    def __call__(
        self, input_ids: Tensor, step: Attention, rows: Tensor, pooled_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The logits [num_rows, vocab], float32, behind those of ``input_ids`` [num_tokens] that ``rows`` names; and
        the last hidden states [num_pooled, hidden], float32, at ``pooled_rows`` (of a model that classifies: the scores
        [num_pooled, num_labels] that its head makes of them)."""


class _Router:
    """Set on each attention module under :attr:`attribute`; transformers' attention function finds it there."""

    attribute = "anyengine_router"

    def __init__(self, layer: int, window_tokens: int | None) -> None:
        self.layer = layer
        self.window_tokens = window_tokens
        self.step: Attention | None = None
        self.seen: LayerShape | None = None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: [1, num_heads, num_tokens, head_dim] in, [1, num_tokens, num_heads, head_dim]
    out."""
    router: _Router = getattr(module, _Router.attribute)
    if attention_mask is not None or s_aux is not None or key.shape != value.shape:
        raise ValueError("attention with biases, sinks, or values unlike keys is not served by the embedded engine")
    if router.step is None:
        router.seen = LayerShape(key.shape[1], key.shape[3])
        return query.transpose(1, 2), None
    found = router.step.attend(
        router.layer,
        query[0].transpose(0, 1),
        torch.stack((key[0], value[0])).permute(2, 0, 1, 3),
        scale=1 / math.sqrt(query.shape[-1]) if scaling is None else scaling,
        window_tokens=router.window_tokens,
        softcap=softcap,
    )
    return found[None], None


AttentionInterface.register(_NAME, _attend)


def attention_windows(config: Any) -> list[int | None]:
    """How far back each layer sees, in tokens; ``None``: to the beginning.

    Raises:
        ValueError: it has layers of another kind.
    """
    window_tokens = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    default = _FULL if window_tokens is None else _SLIDING
    layer_types = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    if unknown := {*layer_types} - {_FULL, _SLIDING}:
        raise ValueError(
            f"{config.model_type} has layers of type {', '.join(sorted(unknown))}; "
            f"the embedded engine serves models of {_FULL} and {_SLIDING} layers only"
        )
    if getattr(config, "alibi", False) or config.model_type in {"bloom", "mpt"}:
        raise ValueError(f"{config.model_type} uses ALiBi position biases, which the embedded engine does not serve")
    return [window_tokens if kind == _SLIDING else None for kind in layer_types]


def learn_layers(model: Any, windows: Sequence[int | None]) -> list[LayerShape]:
    """Lead the attention of ``model`` to the cache, and see with one token what each layer stores.

    Raises:
        ValueError: its attention cannot be led there.
    """
    config: Any = model.config
    model.set_attn_implementation(_NAME)
    routers: dict[int, _Router] = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(windows):
            router = routers.setdefault(layer, _Router(layer, windows[layer]))
            setattr(module, _Router.attribute, router)
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False)
    shapes = [routers[layer].seen for layer in range(len(windows)) if layer in routers]
    if len(shapes) != len(windows) or None in shapes:
        raise ValueError(
            f"{config.model_type} does not compute attention through transformers' attention interface in each of its "
            f"{len(windows)} layers, which the embedded engine needs"
        )
    return [shape for shape in shapes if shape is not None]


class _OfTransformers:
    """A pass of transformers' own code."""

    def __init__(self, model: Any) -> None:
        self.kernels: Kernels | None = None
        self._linears = [module for module in model.modules() if isinstance(module, Linear)]

    def use(self, kernels: Kernels | None) -> None:
        self.kernels = kernels
        for linear in self._linears:
            linear.use(kernels)


class RoutedForward(_OfTransformers):
    """Implements :class:`ForwardPass` with transformers' own code. ``model`` has been through :func:`learn_layers`."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._model = model
        self._routers = _routers_of(model)

    def __call__(
        self, input_ids: Tensor, step: Attention, rows: Tensor, pooled_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        for router in self._routers:
            router.step = step
        output = self._model(
            input_ids=input_ids[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=rows,
            output_hidden_states=pooled_rows is not None,
        )
        logits: Tensor = output.logits[0].float()
        # The last of these is what the head sees: behind the last norm.
        return logits, None if pooled_rows is None else output.hidden_states[-1][0, pooled_rows].float()


class ClassifyingForward(_OfTransformers):
    """Implements :class:`ForwardPass` for a transformers model with a head that classifies: there are no logits."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._core = model.base_model
        self._head = model.score
        self._routers = _routers_of(model)

    def __call__(
        self, input_ids: Tensor, step: Attention, rows: Tensor, pooled_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        for router in self._routers:
            router.step = step
        output = self._core(input_ids=input_ids[None], position_ids=step.positions[None], use_cache=False)
        hidden_states = output.last_hidden_state[0]  # [num_tokens, hidden]
        scores = None if pooled_rows is None else self._head(hidden_states[pooled_rows]).float()
        return hidden_states.new_empty((len(rows), 0), dtype=torch.float32), scores


def _routers_of(model: Any) -> list[_Router]:
    routers = (getattr(module, _Router.attribute, None) for module in model.modules())
    return list({id(router): router for router in routers if router is not None}.values())
