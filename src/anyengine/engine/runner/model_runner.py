"""Runs a transformers model for whole steps over sequences that join and leave.

Owns the forward passes: what goes in one pass, positions and masks. Sequences that compute equally many tokens share
a pass, so a step is one pass for all that decode and one for each distinct prompt (or chunk) length, without padding;
nobody is recomputed when another joins. Where keys and values lie is :mod:`.kv_cache`'s business, what parameters mean
is :mod:`.sampler`'s, which sequences run is the scheduler's.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

from anyengine._process.status import Status
from anyengine._wire import WireSamplingParams
from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import ModelRunner, SampledToken, ScheduledSequence, SequenceState
from anyengine.engine.models import resolve_model

try:
    import torch

    from anyengine.engine.runner.kv_cache import SlotCache
    from anyengine.engine.runner.loader import LoadedModel, load_model
    from anyengine.engine.runner.logprobs import PromptLogprobs, sampled_logprobs
    from anyengine.engine.runner.sampler import sample, unsupported_sampling
except ImportError as _missing:
    raise ImportError(
        f'The embedded engine needs torch and transformers: pip install "anyengine[torch]" ({_missing})'
    ) from _missing

__all__ = ["TransformersRunner", "create_runner"]

_DEFAULT_MAX_MODEL_LEN = 8192  # tokens; a model may allow more, but nobody should get that much cache unasked


def create_runner(config: EmbeddedEngine, report: Callable[[Status], None]) -> ModelRunner:
    """Find, fetch and load the model that ``config`` names; ``report`` gets the progress.

    Raises:
        ModelNotFoundError: no source has the model.
        ValueError: the model, or a setting for it, is not one this runner can serve.
    """
    resolved = resolve_model(config.model, report)
    report(Status("resolving", detail=resolved.source, model_dir=str(resolved.model_dir)))
    loaded = load_model(resolved, config, report)
    max_model_len = _max_model_len(config.max_model_len, loaded.max_position_embeddings)
    return TransformersRunner(loaded, max_num_seqs=config.max_num_seqs, max_model_len=max_model_len, seed=config.seed)


def _max_model_len(asked: int | None, limit: int | None) -> int:
    if asked is None:
        return min(limit or _DEFAULT_MAX_MODEL_LEN, _DEFAULT_MAX_MODEL_LEN)
    if limit is not None and asked > limit:
        raise ValueError(f"max_model_len={asked} is more than the model's {limit} positions; choose at most {limit}")
    return asked


class TransformersRunner:
    """Implements :class:`~anyengine.engine.interfaces.ModelRunner`. One thread.

    Invariant: a sequence has a cache slot and a seed from :meth:`start` to :meth:`finish`. Everything else is read
    from the sequence itself at each step.
    """

    def __init__(self, loaded: LoadedModel, *, max_num_seqs: int, max_model_len: int, seed: int) -> None:
        self._model = loaded.model
        self.vocab_size: int = loaded.vocab_size
        self.max_model_len = max_model_len
        self.dtype: str = str(self._model.dtype).removeprefix("torch.")
        self.eos_token_ids: tuple[int, ...] = loaded.eos_token_ids
        self._attention = loaded.attention
        self._device = self._model.device
        self._cache = SlotCache(max_num_seqs=max_num_seqs, max_length_tokens=max_model_len)
        # Transformers 5.2x renamed the argument and warns about the old name.
        self._cache_argument = (
            "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        )
        self._seeds: dict[str, int] = {}
        self._prompt_logprobs: dict[str, PromptLogprobs] = {}  # of those who ask, until their prompt is complete
        self._unseeded = random.Random(seed)  # noqa: S311  # sampling noise, not a secret
        self._learn_cache_shapes()

    def start(self, seq: SequenceState) -> None:
        """Reserve the cache for all that ``seq`` may become, so that no later step runs out of memory.

        Raises ValueError for sampling parameters that the sampler does not know.
        """
        if refusal := unsupported_sampling(seq.sampling, self.vocab_size):
            raise ValueError(refusal)
        max_tokens = seq.sampling.max_tokens
        num_tokens = self.max_model_len if max_tokens is None else len(seq.prompt_token_ids) + max_tokens
        self._cache.reserve(seq.request_id, min(num_tokens, self.max_model_len))
        seed = seq.sampling.seed
        self._seeds[seq.request_id] = self._unseeded.getrandbits(64) if seed is None else seed
        if seq.sampling.prompt_logprobs is not None:
            self._prompt_logprobs[seq.request_id] = PromptLogprobs(seq)

    def finish(self, request_id: str) -> None:
        """Release its slot."""
        self._cache.release(request_id)
        self._seeds.pop(request_id, None)
        self._prompt_logprobs.pop(request_id, None)

    @torch.no_grad()
    def step(self, scheduled: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """One pass for each distinct number of new tokens, then one sampling of all that completed their tokens."""
        passes: dict[int, list[int]] = {}
        for index, item in enumerate(scheduled):
            passes.setdefault(item.num_new_tokens, []).append(index)
        rows: dict[int, torch.Tensor] = {}  # index in scheduled -> [vocab], float32
        for num_new_tokens, indices in passes.items():
            # In slot order, so that the rows are one view of the cache.
            indices.sort(key=lambda index: self._cache.slot(scheduled[index].seq.request_id))
            seqs = [scheduled[index].seq for index in indices]
            logits = self._forward(seqs, num_new_tokens)  # [num_seqs, 1 or num_new_tokens, vocab], float32
            rows.update(zip(indices, logits[:, -1], strict=True))
            for seq, of_seq in zip(seqs, logits, strict=True) if self._prompt_logprobs else ():
                if (collector := self._prompt_logprobs.get(seq.request_id)) is not None:
                    collector.add(of_seq, seq.num_computed_tokens)
        complete = [index for index, item in enumerate(scheduled) if _completes(item)]
        tokens: list[SampledToken | None] = [None] * len(scheduled)
        if complete:
            seqs = [scheduled[index].seq for index in complete]
            sampled = self._sample(torch.stack([rows[index] for index in complete]), seqs)
            for index, token in zip(complete, sampled, strict=True):
                tokens[index] = token
        return tokens

    def _sample(self, logits: torch.Tensor, seqs: Sequence[SequenceState]) -> list[SampledToken]:
        """The next token of each sequence; logits: [num_seqs, vocab], float32."""
        token_ids = sample(logits, seqs, [self._seeds[seq.request_id] for seq in seqs])
        logprobs = sampled_logprobs(logits, seqs, token_ids)
        tokens: list[SampledToken] = []
        for seq, token_id, of_token in zip(seqs, token_ids, logprobs, strict=True):
            collector = self._prompt_logprobs.pop(seq.request_id, None)
            tokens.append(SampledToken(token_id, of_token, collector.result() if collector else None))
        return tokens

    def close(self) -> None:
        """Drop the cache and the model."""
        self._seeds.clear()
        self._cache.clear()
        self._model = None

    def _learn_cache_shapes(self) -> None:
        """One token through the model: its layers tell the cache their shapes, and an architecture that cannot use
        such a cache fails now instead of at the first request."""
        probe = SequenceState("probe", [0], WireSamplingParams())
        self._cache.reserve(probe.request_id, 1)
        with torch.no_grad():
            self._forward([probe], 1)
        self._cache.release(probe.request_id)

    def _forward(self, seqs: Sequence[SequenceState], num_new_tokens: int) -> torch.Tensor:
        """The logits after the last new token of each sequence, [num_seqs, 1, vocab], float32; or, if a prompt among
        them is to be scored, after all of them: [num_seqs, num_new_tokens, vocab]."""
        starts = [seq.num_computed_tokens for seq in seqs]
        input_ids = [_token_slice(seq, start, start + num_new_tokens) for seq, start in zip(seqs, starts, strict=True)]
        lengths = [start + num_new_tokens for start in starts]
        offsets = torch.arange(num_new_tokens, device=self._device)
        positions = torch.tensor(starts, device=self._device)[:, None] + offsets  # [num_seqs, num_new_tokens]
        self._cache.select([self._cache.slot(seq.request_id) for seq in seqs], lengths, positions)
        output: Any = self._model(
            input_ids=torch.tensor(input_ids, device=self._device),
            position_ids=positions,
            attention_mask=self._attention.masks(positions, max(lengths)),
            use_cache=True,
            # 0: all.
            logits_to_keep=0 if any(seq.request_id in self._prompt_logprobs for seq in seqs) else 1,
            **{self._cache_argument: self._cache},
        )
        logits: torch.Tensor = output.logits
        return logits.float()


def _completes(item: ScheduledSequence) -> bool:
    return item.seq.num_computed_tokens + item.num_new_tokens == item.seq.num_tokens


def _token_slice(seq: SequenceState, start: int, end: int) -> list[int]:
    """Tokens ``start`` to ``end`` of prompt and output, without joining the two."""
    num_prompt_tokens = len(seq.prompt_token_ids)
    if start >= num_prompt_tokens:
        return seq.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
    return seq.prompt_token_ids[start:end] + seq.output_token_ids[: max(0, end - num_prompt_tokens)]
