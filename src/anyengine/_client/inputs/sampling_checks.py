"""What sampling parameters must not ask of this model and this engine.

Owns the checks of what an engine survives and a user would regret: a feature that is not enabled is silently ignored
(measured on vLLM 0.32.0). Ranges and contradictions are :mod:`anyengine.params`'s; what ends an engine is admission's.
"""

from __future__ import annotations

from anyengine._protocol import EngineLimits
from anyengine._rules import INT64_MAX, reject
from anyengine.params import SamplingParams

__all__ = ["check_sampling"]


def check_sampling(params: SamplingParams, limits: EngineLimits, *, num_prompt_tokens: int, embeds: bool) -> None:
    """Check ``params`` against the model, the engine and the prompt; ``embeds``: the prompt has embeddings in it.

    Raises:
        RequestRejected: something that the engine would ignore, or does not allow.
    """
    _check_seeds(params)
    _check_log_probs(params, limits)
    _check_prompt_scores(params, limits, num_prompt_tokens)
    if embeds and (params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None):
        reject("prompt_logprobs", params.prompt_logprobs, "embeddings have no log-probabilities", "leave it out")
    if params.routed_experts_prompt_start > num_prompt_tokens:
        start = params.routed_experts_prompt_start
        reject("routed_experts_prompt_start", start, "exceeds the prompt", f"use at most {num_prompt_tokens}")
    for name, enabled, argument in (
        ("thinking_token_budget", limits.reasoning, "a reasoning_parser"),
        ("trace_decode_token_ids", limits.trace_replay, "enable_trace_replay=True"),
    ):
        if (value := getattr(params, name)) is not None and not enabled:
            reject(name, value, "would be ignored by the engine", f"leave it out, or {limits.enabled_by(argument)}")


def _check_log_probs(params: SamplingParams, limits: EngineLimits) -> None:
    allowed = _allowed(limits)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is None or (name == "logprobs" and params.logprob_token_ids is not None):
            continue
        if asked == -1 and limits.max_logprobs != -1:
            remedy = f"use at most {allowed}, or start the engine with max_logprobs=-1"
            reject(name, asked, "asks for the whole vocabulary, which the engine does not allow", remedy)
        if asked > allowed:
            more = "" if limits.vocab_size == allowed else f", or start the engine with max_logprobs={asked}"
            reject(name, asked, "is too many", f"use at most {allowed}{more}")


def _check_prompt_scores(params: SamplingParams, limits: EngineLimits, num_prompt_tokens: int) -> None:
    name, rows = "prompt_logprob_token_ids", params.prompt_logprob_token_ids
    if rows is None:
        return
    expected = max(num_prompt_tokens - 1 - (params.prompt_logprob_start or 0), 0)
    if len(rows) != expected:
        remedy = f"give {expected} rows: prompt tokens - 1 - prompt_logprob_start"
        reject(name, len(rows), "rows do not fit the prompt", remedy)
    if (width := len(rows[0])) > (allowed := _allowed(limits)):
        reject(name, width, "ids for each position are too many", f"use at most {allowed}")


def _allowed(limits: EngineLimits) -> int:
    """How many log-probabilities a position may have."""
    vocab_size = limits.vocab_size
    if limits.max_logprobs == -1:
        return 2**31 - 1 if vocab_size is None else vocab_size
    return limits.max_logprobs if vocab_size is None else min(limits.max_logprobs, vocab_size)


def _check_seeds(params: SamplingParams) -> None:
    """Completion ``i`` has the seed ``seed + i``, which must fit on the wire."""
    if params.seed is not None and params.seed + params.n - 1 > INT64_MAX:
        reject("seed", params.seed, f"is too large for n={params.n}", f"use at most {INT64_MAX - params.n + 1}")
