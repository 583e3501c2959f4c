"""What Hypothesis draws for admission: requests that any engine takes, and the same with one value put in a wrong
place."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from wire_strategies import FEATURE, FLOAT, LORA, POOLING, REQUESTS, TOKEN, maybe, sampling

import anyengine._wire as wire

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def _said(text: str | None) -> str | None:
    """``text``, or something that is not blank in its place."""
    return None if text is None else text.replace("\0", "").strip() or "x"


def _mend_sampling(params: wire.WireSamplingParams) -> None:
    """Only what an engine takes: a decoder does not see all of it."""
    if params.logprob_token_ids is not None:
        params.logprobs = None
    if params.bad_words_token_ids is not None:
        params.bad_words_token_ids = [word for word in params.bad_words_token_ids if word]
    if (constraint := params.structured_outputs) is not None:
        constraint.backend = "xgrammar"
        for name in ("regex", "grammar", "structural_tag"):
            setattr(constraint, name, _said(getattr(constraint, name)))
        if isinstance(constraint.json, str):
            constraint.json = _said(constraint.json)
        if constraint.choice is not None:
            constraint.choice = [text or "x" for text in constraint.choice]


def _mend_pooling(params: wire.WirePoolingParams) -> None:
    params.task = params.task or "embed"
    if (late := params.late_interaction_params) is not None:
        late.mode, late.query_key = late.mode or "cache_query", late.query_key or "key"
        late.query_uses = late.query_uses or None


@st.composite
def acceptable(draw: st.DrawFn) -> wire.EngineCoreRequest:
    """A request that an engine of unknown limits takes."""
    request = copy.deepcopy(draw(REQUESTS))  # parts of it are the strategies' own
    ids = draw(st.lists(TOKEN, min_size=20, max_size=40))
    request.prompt_token_ids, request.prompt_embeds, request.prompt_is_token_ids = ids, None, None
    if draw(st.booleans()):
        request.prompt_embeds = wire.Tensor("bfloat16", (len(ids), 8), bytes(16 * len(ids)))
        request.prompt_is_token_ids = draw(maybe(st.just([True] * len(ids))))
    request.arrival_time, request.client_index = draw(FINITE), 0
    request.sampling_params = request.pooling_params = None
    if draw(st.booleans()):
        request.pooling_params = copy.deepcopy(draw(POOLING))
        _mend_pooling(request.pooling_params)
    else:
        request.sampling_params = copy.deepcopy(draw(sampling()))
        _mend_sampling(request.sampling_params)
    for feature in request.mm_features or ():
        place = feature.mm_position
        if place.is_embed is not None:
            place.is_embed = wire.Tensor("bool", (place.length,), b"\1" * place.length)
    return request


@st.composite
def runnable(draw: st.DrawFn, vocab_size: int) -> wire.EngineCoreRequest:
    """A request that a small language model answers: with a few of its own tokens, or with an error of its own."""
    request = draw(acceptable())
    assert request.prompt_token_ids is not None
    request.prompt_token_ids = [token % vocab_size for token in request.prompt_token_ids]
    request.prompt_embeds = request.prompt_is_token_ids = request.lora_request = request.mm_features = None
    request.pooling_params, request.resumable, request.abort_immediately = None, False, False
    params = request.sampling_params = request.sampling_params or wire.WireSamplingParams()
    params.max_tokens = min(params.max_tokens or 8, 8)
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "trace_decode_token_ids"):
        if (ids := getattr(params, name)) is not None:
            setattr(params, name, [token % vocab_size for token in ids])
    params.all_stop_token_ids = {token % vocab_size for token in params.all_stop_token_ids}
    params.eos_token_id = None if params.eos_token_id is None else params.eos_token_id % vocab_size
    if params.logit_bias is not None:
        params.logit_bias = {token % vocab_size: bias for token, bias in params.logit_bias.items()}
    if params.bad_words_token_ids is not None:
        params.bad_words_token_ids = [[token % vocab_size for token in word] for word in params.bad_words_token_ids]
    return request


class Odd:
    """Nothing that could be sent."""


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-(2**70), -(2**63), -2, -1, 0, 1, 2, 3, 17, 2**31, 2**32, 2**63, 2**64 - 1, 2**64]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.5, 0.5, 1.0, 1.5, 1e300]),
    st.sampled_from(["", "x", "0", "\ud800", "embed", "generate", "flat", "float32", b"", b"x", bytearray(b"y")]),
    st.sampled_from([[], [0], [-1], [None], [[]], ["x"], [1.5], [True], [2**64], (1, 2), {1}, {"a"}, frozenset()]),
    st.sampled_from([{}, {"a": 1}, {1: 2}, {1: "x"}, {None: 1}, {"a": Odd()}, {"slices": "x"}, {"slices": [["a"]]}]),
    st.builds(Odd),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.array([1, 2])]),
    st.sampled_from([decimal.Decimal("0.5"), dt.datetime(2026, 1, 1, tzinfo=dt.UTC), range(3)]),
    st.builds(
        wire.Tensor, st.sampled_from(["<f4", "float32", "nonsense", "|b1", "int64"]), st.just((0,)), st.just(b"")
    ),
    st.builds(lambda shape: wire.Tensor("float32", shape, bytes(4)), st.sampled_from([(1,), (1, 1), ()])),
    st.builds(wire.WireRepetitionDetection, st.integers(-1, 3), st.integers(-1, 3), st.integers(0, 3)),
    st.builds(wire.WireStructuredOutputs, regex=maybe(st.just("a")), json_object=maybe(st.just(True))),
    st.builds(wire.WireLoRARequest, st.sampled_from(["", "x"]), st.integers(-1, 1), st.sampled_from(["", "x"])),
    st.deferred(lambda: FEATURE | LORA | POOLING | FLOAT),
)


def slots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of ``value`` that holds something: container, and attribute or key."""
    names: Any = ()
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif isinstance(value, dict):
        names = list(value)
    elif isinstance(value, list):
        names = range(min(len(value), 2))
    for name in names:
        yield value, name
        yield from slots(getattr(value, name) if isinstance(value, msgspec.Struct) else value[name])


@st.composite
def spoilt(draw: st.DrawFn) -> wire.EngineCoreRequest:
    """A request with something else in one or two of its places."""
    request = draw(acceptable())
    for _ in range(draw(st.integers(1, 2))):
        container, name = draw(st.sampled_from(list(slots(request))))
        junk = copy.deepcopy(draw(JUNK))
        if isinstance(container, msgspec.Struct):
            setattr(container, name, junk)
        else:
            container[name] = junk
    return request
