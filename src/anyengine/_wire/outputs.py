"""Messages from engine to client: output batches, and the utility replies that travel among them.

Owns the canonical (newest) structs and the classification of a batch; must not know bytes, frames or releases.
Mirrors vLLM 0.33.0 ``v1/engine/__init__.py`` (EngineCoreOutput, EngineCoreOutputs, UtilityOutput), ``v1/outputs.py``
(LogprobsLists, LogprobsTensors, SamplingMaskLists) and ``outputs.py`` (RequestError).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from anyengine.exceptions import DecodeError

from .constants import EEP_NOTIFICATION_CALL_ID, FAULT_STATUS_CALL_ID
from .stats import PrefillStats, SchedulerStats
from .tensors import Tensor

__all__ = [
    "EngineCoreEvent",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineRequestError",
    "LogprobsLists",
    "LogprobsTensors",
    "OutputBatch",
    "OutputsKind",
    "SamplingMaskLists",
    "UndecodableOutput",
    "UtilityOutput",
    "classify",
]


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of generated tokens; column 0 is the sampled token. Read the dtypes, do not assume them."""

    logprob_token_ids: Tensor  # [num_tokens, k + 1], integers
    logprobs: Tensor  # [num_tokens, k + 1], floats
    sampled_token_ranks: Tensor  # [num_tokens], integers
    cu_num_generated_tokens: list[int] | None = None


class LogprobsTensors(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of prompt tokens, positions 1 to the end; complete on the output that ends the prefill."""

    logprob_token_ids: Tensor  # [num_prompt_tokens - 1, k + 1], integers
    logprobs: Tensor  # [num_prompt_tokens - 1, k + 1], floats
    selected_token_ranks: Tensor  # [num_prompt_tokens - 1], integers
    cu_num_generated_tokens: list[int] | None = None
    cu_num_generated_tokens_tensor: Tensor | None = None


class SamplingMaskLists(msgspec.Struct, array_like=True, gc=False):
    """Token ids that sampling was restricted to, one after the other; ``offsets`` separates positions."""

    token_ids: Tensor  # [sum of lengths], integers
    offsets: Tensor | None = None  # [num_tokens + 1], integers
    cu_num_generated_tokens: list[int] | None = None


class EngineCoreEvent(msgspec.Struct, gc=False):
    """A scheduling event: type 1 queued, 2 scheduled, 3 preempted; ``timestamp``: the engine's monotonic clock (s)."""

    type: int
    timestamp: float


class EngineRequestError(msgspec.Struct, gc=False):
    """Why the engine refused or failed a request (0.33 and later; vLLM calls it RequestError)."""

    code: str
    message: str
    retryable: bool = False


class EngineCoreOutput(msgspec.Struct, array_like=True, gc=False):
    """One request's delta of one step. ``finish_reason`` is a plain int: see :func:`finish_reason_name`."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    pooling_output: Tensor | None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Tensor | None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: list[str] | None = None
    new_sampling_mask: SamplingMaskLists | None = None
    spec_decode_metrics: dict[str, Any] | None = None
    prompt_token_id_logprobs: Tensor | None = None
    error: EngineRequestError | None = None

    @property
    def surplus(self) -> dict[str, Any]:
        """What a newer engine says behind all that, by position."""
        return {}


class UndecodableOutput(EngineCoreOutput, array_like=True, gc=True, kw_only=True):
    """Stands where an output was that cannot be decoded. Only its ``request_id`` is known; whoever asks for its tokens
    gets the error. Not a last output: the engine may go on until it is told to stop."""

    trouble: DecodeError  # refers to frames, so to cycles: hence gc=True

    @property  # type: ignore[misc]  # a field that raises in place of its value, on purpose
    def new_token_ids(self) -> list[int]:  # type: ignore[override]
        raise self.trouble


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """The reply to a utility call (or an unsolicited message under a reserved ``call_id``).

    The call failed if ``failure_message`` is not ``None``. ``result`` is the plain value: the ``[type info, value]``
    pair of the wire exists only inside the dialect. Tensors in it are :class:`Tensor` records.
    """

    call_id: int
    failure_message: str | None = None
    result: Any = None


class OutputBatch(msgspec.Struct):
    """What engine messages of all releases are: :class:`EngineCoreOutputs`, and those derived from it."""


class EngineCoreOutputs(OutputBatch, array_like=True, gc=False):
    """One engine message: an output batch, a utility reply, a notification, or a wave change."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0  # the engine's monotonic clock, in s
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None
    wave_complete: int | None = None
    start_wave: int | None = None
    weight_version: str | None = None


class OutputsKind(Enum):
    """What an engine message is, and so who must get it."""

    BATCH = "batch"
    """Outputs, statistics or finished ids (possibly nothing at all)."""
    WAVE = "wave"
    """A data-parallel wave completed or started."""
    UTILITY_REPLY = "utility reply"
    EEP_NOTIFICATION = "EEP notification"
    FAULT_STATUS = "fault status"


def classify(message: EngineCoreOutputs) -> OutputsKind:
    """Which of the classes ``message`` belongs to. A utility output stands alone, so it decides first."""
    utility = message.utility_output
    if utility is not None:
        if utility.call_id == EEP_NOTIFICATION_CALL_ID:
            return OutputsKind.EEP_NOTIFICATION
        if utility.call_id == FAULT_STATUS_CALL_ID:
            return OutputsKind.FAULT_STATUS
        return OutputsKind.UTILITY_REPLY
    if message.wave_complete is not None or message.start_wave is not None:
        return OutputsKind.WAVE
    return OutputsKind.BATCH
