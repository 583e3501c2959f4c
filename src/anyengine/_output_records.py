"""What is known of a completion beside its tokens: figures, facts of its request, and what only some engines send.

Owns the records. They are frozen, and the items of a stream share them: what changes is replaced, not altered.
Mirrors vLLM 0.32.0 ``outputs.py`` and ``v1/metrics/stats.py`` (RequestStateStats, PrefillStats,
RequestSpecDecodeMetrics).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from anyengine._logprobs import TensorLike
from anyengine.params import LoRARequest

__all__ = [
    "OutputDetails",
    "PrefillUsage",
    "RequestFacts",
    "RequestMetrics",
    "SamplingMask",
    "SpecDecodeMetrics",
    "WeightVersionSpan",
]


class PrefillUsage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the tokens of a prompt came from: computed, or taken from a cache (of the engine's own, or elsewhere);
    ``num_cache_creation_tokens`` of them were written to the cache for others."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the items of one completion have in common: what was asked, and what has happened so far. Times are those of
    this host's monotonic clock; ``arrival_time`` is wall clock.

    ``queued_ts`` is when it was sent; ``scheduled_ts`` adds to that how long it was in the engine's queue, by the
    engine's own clock.
    """

    prompt: str | None = None
    """The text of the prompt, if it was text, or ``prompt_text`` told."""
    prompt_token_ids: tuple[int, ...] | None = None
    lora_request: LoRARequest | None = None
    num_prompt_tokens: int = 0
    arrival_time: float = 0.0
    rank: int = 0
    queued_ts: float = 0.0
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    ended_ts: float | None = None
    num_preemptions: int = 0
    is_corrupted: bool = False
    is_watermarked: bool = False
    is_watermark_skipped: bool = False
    prefill: PrefillUsage | None = None


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """When things happened to one completion, and how it fared. All times are of one monotonic clock, this host's, but
    for ``arrival_time``, which is wall clock.

    Attributes:
        rank: which engine ran it.
        queued_s: from its arrival in the engine to its first step; ``None`` if the engine does not say.
        first_token_s: from its sending to the arrival of its first token; ``None`` without one.
        mean_token_gap_s: between two tokens, on average; ``None`` for fewer than two.
        total_s: from its sending to its end, or to its latest token so far.
        num_preemptions: how often the engine took its memory away, to compute it again later.
        num_generation_tokens: how many tokens it has.
        queued_ts, scheduled_ts, first_token_ts, last_token_ts: when it was sent, first stepped, and had its tokens.
        is_corrupted: the engine met NaN in its logits, and was told to look.
        is_watermarked, is_watermark_skipped: whether its tokens carry the engine's watermark, or were to and do not.
    """

    rank: int = 0
    queued_s: float | None = None
    first_token_s: float | None = None
    mean_token_gap_s: float | None = None
    total_s: float = 0.0
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    is_corrupted: bool = False
    is_watermarked: bool = False
    is_watermark_skipped: bool = False

    @classmethod
    def of(cls, facts: RequestFacts, last_token_s: float, num_tokens: int) -> RequestMetrics:
        """The figures of a completion with so many tokens, the latest of which came at ``last_token_s``."""
        sent_s, first_s, scheduled_s = facts.queued_ts, facts.first_token_ts, facts.scheduled_ts
        gaps = num_tokens - 1
        return cls(
            rank=facts.rank,
            queued_s=None if scheduled_s is None else scheduled_s - sent_s,
            first_token_s=None if first_s is None else first_s - sent_s,
            mean_token_gap_s=None if first_s is None or gaps < 1 else (last_token_s - first_s) / gaps,
            total_s=(last_token_s if facts.ended_ts is None else facts.ended_ts) - sent_s,
            num_preemptions=facts.num_preemptions,
            num_generation_tokens=num_tokens,
            arrival_time=facts.arrival_time,
            queued_ts=sent_s,
            scheduled_ts=scheduled_s,
            first_token_ts=first_s,
            last_token_ts=None if first_s is None else last_token_s,
            is_corrupted=facts.is_corrupted,
            is_watermarked=facts.is_watermarked,
            is_watermark_skipped=facts.is_watermark_skipped,
        )

    @property
    def first_token_latency(self) -> float:
        """vLLM's name for ``first_token_s``; 0 without a token."""
        return self.first_token_s or 0.0

    @property
    def prefill_s(self) -> float | None:
        """From its first step to its first token; ``None`` if one of them is not known."""
        if self.first_token_s is None or self.queued_s is None:
            return None
        return self.first_token_s - self.queued_s

    @property
    def decode_s(self) -> float | None:
        """From its first token to its latest."""
        if self.first_token_ts is None or self.last_token_ts is None:
            return None
        return self.last_token_ts - self.first_token_ts

    @property
    def inference_s(self) -> float | None:
        """From its first step to its latest token."""
        if self.prefill_s is None or self.decode_s is None:
            return None
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_second(self) -> float | None:
        """Of its tokens behind the first; ``None`` for fewer than two."""
        return 1 / self.mean_token_gap_s if self.mean_token_gap_s else None


class WeightVersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Output tokens from ``start`` up to but not including ``end`` were sampled by the weights labelled ``version``."""

    version: str
    start: int
    end: int


class SamplingMask(msgspec.Struct, frozen=True):
    """For each token of an item, the ids that it was sampled from."""

    token_ids: tuple[tuple[int, ...], ...]


class SpecDecodeMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """How speculative decoding fared: ``histogram[j]`` counts the steps in which ``j`` draft tokens were accepted."""

    num_spec_tokens: int = 0
    histogram: Sequence[int] = ()
    num_draft_tokens: int = 0
    per_step_accepted: Sequence[int] = ()
    per_step_drafted: Sequence[int] = ()

    def to_dict(self) -> dict[str, Any]:
        """What vLLM's responses have as ``metrics.speculative_decoding``: a step yields its accepted drafts and one
        more token."""
        steps = sum(self.histogram)
        accepted = sum(count * number for number, count in enumerate(self.histogram))
        figures: dict[str, Any] = {
            "mean_acceptance_length": 1.0 + (accepted / steps if steps else 0.0),
            "draft_acceptance_rate": accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0,
            "acceptance_histogram": list(self.histogram),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.per_step_accepted:
            figures["per_step_accepted"] = list(self.per_step_accepted)
            figures["per_step_drafted"] = list(self.per_step_drafted)
        return figures


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What only some engines send, each ``None`` where nothing came. ``extra`` is what an engine newer than this client
    said in its last output of the request, by position."""

    kv_transfer_params: Mapping[str, Any] | None = None
    ec_transfer_params: Mapping[str, Any] | None = None
    routed_experts: TensorLike | None = None
    sampling_mask: SamplingMask | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    weight_versions: tuple[WeightVersionSpan, ...] | None = None
    extra: Mapping[str, Any] = {}
