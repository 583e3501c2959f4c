"""Steps in which every sequence computes one token, recorded once and replayed: CUDA graphs for decode.

Owns what makes such steps alike: inputs in one tensor that stays where it is, batches and block tables padded to a few
sizes, attention that reads its block table from there, and the check that a recording computes what it was recorded
from. Launching a small model's hundreds of operations one by one costs more than they do; a recording costs one launch.
How operations are recorded is the device's business, and the only part that knows CUDA.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyengine.engine.runner.attention import Span, attend_single
from anyengine.engine.runner.forward import ForwardPass
from anyengine.engine.runner.paged_cache import BLOCK_TOKENS, PagedCache

__all__ = ["DecodeGraphs", "Recorder", "Recording", "recorders_for"]

_FEWEST_BLOCKS = 8
_MOST_PADDING = 4
"""A batch whose padded tables have more than so many times the tokens that are there is not worth a recording."""

_logger = logging.getLogger(__name__)


class Recording(NamedTuple):
    """What was recorded: ``replay`` computes it again, into the same ``logits`` [batch_size, vocab]."""

    replay: Callable[[], None]
    logits: Tensor


Recorder = Callable[[Callable[[], Tensor]], Recording]
"""Records what a function does. It has been called once before, and gives its result in a new tensor."""


def recorders_for(device: torch.device) -> Callable[[], Recorder] | None:
    """What makes recorders, of which each has memory of its own; ``None``: the device has no such thing."""
    return _CudaRecorder if device.type == "cuda" else None


class _CudaRecorder:
    """All recordings of one recorder share a pool of memory: one is replayed at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        # Operations prepare themselves when they first run on a stream: not while they are recorded.
        present, stream = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(present)
        try:
            with torch.cuda.stream(stream):
                compute()
            present.wait_stream(stream)
            # Other threads of this process are none of its business.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                logits = compute()
        finally:
            torch.cuda.set_stream(present)  # a recording that fails may not come back from its own
        return Recording(graph.replay, logits)


class _Graph(NamedTuple):
    inputs: Tensor  # [batch_size, 2 + num_blocks], int64: token id, position, blocks
    recording: Recording


class DecodeGraphs:
    """Recordings by size, made when a size comes up. One thread.

    The last block of the cache belongs to the rows that pad a batch: no sequence may have it.
    """

    def __init__(self, new_recorder: Callable[[], Recorder]) -> None:
        self._new_recorder = new_recorder
        self._recorder: Recorder | None = None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._works = True

    def clear(self) -> None:
        """Forget all recordings: the weights or the cache are about to go."""
        self._graphs.clear()
        self._recorder = None

    def logits(
        self, forward: ForwardPass, cache: PagedCache, token_ids: Sequence[int], spans: Sequence[Span]
    ) -> Tensor | None:
        """Behind one token of each sequence: [num_seqs, vocab], float32, good until the next call. ``None``: compute
        them in another way."""
        num_blocks = _padded(max(-(-span.end // BLOCK_TOKENS) for span in spans), _FEWEST_BLOCKS)
        batch_size = _padded(len(spans))
        num_tokens = sum(max(span.end, _FEWEST_BLOCKS * BLOCK_TOKENS) for span in spans)
        if not self._works or batch_size * num_blocks * BLOCK_TOKENS > _MOST_PADDING * num_tokens:
            return None
        inputs = np.full((batch_size, 2 + num_blocks), cache.num_blocks - 1, dtype=np.int64)
        inputs[:, :2] = 0
        inputs[: len(spans), 0] = token_ids
        for row, span in zip(inputs, spans, strict=False):
            row[1] = span.start
            used = -(-span.end // BLOCK_TOKENS)
            row[2 : 2 + used] = span.block_ids[:used]
        graph = self._graphs.get((batch_size, num_blocks))
        if graph is None:
            graph = self._record(forward, cache, torch.from_numpy(inputs))
            if graph is None:
                return None
            self._graphs[batch_size, num_blocks] = graph
        else:
            graph.inputs.copy_(torch.from_numpy(inputs))
            graph.recording.replay()
        return graph.recording.logits[: len(spans)]

    def _record(self, forward: ForwardPass, cache: PagedCache, inputs: Tensor) -> _Graph | None:
        """With ``inputs`` computed; ``None``, for good, if it cannot be recorded, or computes something else."""
        inputs = inputs.to(cache.memory(0).device, copy=True)
        rows = torch.arange(len(inputs), device=inputs.device)

        def compute() -> Tensor:
            return forward(inputs[:, 0], _PaddedStep(cache, inputs), rows)[0]

        try:
            expected = compute()  # storing keys and values twice is storing them once
            self._recorder = self._recorder or self._new_recorder()
            recording = self._recorder(compute)
            recording.replay()
            error = float((recording.logits - expected).norm() / expected.norm())
        except RuntimeError as exc:  # this model waits for the device between two operations, or memory is short
            self._give_up(f"cannot be recorded: {exc}")
            return None
        if not error < (1e-3 if cache.memory(0).dtype is torch.float32 else 1e-2):
            self._give_up(f"are not what was recorded, but {error:.1%} off")
            return None
        return _Graph(inputs, recording)

    def _give_up(self, why: str) -> None:
        _logger.warning("steps of one token for each sequence %s; they are computed without recordings", why)
        self._works = False
        self.clear()


class _PaddedStep:
    """Implements :class:`~.forward.Attention` for one new token of each sequence: nothing depends on what the inputs
    hold but numbers on the device."""

    def __init__(self, cache: PagedCache, inputs: Tensor) -> None:
        self._cache = cache
        self.positions: Tensor = inputs[:, 1]
        self._block_ids = inputs[:, 2:]
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # to write and to read, by number of heads

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
        num_kv_heads = keys_values.shape[2]
        write_rows, read_rows = self._rows_for(num_kv_heads)
        self._cache.write(layer, write_rows, keys_values)
        keys, values = self._cache.read(layer, read_rows, len(self._block_ids), reuse=False)
        return attend_single(queries * scale, keys, values, self._mask(window_tokens, queries.dtype), softcap)

    def _rows_for(self, num_kv_heads: int) -> tuple[Tensor, Tensor]:
        if num_kv_heads not in self._rows:
            at = (self.positions // BLOCK_TOKENS)[:, None]
            new_blocks, offsets = self._block_ids.gather(1, at)[:, 0], self.positions % BLOCK_TOKENS
            self._rows[num_kv_heads] = (
                self._cache.write_rows(new_blocks, offsets, num_kv_heads),
                self._cache.read_rows(self._block_ids, num_kv_heads),
            )
        return self._rows[num_kv_heads]

    def _mask(self, window_tokens: int | None, dtype: torch.dtype) -> Tensor:
        """[num_seqs, 1, 1, num_tokens], added to the scores."""
        if (window_tokens, dtype) not in self._masks:
            device = self._block_ids.device
            keys = torch.arange(self._block_ids.shape[1] * BLOCK_TOKENS, device=device)
            positions = self.positions[:, None]
            hidden = keys > positions
            if window_tokens is not None:
                hidden |= keys <= positions - window_tokens
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
            self._masks[window_tokens, dtype] = mask[:, None, None]
        return self._masks[window_tokens, dtype]


def _padded(count: int, fewest: int = 1) -> int:
    """The next power of two."""
    return max(fewest, 1 << (count - 1).bit_length())
