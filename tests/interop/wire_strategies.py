"""What Hypothesis draws for the differential tests: requests that vLLM accepts, and descriptions of engine messages."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import anyengine._wire as wire
from anyengine.testing._profiles import deep_profile

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
TOKEN = st.integers(0, 2**31 - 1)
TOKENS = st.lists(TOKEN, max_size=8)
FLOAT = st.floats(allow_nan=False, width=64)
PLAIN = st.recursive(
    st.none() | st.booleans() | INT64 | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
MAPS = st.dictionaries(TEXT, PLAIN, max_size=3)
HEADERS = st.dictionaries(TEXT, TEXT, max_size=2)
TORCH = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}
NUMPY = {"<f4": 4, "<i4": 4, "<i8": 8, "<i2": 2, "|b1": 1}
NEAR_THRESHOLD = (0, 1, 31, 32, 63, 64, 127, 128, 255, 256, 257)  # 256 bytes and more go into frames of their own


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def tensors(draw: st.DrawFn, dtypes: dict[str, int] = TORCH, dimensions: int | None = None) -> wire.Tensor:
    dtype = draw(st.sampled_from(list(dtypes)))
    count = draw(st.sampled_from(NEAR_THRESHOLD))
    number = draw(st.integers(1, 3)) if dimensions is None else dimensions
    shape = (*[1] * (number - 1), count) if draw(st.booleans()) else (count, *[1] * (number - 1))
    value = draw(st.integers(0, 1)) if dtype in ("bool", "|b1") else draw(st.integers(0, 127))
    return wire.Tensor(dtype, shape, bytes([value]) * (count * dtypes[dtype]))


STRUCTURED = st.one_of(
    st.builds(wire.WireStructuredOutputs, json=TEXT | st.just({"type": "object"}), backend=st.just("xgrammar")),
    st.builds(wire.WireStructuredOutputs, regex=TEXT, backend=st.just("guidance"), backend_was_auto=st.booleans()),
    st.builds(
        wire.WireStructuredOutputs, choice=st.lists(TEXT, min_size=1, max_size=3), whitespace_pattern=maybe(TEXT)
    ),
    st.builds(wire.WireStructuredOutputs, grammar=TEXT, disable_any_whitespace=st.booleans()),
    st.builds(wire.WireStructuredOutputs, json_object=st.just(True), disable_additional_properties=st.booleans()),
    st.builds(wire.WireStructuredOutputs, structural_tag=TEXT),
)


@st.composite
def sampling(draw: st.DrawFn) -> wire.WireSamplingParams:
    """Parameters that vLLM's constructor leaves as they are: sent by us, they have passed it already."""
    temperature = draw(st.just(0.0) | st.floats(0.01, 2.0))
    greedy = temperature < 1e-5
    stop_token_ids = draw(maybe(st.lists(TOKEN, max_size=4, unique=True)))
    min_tokens = draw(st.integers(0, 8))
    return wire.WireSamplingParams(
        n=1 if greedy else draw(st.integers(1, 4)),
        presence_penalty=draw(st.floats(-2, 2)),
        frequency_penalty=draw(st.floats(-2, 2)),
        repetition_penalty=draw(st.floats(0.5, 3)),
        temperature=temperature,
        watermarking=draw(st.none() | st.booleans()),
        top_p=1.0 if greedy else draw(st.floats(0.01, 1)),
        top_k=0 if greedy else draw(st.integers(0, 1000)),
        min_p=0.0 if greedy else draw(st.floats(0, 1)),
        seed=draw(maybe(INT64.filter(lambda seed: seed != -1))),
        stop_token_ids=stop_token_ids,
        ignore_eos=draw(st.booleans()),
        max_tokens=draw(st.integers(8, 1000)),
        min_tokens=min_tokens,
        logprobs=draw(maybe(st.integers(-1, 20))),
        prompt_logprobs=draw(maybe(st.integers(-1, 20))),
        flat_logprobs=draw(st.booleans()),
        detokenize=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        output_kind=draw(st.integers(0, 2)),
        skip_clone=draw(st.booleans()),
        eos_token_id=draw(maybe(TOKEN)),
        all_stop_token_ids=draw(st.sets(TOKEN, max_size=3)) | set(stop_token_ids or ()),
        structured_outputs=draw(maybe(STRUCTURED)),
        logit_bias=draw(maybe(st.dictionaries(TOKEN, st.floats(-100, 100), max_size=3))),
        allowed_token_ids=draw(maybe(st.lists(TOKEN, min_size=1, max_size=4))),
        extra_args=draw(maybe(MAPS)),
        bad_words_token_ids=draw(maybe(st.lists(TOKENS, max_size=2))),
        skip_reading_prefix_cache=draw(st.booleans()),
        thinking_token_budget=draw(maybe(st.integers(0, 100))),
        logprob_token_ids=draw(maybe(st.lists(TOKEN, min_size=1, max_size=3, unique=True))),
        stream_interval=draw(maybe(st.integers(1, 9))),
        routed_experts_prompt_start=draw(st.integers(0, 9)),
        repetition_detection=draw(maybe(st.just(wire.WireRepetitionDetection(8, 2, 3)))),
        trace_decode_token_ids=draw(maybe(TOKENS)),
    )


