"""The registration frame: the first message of each engine on each client's input socket.

Owns the map that describes a ready engine; must not know what a client makes of it.
Mirrors vLLM 0.33.0 ``v1/engine/__init__.py`` (EngineCoreReadyResponse).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .codec import compile_decoder, decode_frame
from .constants import Frame

__all__ = ["EngineCoreReadyResponse", "decode_ready"]


class EngineCoreReadyResponse(msgspec.Struct, dict=True):
    """What an engine says of itself; ``None``: its release does not. Only ``max_model_len`` (tokens) is required."""

    max_model_len: int
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    dp_stats_address: str | None = None
    dtype: str | None = None
    vllm_version: str | None = None
    world_size: int | None = None
    data_parallel_size: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    data_parallel_rank: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    instance_id: str | None = None
    supports_lora: bool | None = None
    max_loras: int | None = None
    mamba_block_size: int | None = None
    kv_cache_size_tokens: int | None = None
    kv_cache_max_concurrency: float | None = None
    kv_events_config: dict[str, Any] | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    effective_attention_block_size: int | None = None
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None

    @property
    def received(self) -> Mapping[str, Any]:
        """All keys that the engine sent, also those that this client does not know; empty for a response of our own."""
        received: Mapping[str, Any] = self.__dict__.get("received_map", {})
        return received


_RAW = compile_decoder(dict[str, Any])
_READY = compile_decoder(EngineCoreReadyResponse)


def decode_ready(frame: Frame) -> EngineCoreReadyResponse | None:
    """What the engine said, or ``None`` for an empty frame (releases up to 0.19.1 say nothing here).

    Unknown keys are found in ``received``.

    Raises:
        DecodeError: not a ready message.
    """
    if len(frame) == 0:
        return None
    response = decode_frame(_READY, frame, "EngineCoreReadyResponse")
    response.__dict__["received_map"] = decode_frame(_RAW, frame, "EngineCoreReadyResponse")
    return response
