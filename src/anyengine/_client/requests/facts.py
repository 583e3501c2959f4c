"""What is known of a request when it is sent, for its outputs to tell.

Owns the reading of it from the request that was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from anyengine._client.inputs.prompts import Embeddings
from anyengine._client.inputs.request_fields import RequestFields
from anyengine._protocol import num_prompt_tokens
from anyengine._wire import EngineCoreRequest
from anyengine.outputs import RequestFacts

if TYPE_CHECKING:
    from anyengine.params import LoRARequest

__all__ = ["facts_of"]


def facts_of(request: EngineCoreRequest, prompt: Sequence[int] | Embeddings, fields: RequestFields) -> RequestFacts:
    """The facts that hold before ``request`` is sent. ``prompt`` is what it was made of."""
    text, ids, sampling = getattr(prompt, "text", None), request.prompt_token_ids, request.sampling_params
    return RequestFacts(
        prompt=fields.get("prompt_text") if text is None else text,
        prompt_token_ids=None if ids is None else tuple(ids),
        num_prompt_tokens=num_prompt_tokens(request),
        lora_request=cast("LoRARequest | None", fields.get("lora_request")),  # names are settled
        arrival_time=request.arrival_time,
        is_watermarked=sampling is not None and bool(sampling.watermarking),
        is_watermark_skipped=sampling is not None and sampling.watermarking_skipped,
    )
