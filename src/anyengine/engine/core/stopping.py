"""When a generation has ended, and why.

Owns the stop conditions that an engine knows, in vLLM's order (``vllm.v1.core.sched.utils.check_stop``, 0.32/0.33).
Stop strings are the client's business: an engine has no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anyengine._wire import FinishReason, WireRepetitionDetection
from anyengine.engine.interfaces import SequenceState

__all__ = ["Stop", "check_stop"]


class Stop(NamedTuple):
    """``stop_reason`` is the id in ``stop_token_ids`` that ended it, vLLM's word for a repetition, else ``None``."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


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
    detection = sampling.repetition_detection
    if detection is not None and num_output_tokens >= sampling.min_tokens and _repeats(seq.output_token_ids, detection):
        return Stop(FinishReason.REPETITION, "repetition_detected")
    return None


def _repeats(token_ids: Sequence[int], detection: WireRepetitionDetection) -> bool:
    """Whether ``token_ids`` ends with ``min_count`` times the same pattern of a size in question."""
    count = detection.min_count
    if count < 2:
        return False
    longest = min(detection.max_pattern_size, len(token_ids) // count)
    for size in range(max(1, detection.min_pattern_size), longest + 1):
        # A tail that equals itself moved by ``size`` repeats its last ``size`` tokens.
        length = size * (count - 1)
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-length:] == token_ids[-length - size : -size]:
            return True
    return False
