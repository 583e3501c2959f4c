"""Hypothesis: whatever our structs hold comes back, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import anyengine._wire as wire

INT64 = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(max_size=12)
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MAPS = st.dictionaries(TEXT, PLAIN, max_size=3)


def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def tensors(draw: st.DrawFn) -> wire.Tensor:
    dtype, item_bytes = draw(st.sampled_from([("<f4", 4), ("int64", 8), ("bfloat16", 2), ("|b1", 1)]))
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    size = item_bytes
    for dim in shape:
        size *= dim
    return wire.Tensor(dtype, tuple(shape), bytes([draw(st.integers(0, 255))]) * size)


LOGPROBS = st.builds(wire.LogprobsLists, tensors(), tensors(), tensors(), cu_num_generated_tokens=optional(TOKENS))
OUTPUT = st.builds(
    wire.EngineCoreOutput,
    TEXT,
    TOKENS,
    new_logprobs=optional(LOGPROBS),
    pooling_output=optional(tensors()),
    finish_reason=optional(st.integers(0, 12)),
    stop_reason=optional(INT64 | TEXT),
    kv_transfer_params=optional(MAPS),
    trace_headers=optional(st.dictionaries(TEXT, TEXT, max_size=2)),
    prefill_stats=optional(st.builds(wire.PrefillStats, st.integers(0, 9), st.integers(0, 9))),
    routed_experts=optional(tensors()),
    num_nans_in_logits=st.integers(0, 9),
)
OUTPUTS = st.builds(
    wire.EngineCoreOutputs,
    engine_index=st.integers(0, 3),
    outputs=st.lists(OUTPUT, max_size=4),
    scheduler_stats=optional(st.builds(wire.SchedulerStats, st.integers(0, 9), kv_connector_stats=optional(MAPS))),
    timestamp=st.floats(allow_nan=False),
    utility_output=optional(
        st.builds(wire.UtilityOutput, INT64, st.none(), PLAIN) | st.builds(wire.UtilityOutput, INT64, TEXT)
    ),
    finished_requests=optional(st.sets(TEXT, max_size=3)),
    wave_complete=optional(st.integers(0, 9)),
    weight_version=optional(TEXT),
)
SAMPLING = st.builds(
    wire.WireSamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(-1, 100),
    seed=optional(INT64),
    stop_token_ids=optional(TOKENS),
    max_tokens=optional(st.integers(1, 100)),
    eos_token_id=optional(st.integers(0, 9)),
    all_stop_token_ids=st.sets(st.integers(0, 9)),
    prompt_logprob_token_ids=optional(tensors()),
    logit_bias=optional(st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3)),
    extra_args=optional(MAPS),
)
REQUEST = st.builds(
    wire.EngineCoreRequest,
    TEXT,
    optional(TOKENS),
    sampling_params=optional(SAMPLING),
    pooling_params=optional(st.builds(wire.WirePoolingParams, task=optional(TEXT), extra_kwargs=optional(MAPS))),
    arrival_time=st.floats(allow_nan=False),
    lora_request=optional(st.builds(wire.WireLoRARequest, TEXT, st.integers(1, 9), TEXT)),
    prompt_embeds=optional(tensors()),
    client_index=st.integers(0, 3),
    priority=st.integers(-5, 5),
    trace_headers=optional(st.dictionaries(TEXT, TEXT, max_size=2)),
)


@pytest.mark.parametrize("dialect", wire.DIALECTS[-2:], ids=repr)
@settings(max_examples=150, deadline=None)
@given(message=OUTPUTS)
def test_outputs_round_trip(dialect: wire.Dialect, message: wire.EngineCoreOutputs) -> None:
    assert dialect.decode_outputs(dialect.encode_outputs(message)) == message


@pytest.mark.parametrize("dialect", wire.DIALECTS[-2:], ids=repr)
@settings(max_examples=150, deadline=None)
@given(request=REQUEST)
def test_requests_round_trip(dialect: wire.Dialect, request: wire.EngineCoreRequest) -> None:
    assert dialect.decode_input(dialect.encode_add(request)) == request


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(TEXT, max_size=5), call_id=INT64, args=st.lists(PLAIN, max_size=3))
def test_aborts_and_utility_calls_round_trip(ids: list[str], call_id: int, args: list[Any]) -> None:
    assert wire.NEWEST.decode_input(wire.NEWEST.encode_abort(ids)) == wire.AbortRequests(ids)
    call = wire.UtilityCall(1, call_id, "method", args)
    assert wire.NEWEST.decode_input(wire.NEWEST.encode_utility(call)) == call
