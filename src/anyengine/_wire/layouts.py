"""The layout table: which positions (or keys) each message has, release by release.

Owns data and its reading only. Keys are vLLM's class names, names are those of the wire. The first row of a message
lists everything in wire order; each later row says what its release changed: ``-name`` (gone), ``+name`` (at the end),
``+name@3`` (now at position 3), from left to right. A row holds until the next one, so supporting another release means
adding rows. With the newest rows a message has exactly the fields of its canonical struct; names that the canonical
struct lacks are carried as untyped optional values.

Source: vLLM's own wheels, read by program (``tests/support/extract_layouts.py``); golden vectors confirm each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

__all__ = [
    "LEGACY",
    "LOSABLE",
    "OLDEST",
    "ROWS",
    "Legacy",
    "Release",
    "Row",
    "change_points",
    "last_names",
    "shared_names",
    "versions_of",
]

Release: TypeAlias = tuple[int, int, int]
Row: TypeAlias = tuple[Release, tuple[str, ...]]

_TABLE: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    # From client to engine.
    "EngineCoreRequest": (
        ("0.12.0", (
            "request_id prompt_token_ids mm_features sampling_params pooling_params eos_token_id arrival_time"
            " lora_request cache_salt data_parallel_rank prompt_embeds client_index current_wave priority"
            " trace_headers"
        )),
        ("0.14.0", "+external_req_id"),
        ("0.15.0", "+resumable@15"),
        ("0.16.0", "+reasoning_ended"),
        ("0.17.0", "-eos_token_id"),
        ("0.20.1", "+reasoning_parser_kwargs"),
        ("0.21.0", "+prompt_is_token_ids@10 +abort_immediately"),
        ("0.28.0", "+session_id"),
        ("0.31.0", "+kv_hints"),
    ),
    # prompt_logprob_token_ids is left out of 0.31, where it is a flat list of ids: not the matrix it is from 0.32 on.
    "SamplingParams": (
        ("0.12.0", (
            "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop"
            " stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs detokenize"
            " skip_special_tokens spaces_between_special_tokens logits_processors include_stop_str_in_output"
            " truncate_prompt_tokens output_kind output_text_buffer_length _all_stop_token_ids"
            " structured_outputs logit_bias allowed_token_ids extra_args bad_words _bad_words_token_ids"
            " skip_reading_prefix_cache"
        )),
        ("0.14.0", "+skip_clone@24"),
        ("0.17.0", "-logits_processors -truncate_prompt_tokens +_eos_token_id@24 +repetition_detection"),
        ("0.19.0", "+thinking_token_budget@33"),
        ("0.20.0", "+logprob_token_ids@16"),
        ("0.22.0", "+routed_experts_prompt_start@31"),
        ("0.27.0", "+stream_interval@23"),
        ("0.29.0", "-routed_experts_prompt_start +routed_experts_prompt_start +trace_decode_token_ids"),
        ("0.30.0", "+watermarking@5"),
        ("0.31.0", "+prompt_logprob_start@17"),
        ("0.32.0", "+prompt_logprob_token_ids@17 +_watermarking_skipped@31"),
    ),
    "StructuredOutputsParams": (
        ("0.12.0", (
            "json regex choice grammar json_object disable_fallback disable_any_whitespace"
            " disable_additional_properties whitespace_pattern structural_tag _backend _backend_was_auto"
        )),
        ("0.18.0", "-disable_fallback"),
    ),
    "PoolingParams": (
        ("0.12.0", (
            "truncate_prompt_tokens dimensions normalize softmax activation use_activation step_tag_id"
            " returned_token_ids task requires_token_ids skip_reading_prefix_cache extra_kwargs output_kind"
        )),
        ("0.16.0", "-normalize -softmax -activation -use_activation +use_activation@1"),
        ("0.17.0", "-truncate_prompt_tokens"),
        ("0.18.0", "+late_interaction_params@7"),
        ("0.33.0", "+late_chunking_params"),
    ),
    "LoRARequest": (
        ("0.12.0", (
            "lora_name lora_int_id lora_path lora_local_path long_lora_max_len base_model_name"
            " tensorizer_config_dict"
        )),
        ("0.14.0", "-lora_local_path -long_lora_max_len"),
        ("0.15.0", "+load_inplace"),
        ("0.22.0", "+is_3d_lora_weight"),
        ("0.32.0", "-tensorizer_config_dict"),
    ),
    "MultiModalFeatureSpec": (
        ("0.12.0", "data modality identifier mm_position"),
        ("0.14.0", "+mm_hash"),
    ),
    # With a key of its own an item is an array of elements, otherwise a map of them.
    "MultiModalFieldElem": (
        ("0.12.0", "modality key data field"),
        ("0.16.0", "-modality -key"),
    ),
    # Without keep_on_cpu, what follows a field's factory are bare values, otherwise a map of options.
    "BaseMultiModalField": (
        ("0.12.0", ""),
        ("0.13.0", "+keep_on_cpu"),
    ),
    "ReconfigureDistributedRequest": (
        ("0.12.0", (
            "new_data_parallel_size new_data_parallel_rank new_data_parallel_rank_local"
            " new_data_parallel_master_ip new_data_parallel_master_port"
        )),
        ("0.17.0", (
            "+new_data_parallel_master_port_list +new_stateless_world_group_port_list"
            " +new_stateless_dp_group_port_list +new_stateless_ep_group_port_list"
            " +new_stateless_eplb_group_port_list"
        )),
        ("0.19.0", (
            "-new_stateless_world_group_port_list -new_stateless_dp_group_port_list"
            " -new_stateless_ep_group_port_list -new_stateless_eplb_group_port_list +coord_store_port"
        )),
    ),
    # From engine to client.
    "EngineCoreOutput": (
        ("0.12.0", (
            "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors pooling_output finish_reason"
            " stop_reason events kv_transfer_params trace_headers num_cached_tokens num_nans_in_logits"
        )),
        ("0.14.0", "+routed_experts@11"),
        ("0.16.0", "+num_external_computed_tokens@11"),
        ("0.20.0", "-num_cached_tokens -num_external_computed_tokens +prefill_stats@10"),
        ("0.26.0", "+ec_transfer_params@9"),
        ("0.28.0", "+mm_cache_miss_hashes +new_sampling_mask"),
        ("0.29.0", "+spec_decode_metrics"),
        ("0.31.0", "+prompt_token_id_logprobs"),
        ("0.33.0", "+error"),
    ),
    "EngineCoreOutputs": (
        ("0.12.0", (
            "engine_index outputs scheduler_stats timestamp utility_output finished_requests wave_complete"
            " start_wave"
        )),
        ("0.32.0", "+weight_version"),
    ),
    "LogprobsTensors": (
        ("0.12.0", "logprob_token_ids logprobs selected_token_ranks"),
        ("0.16.0", "+cu_num_generated_tokens"),
        ("0.29.0", "+cu_num_generated_tokens_tensor"),
    ),
    "SchedulerStats": (
        ("0.12.0", (
            "num_running_reqs num_waiting_reqs step_counter current_wave kv_cache_usage prefix_cache_stats"
            " connector_prefix_cache_stats kv_cache_eviction_events spec_decoding_stats kv_connector_stats"
            " waiting_lora_adapters running_lora_adapters"
        )),
        ("0.13.0", "+cudagraph_stats"),
        ("0.14.0", "+perf_stats"),
        ("0.16.0", "+encoder_cache_usage@5"),
        ("0.20.0", "-encoder_cache_usage +num_skipped_waiting_reqs@2"),
        ("0.26.0", "+iteration_details@6"),
        ("0.31.0", "+ec_connector_stats@12"),
        ("0.32.0", "+num_kv_fetch_reqs_by_stage@3"),
    ),
    "PrefixCacheStats": (
        ("0.12.0", "reset requests queries hits preempted_requests preempted_queries preempted_hits"),
        ("0.32.0", "+hits_by_source"),
    ),
    "PrefillStats": (
        ("0.20.0", (
            "num_prompt_tokens num_computed_tokens num_cached_tokens num_local_cached_tokens"
            " num_external_cached_tokens"
        )),
        ("0.26.0", "+num_cache_creation_tokens"),
    ),
    # Up to 0.19.1 the frame is empty; those without vllm_version are told apart by their keys.
    "EngineCoreReadyResponse": (
        ("0.12.0", ""),
        ("0.20.0", "+max_model_len +num_gpu_blocks +dp_stats_address"),
        ("0.22.0", "+dtype"),
        ("0.23.0", "+block_size@2 +vllm_version"),
        ("0.24.0", "+world_size +data_parallel_size +kv_cache_size_tokens +kv_cache_max_concurrency"),
        ("0.27.0", (
            "+tensor_parallel_size@8 +pipeline_parallel_size@9 +decode_context_parallel_size@10"
            " +data_parallel_rank@11 +max_num_seqs@12 +max_num_batched_tokens@13 +instance_id@14"
            " +kv_events_config"
        )),
        ("0.28.0", "+weight_transfer_backend +enable_sleep_mode +supports_draft_weight_updates"),
        ("0.29.0", "+supports_lora@15 +max_loras@16 +mamba_block_size@17"),
        ("0.31.0", "+effective_attention_block_size"),
        ("0.33.0", "+coord_store_port +coordinator_input_address +coordinator_output_address"),
    ),
}  # fmt: skip


class Legacy(NamedTuple):
    """Where a field that only older releases have comes from: ``path`` in the canonical struct, else ``default``."""

    default: Any
    path: str | None = None


LEGACY: Final[dict[str, Legacy]] = {
    "eos_token_id": Legacy(None, "sampling_params.eos_token_id"),
    "num_cached_tokens": Legacy(0, "prefill_stats.num_cached_tokens"),
    "num_external_computed_tokens": Legacy(0, "prefill_stats.num_external_cached_tokens"),
    "encoder_cache_usage": Legacy(0.0),
    "disable_fallback": Legacy(False),
}
"""Fields that are gone and whose absence a reader would not take for their default ``None``."""

LOSABLE: Final[dict[str, frozenset[str]]] = {
    "EngineCoreRequest": frozenset((
        "current_wave", "trace_headers", "external_req_id", "reasoning_parser_kwargs", "session_id", "kv_hints",
    )),
    "SamplingParams": frozenset((
        "_eos_token_id", "watermarking", "_watermarking_skipped", "skip_clone", "stream_interval",
    )),
    "StructuredOutputsParams": frozenset(),
    "PoolingParams": frozenset(),
    "LoRARequest": frozenset(("base_model_name",)),
    "MultiModalFeatureSpec": frozenset(("mm_hash",)),
    "ReconfigureDistributedRequest": frozenset(("new_data_parallel_master_port_list", "coord_store_port")),
}  # fmt: skip
"""What a client may ask of a release that cannot do it: hints, labels and what has another place there. Anything else
that is set and has no position is refused, since its loss would change the answer."""


def _release(text: str) -> Release:
    major, minor, micro = text.split(".")
    return int(major), int(minor), int(micro)


def _apply(names: list[str], change: str) -> None:
    sign, (name, _, position) = change[0], change[1:].partition("@")
    if sign == "-":
        names.remove(name)
    else:
        names.insert(int(position) if position else len(names), name)


def _expand(table: tuple[tuple[str, str], ...]) -> tuple[Row, ...]:
    (oldest, listing), *changes = table
    names = [name.removeprefix("+") for name in listing.split()]
    rows: list[Row] = [(_release(oldest), tuple(names))]
    for since, text in changes:
        for change in text.split():
            _apply(names, change)
        rows.append((_release(since), tuple(names)))
    return tuple(rows)


ROWS: Final[dict[str, tuple[Row, ...]]] = {message: _expand(table) for message, table in _TABLE.items()}
"""For each message, what the table comes to: ``(first release, all names in wire order)``, oldest first."""

OLDEST: Final[Release] = min(rows[0][0] for rows in ROWS.values())
"""The oldest release spoken."""


def versions_of(rows: tuple[Row, ...], since: Release, until: Release | None) -> list[Row]:
    """The rows that hold for any release from ``since`` up to but not including ``until`` (``None``: no end)."""
    starts = [start for start, _ in rows if start <= since]
    first = starts[-1] if starts else rows[0][0]
    found = [row for row in rows if first <= row[0] and (until is None or row[0] < until)]
    return found or [rows[0]]  # a message that is younger than all of these releases


def last_names(rows: tuple[Row, ...], since: Release, until: Release | None) -> tuple[str, ...]:
    """The names of the newest of these releases."""
    return versions_of(rows, since, until)[-1][1]


def shared_names(rows: tuple[Row, ...], since: Release, until: Release | None) -> tuple[str, ...]:
    """The leading names on which all of these releases agree: what can be written without knowing which it is."""
    shared: list[str] = []
    for names in zip(*(names for _, names in versions_of(rows, since, until)), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return tuple(shared)


def change_points(*tables: Mapping[str, tuple[tuple[Release, Any], ...]]) -> tuple[Release, ...]:
    """The releases at which anything in ``tables`` changes, oldest first."""
    return tuple(sorted({since for table in tables for rows in table.values() for since, _ in rows}))
