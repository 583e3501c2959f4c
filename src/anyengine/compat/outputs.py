"""What ``AsyncLLM.generate`` yields: vLLM's records, put together from the client's.

Owns the accumulation: the client sends what is new, whatever kind of output was asked for; what is given out is put
together here. Knows nothing of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from anyengine import outputs as ours
from anyengine.outputs import LogprobsOnePosition, RequestMetrics, TensorLike, WeightVersionSpan
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
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: Any = None


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


class Accumulator:
    """The items of one request, from those of its stream. Owned by the consumer.

    ``kind`` is the one that was asked for; the stream is of kind ``DELTA``, or ``FINAL_ONLY`` like this one.
    """

    def __init__(self, kind: OutputKind, prompt: str | None) -> None:
        self._gathers = kind is OutputKind.CUMULATIVE
        self._so_far: dict[int, CompletionOutput] = {}
        self._prompt = prompt
        self._prompt_logprobs: Sequence[LogprobsOnePosition | None] | None = None

    def item(self, arrived: Sequence[ours.RequestOutput]) -> RequestOutput:
        """One item of everything that has arrived since the last one, which is something."""
        new: dict[int, CompletionOutput] = {}
        prompt_logprobs: Sequence[LogprobsOnePosition | None] | None = None
        for output in arrived:
            for one in output.outputs:
                known = new.get(one.index) or (self._so_far.get(one.index) if self._gathers else None)
                new[one.index] = self._joined(known, one)
            prompt_logprobs = prompt_logprobs or output.prompt_logprobs
        if self._gathers:
            self._so_far.update(new)
            self._prompt_logprobs = prompt_logprobs = prompt_logprobs or self._prompt_logprobs
        last = arrived[-1]
        return RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt if self._prompt is None else self._prompt,
            prompt_token_ids=None if last.prompt_token_ids is None else list(last.prompt_token_ids),
            prompt_logprobs=prompt_logprobs,
            outputs=[new[index] for index in sorted(new)],
            finished=last.finished,
            metrics=last.metrics,
            lora_request=last.lora_request,
            num_cached_tokens=last.num_cached_tokens,
            num_cache_creation_tokens=last.num_cache_creation_tokens,
            kv_transfer_params=last.kv_transfer_params,
        )

    def _joined(self, known: CompletionOutput | None, new: ours.RequestOutput) -> CompletionOutput:
        """A record of its own: those that were given out stay as they are."""
        text, token_ids = new.text, new.token_ids
        logprobs: list[LogprobsOnePosition | None] | None = None if new.logprobs is None else list(new.logprobs)
        if known is not None:
            text, token_ids = known.text + text, known.token_ids + token_ids
            logprobs = None if logprobs is None else (known.logprobs or []) + logprobs
        return CompletionOutput(
            index=new.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=new.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            lora_request=new.lora_request,
            weight_versions=new.weight_versions,
        )


def pooled(output: ours.PoolingOutput, prompt_token_ids: list[int]) -> PoolingRequestOutput:
    """The item of a pooling request."""
    return PoolingRequestOutput(
        request_id=output.request_id,
        outputs=PoolingOutput(data=output.data),
        prompt_token_ids=prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
