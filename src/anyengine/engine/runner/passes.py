"""How a model's weights are run: the fastest pass that computes what transformers' own code does.

Owns the choice. Transformers with plain attention is the judge, on a few tokens: a prompt, and one token behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from anyengine._process.status import Status
from anyengine.config import EmbeddedEngine
from anyengine.engine.models import ResolvedModel
from anyengine.engine.runner.attention import AttentionStep, Span
from anyengine.engine.runner.forward import ClassifyingForward, ForwardPass, RoutedForward
from anyengine.engine.runner.fused import FusedForward, can_fuse
from anyengine.engine.runner.kernels import load_kernels
from anyengine.engine.runner.linear import pack_linears
from anyengine.engine.runner.loader import LoadedModel, WeightFiles, load_model
from anyengine.engine.runner.paged_cache import BLOCK_TOKENS, PagedCache
from anyengine.engine.runner.residency import Weights

if TYPE_CHECKING:
    from anyengine.engine.runner.kernels.library import Kernels

__all__ = ["load_weights"]

_PROBE_TOKENS = BLOCK_TOKENS + 4  # the last one sees a block that is full and one that is not

_logger = logging.getLogger(__name__)


def load_weights(
    resolved: ResolvedModel,
    config: EmbeddedEngine,
    report: Callable[[Status], None],
    update: WeightFiles | None = None,
) -> tuple[LoadedModel, Weights]:
    """The model, with its own weights or those of an update, and the pass that is used for it.

    Raises:
        ValueError: see :func:`~.loader.load_model`.
    """
    loaded = load_model(resolved, config, report, update)
    expected = _probe(_routed(loaded), loaded)
    kernels = None if config.enforce_eager else load_kernels(loaded.like)
    if can_fuse(loaded.model):
        fused = FusedForward(loaded.model, loaded.windows)
        if _made_to_agree(fused, expected, loaded, kernels):
            return loaded, Weights(fused, fused.parts)
        _logger.warning("%s: our forward pass does not agree with transformers'; theirs is used", config.model)
        del fused  # it has the weights
        loaded = load_model(resolved, config, report, update)
    parts = pack_linears(loaded.model)
    routed = _routed(loaded)
    if not _made_to_agree(routed, expected, loaded, kernels):
        _logger.warning("%s: products with packed weights do not agree with transformers'", config.model)
    return loaded, Weights(routed, parts)


def _made_to_agree(
    forward: ForwardPass, expected: list[torch.Tensor], loaded: LoadedModel, kernels: Kernels | None
) -> bool:
    """With ``kernels``, or without them."""
    # In bfloat16, transformers' own logits of SmolLM2 behind two tokens are a third off those in float32.
    tolerance = 1e-3 if loaded.like.dtype is torch.float32 else 0.2
    if kernels is not None:
        try:
            forward.use(kernels)
            if _agrees(_probe(forward, loaded), expected, tolerance):
                return True
            _logger.warning("kernels for this processor do not agree with torch, and are not used")
        except Exception as exc:  # noqa: BLE001 - they are compiled here; torch can do without
            _logger.warning("kernels cannot be compiled: %r", exc)
    forward.use(None)
    return _agrees(_probe(forward, loaded), expected, tolerance)


def _agrees(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> bool:
    return all(bool((a - b).norm() <= tolerance * b.norm()) for a, b in zip(found, expected, strict=True))


def _routed(loaded: LoadedModel) -> RoutedForward | ClassifyingForward:
    return RoutedForward(loaded.model) if loaded.num_labels is None else ClassifyingForward(loaded.model)


def _probe(forward: ForwardPass, loaded: LoadedModel) -> list[torch.Tensor]:
    """What comes out behind each token of a prompt, and behind one that follows: [num_tokens, vocab or num_labels]."""
    like = loaded.like
    cache = PagedCache(loaded.layers, 2, like)
    token_ids = torch.arange(1, _PROBE_TOKENS + 1, device=like.device) ** 2 % loaded.vocab_size
    found: list[torch.Tensor] = []
    for start, end in ((0, _PROBE_TOKENS - 1), (_PROBE_TOKENS - 1, _PROBE_TOKENS)):
        step = AttentionStep(cache, [Span([1, 0], start, end)], like.dtype, like.device, forward.kernels)
        every = torch.arange(end - start, device=like.device)
        logits, scores = forward(token_ids[start:end], step, every, None if loaded.num_labels is None else every)
        found.append(logits if scores is None else scores)
    cache.close()
    return found
