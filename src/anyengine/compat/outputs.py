"""What ``AsyncLLM.generate`` yields: vLLM's records, put together from the client's.

Owns the accumulation: the client sends what is new, whatever kind of output was asked for; what is given out is put
together here. Knows nothing of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from anyengine import outputs as ours
from anyengine.outputs import (
    LogprobsOnePosition,
    RequestMetrics,
    SamplingMask,
    SpecDecodeMetrics,
    TensorLike,
    WeightVersionSpan,
)
from anyengine.params import LoRARequest, OutputKind

__all__ = ["Accumulator", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput", "RequestOutput", "pooled"]


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One completion of a request, as far as it has come; or, of kind ``DELTA``, what is new of it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsOnePosition | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    routed_experts: TensorLike | None = None
    sampling_mask: SamplingMask | None = None
    spec_decode_metrics: SpecDecodeMetrics | None = None
    weight_versions: Sequence[WeightVersionSpan] | None = None

    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    """One item of a request: the completions that something is new of."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: Sequence[LogprobsOnePosition | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: TensorLike | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


class PoolingOutput(msgspec.Struct, kw_only=True):
    """What was computed of a prompt. ``data`` is a tensor: ``data.numpy()``, ``data.tolist()``."""

    data: TensorLike


class PoolingRequestOutput(msgspec.Struct, kw_only=True):
    """The one item of a pooling request."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True
    error: None = None
    """A request that fails raises."""


class Accumulator:
    """The items of one request, from those of its stream: what comes in is merged until it is taken.

    ``kind`` is the one that was asked for; the stream is of kind ``DELTA``, or ``FINAL_ONLY`` like this one.
    """

    def __init__(self, kind: OutputKind, prompt: str | None) -> None:
        self._gathers = kind is OutputKind.CUMULATIVE
        self._so_far: dict[int, CompletionOutput] = {}  # what was given out, which stays as it is
        self._new: dict[int, CompletionOutput] = {}  # of the next item
        self._last: ours.RequestOutput | None = None
        self._prompt = prompt
        self._prompt_logprobs: Sequence[LogprobsOnePosition | None] | None = None
        self._prompt_token_id_logprobs: TensorLike | None = None

    @property
    def has_new(self) -> bool:
        """Whether there is an item to take."""
        return bool(self._new)

    def add(self, output: ours.RequestOutput) -> None:
        """Merge ``output`` into the next item."""
        for one in output.outputs:
            if (known := self._new.get(one.index)) is not None:
                _extend(known, one)
            else:
                self._new[one.index] = self._begun(one)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        if output.prompt_token_id_logprobs is not None:
            self._prompt_token_id_logprobs = output.prompt_token_id_logprobs
        self._last = output

    def take(self) -> RequestOutput:
        """The next item; there is one."""
        new, last = self._new, self._last
        assert last is not None
        item = RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt if self._prompt is None else self._prompt,
            prompt_token_ids=None if last.prompt_token_ids is None else list(last.prompt_token_ids),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_id_logprobs=self._prompt_token_id_logprobs,
            outputs=[new[index] for index in sorted(new)],
            finished=last.finished,
            metrics=last.metrics,
            lora_request=last.lora_request,
            encoder_prompt=last.encoder_prompt,
            encoder_prompt_token_ids=last.encoder_prompt_token_ids,
            num_cached_tokens=last.num_cached_tokens,
            num_cache_creation_tokens=last.num_cache_creation_tokens,
            kv_transfer_params=last.kv_transfer_params,
            ec_transfer_params=last.ec_transfer_params,
        )
        self._new = {}
        if self._gathers:
            self._so_far.update(new)
        else:
            self._prompt_logprobs = self._prompt_token_id_logprobs = None
        return item

    def _begun(self, new: ours.RequestOutput) -> CompletionOutput:
        """A record of its own, with what was given out before if that is what is asked for."""
        known = self._so_far.get(new.index)
        record = CompletionOutput(index=new.index, text="", token_ids=[])
        if known is not None:
            record.text, record.token_ids = known.text, list(known.token_ids)
            record.sampling_mask = known.sampling_mask
            record.logprobs = None if known.logprobs is None else list(known.logprobs)
        _extend(record, new)
        return record


def _extend(record: CompletionOutput, new: ours.RequestOutput) -> None:
    record.text += new.text
    record.token_ids += new.token_ids
    if new.logprobs is not None:
        if record.logprobs is None:
            record.logprobs = []
        record.logprobs.extend(new.logprobs)
    record.cumulative_logprob = new.cumulative_logprob
    record.finish_reason, record.stop_reason = new.finish_reason, new.stop_reason
    record.lora_request = new.lora_request
    record.routed_experts = new.routed_experts
    if new.sampling_mask is not None:
        before = () if record.sampling_mask is None else record.sampling_mask.token_ids
        record.sampling_mask = SamplingMask(before + new.sampling_mask.token_ids)
    record.spec_decode_metrics = new.spec_decode_metrics
    record.weight_versions = new.weight_versions


def pooled(output: ours.PoolingOutput, prompt_token_ids: list[int]) -> PoolingRequestOutput:
    """The item of a pooling request."""
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=PoolingOutput(data=output.data),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