POOLING = st.builds(
    wire.WirePoolingParams,
    use_activation=maybe(st.booleans()),
    dimensions=maybe(st.integers(1, 99)),
    step_tag_id=maybe(st.integers(0, 9)),
    returned_token_ids=maybe(TOKENS),
    task=maybe(st.sampled_from(["embed", "classify", "token_embed"])),
    requires_token_ids=st.booleans(),
    skip_reading_prefix_cache=maybe(st.booleans()),
    late_interaction_params=maybe(st.builds(wire.WireLateInteractionParams, TEXT, TEXT, maybe(st.integers(0, 9)))),
    extra_kwargs=maybe(MAPS),
)
LORA = st.builds(
    wire.WireLoRARequest, NAME, st.integers(1, 99), NAME, base_model_name=maybe(TEXT), load_inplace=st.booleans()
)
OPTIONS = st.one_of(
    st.builds(wire.MultiModalField, st.just("batched"), st.fixed_dictionaries({"keep_on_cpu": st.just(False)})),
    st.builds(
        wire.MultiModalField,
        st.just("flat"),
        st.fixed_dictionaries(
            {
                "keep_on_cpu": st.just(False),
                "slices": st.lists(st.just([0, 2, None]), max_size=2),
                "dim": st.integers(0, 2),
            }
        ),
    ),
    st.builds(
        wire.MultiModalField,
        st.just("shared"),
        st.fixed_dictionaries({"keep_on_cpu": st.just(False), "batch_size": st.integers(1, 4)}),
    ),
)
NESTED = st.recursive(
    tensors() | st.integers(0, 9) | FLOAT, lambda inner: st.lists(inner, min_size=1, max_size=2), max_leaves=3
)
FEATURE = st.builds(
    wire.MultiModalFeatureSpec,
    maybe(st.dictionaries(NAME, st.builds(wire.MultiModalFieldElem, NESTED, OPTIONS), min_size=1, max_size=2)),
    st.sampled_from(["image", "audio"]),
    NAME,
    st.builds(wire.PlaceholderRange, st.integers(0, 9), st.integers(1, 9), maybe(tensors({"bool": 1}, 1))),
    maybe(NAME),
)
REQUESTS = st.builds(
    wire.EngineCoreRequest,
    NAME,
    maybe(TOKENS),
    mm_features=maybe(st.lists(FEATURE, max_size=2)),
    sampling_params=maybe(sampling()),
    pooling_params=maybe(POOLING),
    arrival_time=FLOAT,
    lora_request=maybe(LORA),
    cache_salt=maybe(TEXT),
    data_parallel_rank=maybe(st.integers(0, 9)),
    prompt_embeds=maybe(tensors()),
    prompt_is_token_ids=maybe(st.lists(st.booleans(), max_size=3)),
    client_index=st.integers(0, 3),
    current_wave=st.just(0),
    priority=st.integers(-5, 5),
    trace_headers=maybe(HEADERS),
    resumable=st.booleans(),
    external_req_id=maybe(TEXT),
    reasoning_ended=maybe(st.booleans()),
    reasoning_parser_kwargs=maybe(MAPS),
    abort_immediately=st.booleans(),
    session_id=maybe(TEXT),
    kv_hints=maybe(
        st.just(wire.KvHintsEnvelope("1", "m", [wire.KvHintAction("a", "prefetch", "1", {"n": [1, None]})]))
    ),
)


def plain(value: Any) -> Any:
    """Ours in the form in which vLLM's values come back."""
    if isinstance(value, wire.Tensor):
        return {"tensor": value.dtype, "shape": list(value.shape), "data": bytes(value.data)}
    if isinstance(value, wire.MultiModalField):
        return {"factory": value.factory, "options": plain(value.options)}
    if isinstance(value, msgspec.Struct):
        return {info.encode_name: plain(getattr(value, info.name)) for info in msgspec.structs.fields(value)}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(value)
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


ROUNDS = range(10 if deep_profile() else 1)
PER_ROUND = 2_000


@cache
def examples(strategy: st.SearchStrategy[Any], number: int, count: int = PER_ROUND) -> list[Any]:
    """The values of one round, the same for every release. Nothing is asserted while they are drawn: they are judged in
    batches, in another process."""
    drawn: list[Any] = []

    @seed(number)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn
