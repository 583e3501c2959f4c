"""When a generation has ended, and why.

Owns the stop conditions that an engine knows, in vLLM's order (``vllm.v1.core.sched.utils.check_stop``, 0.32/0.33).
Stop strings are the client's business: an engine has no text.
"""

from __future__ import annotations

from typing import NamedTuple

from anyengine._wire import FinishReason
from anyengine.engine.interfaces import SequenceState

__all__ = ["Stop", "check_stop"]


class Stop(NamedTuple):
    """``stop_reason`` is the id in ``stop_token_ids`` that ended it, else ``None``."""

    finish_reason: FinishReason
    stop_reason: int | None = None


def check_stop(seq: SequenceState, max_model_len: int) -> Stop | None:
    """Whether the last token of ``seq`` ends it. It belongs to the output in any case."""
    sampling, last_token_id = seq.sampling, seq.output_token_ids[-1]
    num_output_tokens = len(seq.output_token_ids)
    if num_output_tokens >= sampling.min_tokens:
        if last_token_id == sampling.eos_token_id:
            return Stop(FinishReason.STOP)
        if last_token_id in (sampling.stop_token_ids or ()):
            return Stop(FinishReason.STOP, last_token_id)
    if num_output_tokens == sampling.max_tokens or seq.num_tokens >= max_model_len:
        return Stop(FinishReason.LENGTH)
    return None
