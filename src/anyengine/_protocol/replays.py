"""Whether a request can go on in another engine from where it was, and how it is put to that one.

Owns the rule: what follows must be what would have followed. The tokens so far become a part of the prompt, so whatever
tells prompt and output apart, or has a state of its own, cannot go on. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from anyengine._wire import EngineCoreRequest

from .multimodal_cache import lacks_data

__all__ = ["continued", "why_not_replayed"]

_ANYWHERE: Final = frozenset(
    (
        "all_stop_token_ids", "allowed_token_ids", "eos_token_id", "ignore_eos", "logit_bias", "logprob_token_ids",
        "logprobs", "max_tokens", "min_p", "min_tokens", "output_kind", "repetition_penalty",
        "skip_reading_prefix_cache", "stop_token_ids", "temperature", "top_k", "top_p",
    )
)  # fmt: skip
"""Parameters that mean the same wherever the prompt ends, or are counted down. (A repetition penalty counts prompt and
output alike; the two other penalties do not.)"""
_CARRIED: Final = frozenset(
    (
        "arrival_time", "cache_salt", "client_index", "data_parallel_rank", "external_req_id", "lora_request",
        "mm_features", "priority", "prompt_token_ids", "request_id", "sampling_params", "trace_headers",
    )
)  # fmt: skip


def why_not_replayed(request: EngineCoreRequest, num_received: int) -> str | None:
    """Why ``request``, of which so many tokens have come, cannot go on in another engine; ``None``: it can."""
    if lacks_data(request):
        return "a part of its multi-modal input was only in the cache of the engine that is gone"
    if num_received == 0:
        return None  # as if it had not been sent
    sampling = request.sampling_params
    if sampling is None or request.prompt_token_ids is None:
        return "its prompt is not made of tokens alone"
    if sampling.seed is not None and sampling.temperature > 0:
        return "with a seed, its random numbers would begin anew"
    for carrier, portable in ((sampling, _ANYWHERE | {"seed"}), (request, _CARRIED)):
        for field in msgspec.structs.fields(carrier):
            if field.name not in portable and getattr(carrier, field.name) != _default(field):
                return f"{field.name} depends on where the prompt ends"
    return None


def continued(request: EngineCoreRequest, received: Sequence[int], request_id: str) -> EngineCoreRequest:
    """What is left of ``request`` when ``received`` has come, as a request of its own. It can be replayed."""
    if not received:
        return msgspec.structs.replace(request, request_id=request_id)
    assert request.sampling_params is not None and request.prompt_token_ids is not None
    sampling = msgspec.structs.replace(request.sampling_params)
    if sampling.max_tokens is not None:
        sampling.max_tokens -= len(received)
    sampling.min_tokens = max(0, sampling.min_tokens - len(received))
    return msgspec.structs.replace(
        request,
        request_id=request_id,
        prompt_token_ids=[*request.prompt_token_ids, *received],
        sampling_params=sampling,
    )


def _default(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
