"""Messages from client to engine: requests with their parameters, aborts, utility calls.

Owns the canonical (newest) structs; must not know bytes, frames or releases, nor the rules that user input obeys
(``anyengine.params`` has them). Mirrors vLLM 0.33.0 ``v1/engine/__init__.py`` (EngineCoreRequest),
``sampling_params.py``, ``pooling_params.py``, ``lora/request.py`` and ``v1/kv_hints/protocol.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .multimodal import MultiModalFeatureSpec
from .tensors import Tensor

__all__ = [
    "AbortRequests",
    "EngineCoreRequest",
    "KvHintAction",
    "KvHintsEnvelope",
    "ReconfigureDistributedRequest",
    "StartDPWave",
    "UtilityCall",
    "WireLateChunkingParams",
    "WireLateInteractionParams",
    "WireLoRARequest",
    "WirePoolingParams",
    "WireRepetitionDetection",
    "WireSamplingParams",
    "WireStructuredOutputs",
]


class WireStructuredOutputs(
    msgspec.Struct, gc=False, rename={"backend": "_backend", "backend_was_auto": "_backend_was_auto"}
):
    """The constraint on the output; without a usable ``backend`` the engine fails the request."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None
    backend: str | None = None
    backend_was_auto: bool = False


class WireRepetitionDetection(msgspec.Struct, gc=False):
    """When to stop a request that repeats itself, in tokens."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


_UNDERSCORED = {
    name: f"_{name}" for name in ("eos_token_id", "all_stop_token_ids", "watermarking_skipped", "bad_words_token_ids")
}


class WireSamplingParams(msgspec.Struct, omit_defaults=True, gc=False, rename=_UNDERSCORED):
    """Sampling parameters as the engine gets them: a map of what is off its default.

    Defaults and order are vLLM's. msgspec omits a field only if it holds the very default *object*; a default that is
    written all the same is harmless. vLLM's own front end always writes ``stop``, ``stop_token_ids``, ``bad_words`` (as
    ``[]``) and ``skip_reading_prefix_cache``: hence their default ``None``, which may be left out.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Tensor | None = None  # [num_prompt_tokens, k], int32
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: int = 0
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    eos_token_id: int | None = None
    all_stop_token_ids: set[int] = set()
    watermarking_skipped: bool = False
    structured_outputs: WireStructuredOutputs | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: WireRepetitionDetection | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None


class WireLateInteractionParams(msgspec.Struct, array_like=True, gc=False):
    """Scoring by late interaction: a query is cached under ``query_key`` and used ``query_uses`` times."""

    mode: str
    query_key: str
    query_uses: int | None = None


class WireLateChunkingParams(msgspec.Struct, array_like=True, gc=False):
    """Pooling by chunks of ``chunk_size`` tokens (0.33 and later)."""

    chunk_size: int


class WirePoolingParams(msgspec.Struct, array_like=True, gc=False):
    """Pooling parameters as the engine gets them. ``output_kind`` must be 2 (final only)."""

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: WireLateInteractionParams | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: int = 2
    late_chunking_params: WireLateChunkingParams | None = None


class WireLoRARequest(msgspec.Struct, array_like=True, gc=False):
    """A LoRA adapter: ``lora_int_id`` is at least 1, ``lora_path`` a path that the engine can read."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class KvHintAction(msgspec.Struct, gc=False):
    """One hint for the KV-cache connector."""

    action_id: str
    action_type: str
    action_version: str
    payload: dict[str, Any]


class KvHintsEnvelope(msgspec.Struct, gc=False):
    """Hints for the KV-cache connector, as one message."""

    protocol_version: str
    message_id: str
    actions: list[KvHintAction]


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """One generation (or pooling) request. Exactly one of ``sampling_params`` and ``pooling_params`` is set.

    ``client_index`` says which output socket the answers go to. ``arrival_time`` is wall clock, in s.
    """

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[MultiModalFeatureSpec] | None = None
    sampling_params: WireSamplingParams | None = None
    pooling_params: WirePoolingParams | None = None
    arrival_time: float = 0.0
    lora_request: WireLoRARequest | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Tensor | None = None  # [num_prompt_tokens, hidden]
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: dict[str, str] | None = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    session_id: str | None = None
    kv_hints: KvHintsEnvelope | None = None


class AbortRequests(msgspec.Struct, frozen=True, gc=False):
    """Forget these requests, without an output. On the wire: a bare array of ids."""

    request_ids: list[str]


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """A named call with positional ``args``; the reply goes to output socket ``client_index`` under ``call_id``."""

    client_index: int
    call_id: int
    method: str
    args: Sequence[Any] = ()


class ReconfigureDistributedRequest(msgspec.Struct, gc=False):
    """The argument of ``reinitialize_distributed``; rank -1 keeps the engine's rank, -2 shuts it down."""

    new_data_parallel_size: int
    new_data_parallel_rank: int
    new_data_parallel_rank_local: int
    new_data_parallel_master_ip: str
    new_data_parallel_master_port: int
    new_data_parallel_master_port_list: list[int]
    coord_store_port: int


class StartDPWave(msgspec.Struct, array_like=True, gc=False):
    """From the coordinator: run ``wave``. The engine whose index equals ``exclude`` already does."""

    wave: int
    exclude: int | bytes | None = None
