"""Runs a model for whole steps over sequences that join and leave.

Owns how a step is made up: all new tokens of all sequences, of prompts, chunks and answers, go through the model in one
pass, without padding, so that weights are read once for a step; then one sampling of all whose tokens are complete.
What a token sees is :mod:`.attention`'s business, where keys and values lie :mod:`.paged_cache`'s, what parameters mean
:mod:`.sampler`'s, which sequences run the scheduler's.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from anyengine._process.status import Status
from anyengine._wire import WireLoRARequest
from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import (
    FailedSequence,
    ModelRunner,
    SampledToken,
    ScheduledSequence,
    SequenceState,
    StepResult,
)
from anyengine.engine.models import ResolvedModel, resolve_model

try:
    import torch

    from anyengine.engine.runner.adapters import Adapters
    from anyengine.engine.runner.attention import AttentionStep, Span
    from anyengine.engine.runner.constraints import Constraints
    from anyengine.engine.runner.decode_graphs import DecodeGraphs, recorders_for
    from anyengine.engine.runner.loader import LoadedModel, WeightFiles
    from anyengine.engine.runner.logits_processors import ServedModel, find_logits_processors, make_logits_processors
    from anyengine.engine.runner.logprobs import PromptScores, sampled_logprobs
    from anyengine.engine.runner.paged_cache import BLOCK_TOKENS, PagedCache, free_memory_bytes
    from anyengine.engine.runner.passes import load_weights
    from anyengine.engine.runner.pooling import classify, embed
    from anyengine.engine.runner.processing import LogitsProcessing
    from anyengine.engine.runner.profiling import StepProfiler
    from anyengine.engine.runner.residency import Residency, Weights
    from anyengine.engine.runner.sampler import sample, unsupported_sampling
except ImportError as _missing:
    raise ImportError(
        f'The embedded engine needs torch and transformers: pip install "anyengine[torch]" ({_missing})'
    ) from _missing

__all__ = ["TransformersRunner", "create_runner"]

_DEFAULT_MAX_MODEL_LEN = 8192  # tokens; a model may allow more, but nobody should get that much cache unasked

_logger = logging.getLogger(__name__)


def create_runner(config: EmbeddedEngine, report: Callable[[Status], None]) -> ModelRunner:
    """Find, fetch and load the model that ``config`` names; ``report`` gets the progress.

    Raises:
        ModelNotFoundError: no source has the model.
        ValueError: the model, or a setting for it, is not one this runner can serve.
    """
    factories = find_logits_processors(config.logits_processors)  # before anything that takes time
    resolved = resolve_model(config.model, report)
    report(Status("resolving", detail=resolved.source, model_dir=str(resolved.model_dir)))
    with torch.inference_mode():
        loaded, weights = load_weights(resolved, config, report)
        if factories and loaded.num_labels is not None:
            raise ValueError(
                "logits_processors: this model classifies, it has no logits of a next token: leave them out"
            )
        served = ServedModel(resolved.model_dir, loaded.vocab_size, loaded.eos_token_ids, loaded.like.device)
        processing = LogitsProcessing(make_logits_processors(factories, served))
        max_model_len, num_blocks = _sizes(loaded, config)
        new_recorder = recorders_for(loaded.like.device)
        adapters = Adapters(weights.parts, config.max_loras, loaded.like)
        residency = Residency(
            weights,
            partial(_load_again, resolved, config, type(loaded.model)),
            adapters,
            layers=loaded.layers,
            num_blocks=num_blocks,
            like=loaded.like,
            graphs=None if config.enforce_eager or new_recorder is None else DecodeGraphs(new_recorder),
        )
    return TransformersRunner(
        residency,
        loaded,
        Constraints(resolved.model_dir / "tokenizer.json", loaded.vocab_size, loaded.eos_token_ids),
        adapters,
        processing,
        StepProfiler(None if config.profile_dir is None else Path(config.profile_dir)),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        seed=config.seed,
    )


def _load_again(resolved: ResolvedModel, config: EmbeddedEngine, model_class: Any, path: Path | None) -> Weights:
    update = None if path is None else WeightFiles(path, model_class)
    return load_weights(resolved, config, lambda _status: None, update)[1]


def _sizes(loaded: LoadedModel, config: EmbeddedEngine) -> tuple[int, int]:
    """``max_model_len`` in tokens, and the number of blocks: enough for one sequence of that length."""
    asked, limit = config.max_model_len, loaded.max_position_embeddings
    if asked is not None and limit is not None and asked > limit:
        raise ValueError(f"max_model_len={asked} is more than the model's {limit} positions; choose at most {limit}")
    max_model_len = asked or min(limit or _DEFAULT_MAX_MODEL_LEN, _DEFAULT_MAX_MODEL_LEN)
    block_bytes = PagedCache.block_bytes(loaded.layers, loaded.like.dtype)
    wanted = config.max_num_seqs * -(-max_model_len // BLOCK_TOKENS)
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
    else:
        num_blocks = min(wanted, free_memory_bytes(loaded.like.device) // block_bytes)
    room_tokens = num_blocks * BLOCK_TOKENS
    if room_tokens < max_model_len:
        if asked is not None or not num_blocks:
            raise ValueError(
                f"there is room for the keys and values of {room_tokens} tokens, not for one sequence of "
                f"max_model_len={max_model_len}, which takes {-(-max_model_len // BLOCK_TOKENS) * block_bytes} bytes: "
                f"choose a smaller max_model_len or a larger kv_cache_memory_bytes"
            )
        max_model_len = room_tokens
    return max_model_len, num_blocks


class TransformersRunner:
    """Implements :class:`~anyengine.engine.interfaces.ModelRunner`. One thread.

    Invariant: a sequence has a seed from :meth:`start` to :meth:`finish`. Everything else is read from the sequence
    itself at each step.
    """

    def __init__(
        self,
        residency: Residency,
        loaded: LoadedModel,
        constraints: Constraints,
        adapters: Adapters,
        processing: LogitsProcessing,
        profiler: StepProfiler,
        *,
        max_model_len: int,
        num_blocks: int,
        seed: int,
    ) -> None:
        self._residency = residency
        self._profiler = profiler
        self._constraints = constraints
        self._adapters = adapters
        self._processing = processing
        self.max_loras: int = adapters.max_loras
        self._dtype, self._device = loaded.like.dtype, loaded.like.device
        self.vocab_size: int = loaded.vocab_size
        self.max_model_len = max_model_len
        self.dtype: str = str(self._dtype).removeprefix("torch.")
        self.eos_token_ids: tuple[int, ...] = loaded.eos_token_ids
        self.num_kv_blocks: int = num_blocks
        self.kv_block_tokens: int = BLOCK_TOKENS
        self.generates: bool = loaded.num_labels is None
        self.pooling_tasks: tuple[str, ...] = ("embed",) if self.generates else ("classify",)
        self.embedding_size: int = loaded.hidden_size
        self._problem_type = loaded.problem_type
        self._seeds: dict[str, int] = {}
        self._prompt_scores: dict[str, PromptScores] = {}  # of those who ask, until their prompt is complete
        self._unseeded = random.Random(seed)  # noqa: S311  # sampling noise, not a secret

    def start(self, seq: SequenceState) -> Future[None] | None:
        """Raises ValueError for sampling parameters that the sampler does not know, and for what a logits processor
        refuses. A constraint is waited for."""
        if refusal := unsupported_sampling(seq.sampling, self.vocab_size):
            raise ValueError(refusal)
        seed = seq.sampling.seed
        self._seeds[seq.request_id] = self._unseeded.getrandbits(64) if seed is None else seed
        if seq.lora_id is not None:
            self._adapters.use(seq.request_id, seq.lora_id)
        if seq.scores_prompt:
            self._prompt_scores[seq.request_id] = PromptScores(seq)
        if seq.pooling is None:
            self._processing.start(seq)
        return None if seq.sampling.structured_outputs is None else self._constraints.start(seq)

    def finish(self, request_id: str) -> None:
        """Forget its sampler state."""
        self._seeds.pop(request_id, None)
        self._prompt_scores.pop(request_id, None)
        self._constraints.finish(request_id)
        self._processing.finish(request_id)
        self._adapters.finish(request_id)

    @property
    def is_sleeping(self) -> bool:
        """See :class:`~anyengine.engine.interfaces.ManagedRunner`."""
        return self._residency.is_sleeping

    def sleep(self, level: int) -> None:
        """Level 1 keeps the weights on a CPU."""
        self._residency.sleep(level)

    @torch.inference_mode()
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Weights that were given back are loaded again, those of the last update if there was one."""
        self._residency.wake_up(tags)

    def release_kv_cache_memory(self) -> None:
        """Give the memory of keys and values back."""
        self._residency.release_cache()

    @torch.inference_mode()
    def reload_weights(self, path: str | None = None) -> None:
        """Raises ValueError unless they are all that the model has."""
        self._residency.reload(None if path is None else Path(path))

    def start_profile(self, prefix: str | None, delay_steps: int | None, max_steps: int | None) -> None:
        """See :class:`~anyengine.engine.interfaces.ProfiledRunner`."""
        self._profiler.start(prefix, delay_steps, max_steps)

    def stop_profile(self) -> None:
        """Write the trace."""
        self._profiler.stop()

    def add_lora(self, request: WireLoRARequest) -> bytes:
        """See :class:`~anyengine.engine.interfaces.AdapterRunner`."""
        with torch.inference_mode():
            return self._adapters.add(request)

    def remove_lora(self, lora_id: int) -> bool:
        """Requests that use it go on with it."""
        return self._adapters.remove(lora_id)

    def list_loras(self) -> list[int]:
        """In order."""
        return self._adapters.ids()

    def pin_lora(self, lora_id: int) -> bool:
        """Raises ValueError if it is not loaded."""
        return self._adapters.pin(lora_id)

    @torch.inference_mode()
    def step(self, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """One pass, one sampling."""
        # Rows of one token first, the longest sequence first of all, as attention groups them.
        order = sorted(
            range(len(scheduled)),
            key=lambda i: (scheduled[i].num_new_tokens > 1, -scheduled[i].seq.num_computed_tokens),
        )
        items = [scheduled[index] for index in order]
        complete = [place for place, item in enumerate(items) if _completes(item)]
        sampling = [place for place in complete if items[place].seq.pooling is None]
        pooling = [place for place in complete if items[place].seq.pooling is not None]
        logits, hidden_states = self._run_model(items, sampling, pooling)
        results: list[StepResult] = [None] * len(scheduled)
        if sampling:
            tokens = self._sample(logits, [items[place].seq for place in sampling])
            for place, token in zip(sampling, tokens, strict=True):
                results[order[place]] = token
        if hidden_states is not None:
            wanted = [params for place in pooling if (params := items[place].seq.pooling) is not None]
            pooled = (
                embed(hidden_states, wanted) if self.generates else classify(hidden_states, wanted, self._problem_type)
            )
            for place, vector in zip(pooling, pooled, strict=True):
                results[order[place]] = vector
        self._profiler.end_step()
        return results

    def _run_model(
        self, items: Sequence[ScheduledSequence], sampling: Sequence[int], pooling: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The logits [num_sampling, vocab], float32, and the last hidden states [num_pooling, hidden] behind the last
        tokens of these ``items``. The log-probabilities of prompts are taken on the way."""
        spans = [_span(item) for item in items]
        token_ids: list[int] = []
        ends: list[int] = []
        for span, item in zip(spans, items, strict=True):
            token_ids += item.seq.token_slice(span.start, span.end)
            ends.append(len(token_ids))
        scored = [place for place, item in enumerate(items) if item.seq.request_id in self._prompt_scores]
        rows = [ends[place] - 1 for place in sampling]
        for place in scored:
            rows += range(ends[place] - items[place].num_new_tokens, ends[place])
        self._adapters.place(items, ends)
        forward, graphs = self._residency.forward, self._residency.graphs
        # Each item has one token then, and its logits are wanted.
        if graphs is not None and len(sampling) == len(token_ids) and not scored and self._adapters.is_idle:
            recorded = graphs.logits(forward, self._residency.cache, token_ids, spans)
            if recorded is not None:
                return recorded, None
        logits, hidden_states = forward(
            self._indices(token_ids),
            AttentionStep(self._residency.cache, spans, self._dtype, self._device, forward.kernels),
            self._indices(rows),
            self._indices([ends[place] - 1 for place in pooling]) if pooling else None,
        )
        first = len(sampling)
        for place in scored:
            seq, count = items[place].seq, items[place].num_new_tokens
            self._prompt_scores[seq.request_id].add(logits[first : first + count], seq.num_computed_tokens)
            first += count
        return logits[: len(sampling)], hidden_states

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _sample(self, logits: torch.Tensor, seqs: Sequence[SequenceState]) -> list[SampledToken | FailedSequence]:
        """The next token of each sequence; logits: [num_seqs, vocab], float32."""
        logits = self._constraints.masked(logits, seqs)
        processing = self._processing.of_step(seqs)
        token_ids = sample(logits, seqs, [self._seeds[seq.request_id] for seq in seqs], processing)
        failures = processing.failures if processing else {}
        logprobs = sampled_logprobs(logits, seqs, token_ids)
        tokens: list[SampledToken | FailedSequence] = []
        for row, (seq, token_id, of_token) in enumerate(zip(seqs, token_ids, logprobs, strict=True)):
            collector = self._prompt_scores.pop(seq.request_id, None)
            if row in failures:
                tokens.append(failures[row])
                continue
            if reason := self._constraints.accept(seq, token_id):
                tokens.append(FailedSequence(reason))
                continue
            tokens.append(SampledToken(token_id, of_token, *(collector.results() if collector else ())))
        return tokens

    def close(self) -> None:
        """Drop the cache and the model."""
        self._seeds.clear()
        self._constraints.close()
        self._profiler.stop()
        self._residency.close()


def _span(item: ScheduledSequence) -> Span:
    start = item.seq.num_computed_tokens
    return Span(item.seq.block_ids, start, start + item.num_new_tokens)


def _completes(item: ScheduledSequence) -> bool:
    return item.seq.num_computed_tokens + item.num_new_tokens == item.seq.num_tokens
