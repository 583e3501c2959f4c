"""The layout table: which positions each message has, release by release.

Owns data only. A row is ``(first release it holds for, names in wire order)`` and holds until the next row of its
message, so supporting another release means adding rows. The newest row of each message is the canonical struct's own
fields; names that the canonical struct lacks are carried as untyped optional values.
Array-like messages only, and the maps whose writer puts down every key; other maps are keyed by name and need no rows.
Source: vLLM's own wheels, read by program; golden vectors confirm each row.
"""

from __future__ import annotations

from typing import Final, TypeAlias

__all__ = ["OLDEST", "ROWS", "Release", "Row", "row_at"]

Release: TypeAlias = tuple[int, int, int]
Row: TypeAlias = tuple[Release, tuple[str, ...]]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_OUTPUT_0_31 = _names(
    "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason stop_reason events"
    " kv_transfer_params ec_transfer_params trace_headers prefill_stats routed_experts num_nans_in_logits"
    " mm_cache_miss_hashes new_sampling_mask spec_decode_metrics prompt_token_id_logprobs"
)
_POOLING_0_18 = _names(
    "use_activation dimensions step_tag_id returned_token_ids task requires_token_ids skip_reading_prefix_cache"
    " late_interaction_params extra_kwargs output_kind"
)
_READY_0_31 = _names(
    "max_model_len num_gpu_blocks block_size dp_stats_address dtype vllm_version world_size data_parallel_size"
    " tensor_parallel_size pipeline_parallel_size decode_context_parallel_size data_parallel_rank max_num_seqs"
    " max_num_batched_tokens instance_id supports_lora max_loras mamba_block_size kv_cache_size_tokens"
    " kv_cache_max_concurrency kv_events_config weight_transfer_backend enable_sleep_mode supports_draft_weight_updates"
    " effective_attention_block_size"
)

OLDEST: Final[Release] = (0, 32, 0)
"""The oldest release spoken."""

ROWS: Final[dict[str, tuple[Row, ...]]] = {
    "EngineCoreRequest": (
        ((0, 32, 0), _names(
            "request_id prompt_token_ids mm_features sampling_params pooling_params arrival_time lora_request"
            " cache_salt data_parallel_rank prompt_embeds prompt_is_token_ids client_index current_wave priority"
            " trace_headers resumable external_req_id reasoning_ended reasoning_parser_kwargs abort_immediately"
            " session_id kv_hints"
        )),
    ),
    "WirePoolingParams": (
        ((0, 32, 0), _POOLING_0_18),
        ((0, 33, 0), (*_POOLING_0_18, "late_chunking_params")),
    ),
    "WireLoRARequest": (
        ((0, 32, 0), _names("lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight")),
    ),
    "EngineCoreOutput": (
        ((0, 32, 0), _OUTPUT_0_31),
        ((0, 33, 0), (*_OUTPUT_0_31, "error")),
    ),
    "EngineCoreOutputs": (
        ((0, 32, 0), _names(
            "engine_index outputs scheduler_stats timestamp utility_output finished_requests wave_complete start_wave"
            " weight_version"
        )),
    ),
    "LogprobsTensors": (
        ((0, 32, 0), _names(
            "logprob_token_ids logprobs selected_token_ranks cu_num_generated_tokens cu_num_generated_tokens_tensor"
        )),
    ),
    "EngineCoreReadyResponse": (
        ((0, 32, 0), _READY_0_31),
        ((0, 33, 0), (*_READY_0_31, "coord_store_port", "coordinator_input_address", "coordinator_output_address")),
    ),
}  # fmt: skip


def row_at(rows: tuple[Row, ...], release: Release) -> tuple[str, ...]:
    """The names that hold for ``release``: the last row that is not newer, or the oldest one."""
    names = rows[0][1]
    for since, later in rows:
        if since <= release:
            names = later
    return names
