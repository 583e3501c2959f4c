"""Statistics that engines send along: one request's prefill, one step's scheduler.

Owns the map structs; what the client acts upon is typed, the rest is kept as plain maps, which a release may change.
Mirrors vLLM 0.33.0 ``v1/metrics/stats.py`` (PrefillStats, PrefixCacheStats, SchedulerStats).
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["PrefillStats", "PrefixCacheStats", "SchedulerStats"]


class PrefillStats(msgspec.Struct, gc=False):
    """Where one request's prompt tokens came from; sent once for each request."""

    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_local_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class PrefixCacheStats(msgspec.Struct, gc=False):
    """Prefix-cache counters since the last report."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    hits_by_source: dict[str, int] = {}


class SchedulerStats(msgspec.Struct, gc=False):
    """The scheduler's load after a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    num_kv_fetch_reqs_by_stage: dict[str, int] = {}
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0  # fraction
    iteration_details: dict[str, Any] | None = None
    prefix_cache_stats: PrefixCacheStats | None = None
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[dict[str, Any]] = []
    spec_decoding_stats: dict[str, Any] | None = None
    kv_connector_stats: dict[str, Any] | None = None
    ec_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: dict[str, Any] | None = None
    perf_stats: dict[str, Any] | None = None
