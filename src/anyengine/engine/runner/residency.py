"""What of a model takes memory, and is there or given back: its weights, as a forward pass, and the cache of keys and
values.

Owns how the two go and come back, and how other weights take the place of the present ones. What runs meanwhile is the
engine core's to prevent. Mirrors the levels and tags of vLLM's sleep mode (``v1/worker``, 0.32).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyengine.engine.runner.adapters import Adapters
from anyengine.engine.runner.decode_graphs import DecodeGraphs
from anyengine.engine.runner.forward import ForwardPass
from anyengine.engine.runner.linear import LinearPart
from anyengine.engine.runner.paged_cache import LayerShape, PagedCache

__all__ = ["Residency", "Weights"]

_TAGS = ("weights", "kv_cache")


class Weights(NamedTuple):
    """A model's weights, ready to run."""

    forward: ForwardPass
    parts: Mapping[str, LinearPart]
    """Where its linear layers are computed, by name."""


class Residency:
    """Invariant: whoever steps finds both. Used between steps, by one thread."""

    def __init__(
        self,
        weights: Weights,
        load: Callable[[Path | None], Weights],
        adapters: Adapters,
        *,
        layers: Sequence[LayerShape],
        num_blocks: int,
        like: Tensor,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.graphs: DecodeGraphs | None = graphs
        """Recordings of steps with the present weights and cache. These leave the last block to it."""
        self._forward: ForwardPass | None = weights.forward
        self._load = load
        self._path: Path | None = None
        """Where the present weights are; ``None``: where the model was first loaded from."""
        self._adapters = adapters
        self._new_cache = partial(PagedCache, layers, num_blocks + (graphs is not None), like)
        self._cache: PagedCache | None = self._new_cache()
        self._device = like.device

    @property
    def forward(self) -> ForwardPass:
        assert self._forward is not None, "the weights are asleep, or the runner is closed"
        return self._forward

    @property
    def cache(self) -> PagedCache:
        assert self._cache is not None, "the cache is asleep, or the runner is closed"
        return self._cache

    @property
    def is_sleeping(self) -> bool:
        return self._forward is None or self._cache is None

    def sleep(self, level: int) -> None:
        """Give memory back. Level 1: the cache, and an accelerator's weights, which the files on disk (or what the
        system keeps of them in memory) hold as well; level 2: both, wherever they are."""
        self.release_cache()
        if level >= 2 or self._device.type != "cpu":
            self._forward = None
            self._adapters.bind({})
            self._collect()

    def release_cache(self) -> None:
        """Give the memory of keys and values back."""
        self._forget_recordings()
        if self._cache is not None:
            self._cache.close()
            self._cache = None
            self._collect()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take back what is named, or all.

        Raises:
            ValueError: there is no such thing.
            Exception: what loading the weights raised; they are as absent as before.
        """
        wanted = _TAGS if tags is None else tags
        if unknown := {*wanted} - {*_TAGS}:
            raise ValueError(f"tags={sorted(unknown)!r} is none of {', '.join(_TAGS)}")
        if "weights" in wanted and self._forward is None:
            self._take(self._load(self._path))
        if "kv_cache" in wanted and self._cache is None:
            self._cache = self._new_cache()

    def reload(self, path: Path | None) -> None:
        """Weights from other files of the same model, a directory of safetensors or one of them; ``None``: those of
        the beginning. Both are in memory for a moment, so that a failure leaves the present ones.

        Raises:
            Exception: they cannot be loaded, or are not all that the model has.
        """
        self._take(self._load(path))
        self._path = path

    def close(self) -> None:
        """Free everything."""
        self.release_cache()
        self._forward = None

    def _take(self, weights: Weights) -> None:
        self._forget_recordings()
        self._forward = weights.forward
        self._adapters.bind(weights.parts)

    def _forget_recordings(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def _collect(self) -> None:
        gc.collect()  # modules refer to each other
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
