"""Descriptions of engine messages, from which ``vllm_codec_child.py`` builds vLLM's own objects.

``$struct`` names a class of vLLM, ``$torch`` and ``$numpy`` a tensor's dtype, ``$set`` and ``$tuple`` a container.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from wire_strategies import FLOAT, HEADERS, INT64, MAPS, NAME, NUMPY, PLAIN, TEXT, TOKENS, maybe, tensors

SMALL = st.integers(0, 99)
TIMESTAMP = FLOAT.filter(bool)  # for 0.0 vLLM's constructor takes the clock's


def struct(name: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(fields).map(lambda drawn: {"$struct": name, "fields": drawn})


def torch(dimensions: int | None = None) -> st.SearchStrategy[Any]:
    return tensors(dimensions=dimensions).map(
        lambda tensor: {"$torch": tensor.dtype, "shape": list(tensor.shape), "data": bytes(tensor.data)}
    )


def numpy(dimensions: int | None = None) -> st.SearchStrategy[Any]:
    return tensors(NUMPY, dimensions).map(
        lambda tensor: {"$numpy": tensor.dtype, "shape": list(tensor.shape), "data": bytes(tensor.data)}
    )


LOGPROBS = struct(
    "LogprobsLists",
    logprob_token_ids=numpy(2),
    logprobs=numpy(2),
    sampled_token_ranks=numpy(1),
    cu_num_generated_tokens=maybe(TOKENS),
)
PROMPT_LOGPROBS = struct(
    "LogprobsTensors", logprob_token_ids=torch(2), logprobs=torch(2), selected_token_ranks=torch(1)
)
EVENT = struct("EngineCoreEvent", type=struct("EngineCoreEventType", value=st.integers(1, 3)), timestamp=FLOAT)
PREFILL = struct(
    "PrefillStats",
    num_prompt_tokens=SMALL,
    num_computed_tokens=SMALL,
    num_cached_tokens=SMALL,
    num_local_cached_tokens=SMALL,
    num_external_cached_tokens=SMALL,
    num_cache_creation_tokens=SMALL,
)
MASK = struct("SamplingMaskLists", token_ids=numpy(1), offsets=numpy(1), cu_num_generated_tokens=maybe(TOKENS))
SPECULATION = struct(
    "RequestSpecDecodeMetrics",
    num_spec_tokens=SMALL,
    histogram=TOKENS,
    num_draft_tokens=SMALL,
    per_step_accepted=TOKENS,
    per_step_drafted=TOKENS,
)


OUTPUT = struct(
    "EngineCoreOutput",
    request_id=NAME,
    new_token_ids=TOKENS,
    new_logprobs=maybe(LOGPROBS),
    new_prompt_logprobs_tensors=maybe(PROMPT_LOGPROBS),
    pooling_output=maybe(torch()),
    finish_reason=maybe(struct("FinishReason", value=st.integers(0, 4))),
    stop_reason=maybe(INT64 | TEXT),
    events=maybe(st.lists(EVENT, max_size=3)),
    kv_transfer_params=maybe(MAPS),
    ec_transfer_params=maybe(MAPS),
    trace_headers=maybe(HEADERS),
    prefill_stats=maybe(PREFILL),
    num_cached_tokens=SMALL,
    num_external_computed_tokens=SMALL,
    routed_experts=maybe(numpy()),
    num_nans_in_logits=SMALL,
    mm_cache_miss_hashes=maybe(st.lists(TEXT, max_size=2)),
    new_sampling_mask=maybe(MASK),
    spec_decode_metrics=maybe(SPECULATION),
    prompt_token_id_logprobs=maybe(torch(2)),
)


CACHE = struct("PrefixCacheStats", reset=st.booleans(), requests=SMALL, queries=SMALL, hits=SMALL, preempted_hits=SMALL)
STATS = struct(
    "SchedulerStats",
    num_running_reqs=SMALL,
    num_waiting_reqs=SMALL,
    num_skipped_waiting_reqs=SMALL,
    step_counter=SMALL,
    current_wave=SMALL,
    kv_cache_usage=FLOAT,
    encoder_cache_usage=FLOAT,
    prefix_cache_stats=CACHE,
    connector_prefix_cache_stats=maybe(CACHE),
    kv_connector_stats=maybe(MAPS),
    waiting_lora_adapters=st.dictionaries(TEXT, SMALL, max_size=2),
    running_lora_adapters=st.dictionaries(TEXT, SMALL, max_size=2),
)
RESULT = st.recursive(
    PLAIN | torch() | numpy(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(lambda items: {"$tuple": items})
        | st.dictionaries(TEXT.filter(lambda key: not key.startswith("$")), inner, max_size=2)
    ),
    max_leaves=4,
) | st.sets(SMALL, max_size=1).map(
    lambda items: {"$set": sorted(items)}  # the order of more is whatever it is
)


STEP = struct(
    "EngineCoreOutputs",
    engine_index=st.integers(0, 300),
    outputs=st.lists(OUTPUT, max_size=3),
    scheduler_stats=maybe(STATS),
    timestamp=TIMESTAMP,
    finished_requests=maybe(st.sets(NAME, max_size=3).map(lambda names: {"$set": sorted(names)})),
    weight_version=maybe(TEXT),
)
ANSWER = struct(
    "UtilityOutput", call_id=INT64, failure_message=st.none(), result=struct("UtilityResult", result=RESULT)
) | struct("UtilityOutput", call_id=INT64, failure_message=TEXT, result=st.none())
REPLY = struct("EngineCoreOutputs", engine_index=st.integers(0, 300), timestamp=TIMESTAMP, utility_output=ANSWER)
WAVE = struct("EngineCoreOutputs", wave_complete=maybe(SMALL), start_wave=maybe(SMALL), timestamp=TIMESTAMP)
MESSAGES = st.one_of(STEP, STEP, REPLY, WAVE)
"""Batches, utility replies, wave changes: whatever an engine sends."""
