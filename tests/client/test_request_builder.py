"""Requests as they are made: what is filled in, and what is refused before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import built_tokenizers
import msgspec
import numpy as np
import pytest
import torch

from anyengine import (
    CommandEngine,
    EmbeddedEngine,
    EmbedsPrompt,
    LoRARequest,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
    PoolingParams,
    RequestRejected,
    SamplingParams,
    StructuredOutputsParams,
    Tensor,
    VLLMEngine,
)
from anyengine._client.engines.engine_limits import limits_of
from anyengine._client.inputs.prompts import take_embeddings
from anyengine._client.inputs.request_builder import RequestBuilder
from anyengine._client.requests.refusals import in_users_words
from anyengine._protocol import Connection
from anyengine._text import ModelFacts, Tokenizer
from anyengine._wire import NEWEST, EngineCoreReadyResponse, EngineCoreRequest

READY = EngineCoreReadyResponse(max_model_len=32, max_loras=2)
MODEL = ModelFacts(directory="model", vocab_size=400, eos_token_ids=(2, 3), hidden_size=4)
GENERATE, POOL = frozenset(("generate",)), frozenset(("embed", "token_embed", "classify"))
EMBEDS = np.ones((3, 4), np.float32)


def builder(
    *, tokenizer: Tokenizer | None = None, tasks: frozenset[str] = GENERATE, model: ModelFacts = MODEL, **args: Any
) -> RequestBuilder:
    limits = limits_of(READY, CommandEngine(argv=("x",), args=args), model)
    return RequestBuilder((model, tokenizer, None), msgspec.structs.replace(limits, tasks=tasks), "p")


def build(made: RequestBuilder, prompt: Any = (1, 2, 3), params: Any = None, **fields: Any) -> EngineCoreRequest:
    prepared = prompt if isinstance(prompt, tuple) else take_embeddings(prompt)
    request = made.build(prepared, params or SamplingParams(), "label", fields)
    with in_users_words("label"):
        Connection({0: NEWEST}, call_id_prefix=1, limits={0: made.limits}).check(request, 0)
    return request


# --------------------------------------------------------------------- sampling

REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # the engine's arguments, parameters, which is refused
    ({}, {"stop": ["x"]}, "stop"),  # there is no text without a tokenizer
    ({}, {"stop_regex": ["x"]}, "stop_regex"),
    ({}, {"n": 2, "seed": 2**63 - 1}, "seed"),
    ({}, {"stop_token_ids": [400]}, "stop_token_ids"),
    ({}, {"allowed_token_ids": [400]}, "allowed_token_ids"),
    ({}, {"logit_bias": {400: 1.0}}, "logit_bias"),
    ({}, {"logprob_token_ids": [400]}, "logprob_token_ids"),
    ({}, {"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
    ({}, {"logprobs": 21}, "logprobs"),
    ({}, {"logprobs": -1}, "logprobs"),
    ({}, {"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"max_logprobs": 3}, {"prompt_logprobs": 4}, "prompt_logprobs"),
    ({"max_logprobs": -1}, {"logprobs": 401}, "logprobs"),
    ({"max_logprobs": 1000}, {"logprobs": 401}, "logprobs"),
    ({}, {"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
    ({}, {"prompt_logprob_token_ids": [[1], [400]]}, "prompt_logprob_token_ids"),
    ({}, {"prompt_logprob_token_ids": [[1] * 21] * 2}, "prompt_logprob_token_ids"),
    ({}, {"thinking_token_budget": 1}, "thinking_token_budget"),
    ({}, {"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
    ({}, {"routed_experts_prompt_start": 4}, "routed_experts_prompt_start"),
    ({}, {"bad_words": ["x"]}, "prompt"),  # there is no tokenizer: the error says so
    ({"skip_tokenizer_init": True}, {"structured_outputs": StructuredOutputsParams(regex="a")}, "structured_outputs"),
]


@pytest.mark.feature("R54")
@pytest.mark.parametrize(("args", "params", "parameter"), REFUSED)
def test_refused_sampling_parameters(args: dict[str, Any], params: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        build(builder(**args), params=SamplingParams(**params))
    assert (caught.value.parameter, caught.value.request_id) == (parameter, "label")
    assert caught.value.remedy and "_params." not in str(caught.value)


REMEDIES: list[
    tuple[Any, Any, dict[str, Any], str, str]
] = [  # prompt, parameters, fields; of the embedded engine, vLLM's
    ((1,), {"logprobs": 30}, {}, "start the engine with max_logprobs=30", "start the engine with max_logprobs=30"),
    ((1,), {"thinking_token_budget": 1}, {}, "the embedded one does not", "start the engine with a reasoning_parser"),
    ((1,), {"trace_decode_token_ids": [1]}, {}, "the embedded one does not", "with enable_trace_replay=True"),
    ((1,), {}, {"lora_request": LoRARequest("a", 1, "/a")}, "with max_loras=1 or more", "with enable_lora=True"),
    (EMBEDS, {}, {}, "the embedded one does not", "start the engine with enable_prompt_embeds=True"),
]


@pytest.mark.parametrize(("prompt", "params", "fields", "embedded", "vllm"), REMEDIES)
def test_a_remedy_is_one_of_the_engine_in_use(
    prompt: Any, params: dict[str, Any], fields: Any, embedded: str, vllm: str
) -> None:
    ready = EngineCoreReadyResponse(max_model_len=32, supports_lora=False)
    for engine, remedy in ((EmbeddedEngine(), embedded), (VLLMEngine("m"), vllm)):
        limits = msgspec.structs.replace(limits_of(ready, engine, MODEL), tasks=GENERATE)
        with pytest.raises(RequestRejected) as caught:
            build(RequestBuilder((MODEL, None, None), limits, "p"), prompt, SamplingParams(**params), **fields)
        assert remedy in str(caught.value)


def test_the_embedded_engine_allows_as_many_log_probabilities_as_it_is_told() -> None:
    limits = limits_of(READY, EmbeddedEngine(max_logprobs=-1), MODEL)
    made = RequestBuilder((MODEL, None, None), msgspec.structs.replace(limits, tasks=GENERATE), "p")
    for logprobs in (400, -1):
        sampling = build(made, params=SamplingParams(logprobs=logprobs)).sampling_params
        assert sampling is not None and sampling.logprobs == logprobs


@pytest.mark.feature("R15")
def test_chosen_tokens_and_a_number_must_agree() -> None:
    assert SamplingParams(logprobs=2, logprob_token_ids=[1, 2]).logprobs == 2
    for params in ({"logprobs": 1, "logprob_token_ids": [1, 2]}, {"logprob_token_ids": []}):
        with pytest.raises(RequestRejected):
            SamplingParams(**params)
    for params in ({"prompt_logprob_start": 1}, {"prompt_logprob_token_ids": []}, {"prompt_logprob_token_ids": [[]]}):
        with pytest.raises(RequestRejected):
            SamplingParams(**params)


TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"logprobs": 20, "prompt_logprobs": 0}),
    ({"max_logprobs": -1}, {"logprobs": -1, "prompt_logprobs": 400}),
    ({"max_logprobs": 5}, {"logprob_token_ids": list(range(128))}),
    ({}, {"prompt_logprob_token_ids": [[1, -1], [2, 3]]}),
    ({}, {"prompt_logprob_token_ids": [[1, -1]], "prompt_logprob_start": 1}),
    ({"reasoning_parser": "x"}, {"thinking_token_budget": 7}),
    ({}, {"thinking_token_budget": -1}),
]


@pytest.mark.feature("R28")
@pytest.mark.parametrize(("args", "params"), TAKEN)
def test_taken_sampling_parameters(args: dict[str, Any], params: dict[str, Any]) -> None:
    sampling = build(builder(**args), params=SamplingParams(**params)).sampling_params
    assert sampling is not None
    for name, value in params.items():
        if name != "prompt_logprob_token_ids":
            assert getattr(sampling, name) == (None if (name, value) == ("thinking_token_budget", -1) else value)
    scored = {"prompt_logprobs", "prompt_logprob_token_ids"} & params.keys()
    assert sampling.skip_reading_prefix_cache == (True if scored else None)


def test_a_replay_ends_with_its_tokens() -> None:
    params = SamplingParams(trace_decode_token_ids=[5] * 50, max_tokens=None, min_tokens=3, stop_token_ids=[5])
    sampling = build(builder(enable_trace_replay=True), params=params).sampling_params
    assert sampling is not None
    assert (sampling.max_tokens, sampling.min_tokens, sampling.trace_decode_token_ids) == (29, 0, [5] * 29)
    assert (sampling.eos_token_id, sampling.all_stop_token_ids, sampling.stop_token_ids) == (None, set(), None)


def test_bad_words_and_choices_are_translated() -> None:
    made = builder(tokenizer=built_tokenizers.built("byte_level"))
    choice = StructuredOutputsParams(choice=["a", "b"])
    sampling = build(made, params=SamplingParams(bad_words=["fox"], structured_outputs=choice)).sampling_params
    assert sampling is not None and sampling.bad_words_token_ids and sampling.structured_outputs is not None
    constraint = sampling.structured_outputs
    assert (constraint.choice, constraint.grammar, constraint.backend) == (None, 'root ::= "a" | "b"', "xgrammar")


def test_the_backend_of_the_first_request_stays() -> None:
    made = builder()
    other = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "integer", "multipleOf": 3}))
    first = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    build(made, params=other)  # made, but never sent
    request = build(made, params=first)
    made.note_sent(request)
    with pytest.raises(RequestRejected, match="earlier request"):
        build(made, params=other)


# -------------------------------------------------------------------- embeddings


@pytest.mark.parametrize(
    "given", [EMBEDS, torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bfloat16), EMBEDS.astype("<f2")]
)
def test_embeddings_as_prompt(given: Any) -> None:
    made = builder(enable_prompt_embeds=True)
    request = build(made, given)
    assert request.prompt_token_ids is None and request.prompt_embeds is not None
    assert request.prompt_embeds.dtype in ("float32", "float16", "bfloat16")  # torch's names: vLLM dies of numpy's
    assert request.sampling_params is not None
    large = build(made, np.ones((20, 4), np.float32))
    assert len(NEWEST.encode_add(large)) == 3  # type, payload, and the tensor in a frame of its own
    assert NEWEST.decode_input(NEWEST.encode_add(large)).prompt_embeds == large.prompt_embeds  # type: ignore[union-attr]


def test_embeddings_are_a_copy() -> None:
    array = np.ones((3, 4), np.float32)
    request = build(builder(enable_prompt_embeds=True), array)
    array[:] = 7
    assert request.prompt_embeds is not None and set(request.prompt_embeds.values()) == {1.0}


def test_a_mixed_prompt() -> None:
    mixed = EmbedsPrompt(prompt_embeds=EMBEDS, prompt_token_ids=[5, 6, 7], prompt_is_token_ids=[True, False, True])
    request = build(builder(enable_prompt_embeds=True), mixed)
    assert (request.prompt_token_ids, request.prompt_is_token_ids) == ([5, 6, 7], [True, False, True])


NAN = np.full((3, 4), np.nan, np.float32)
BAD_EMBEDS: list[tuple[Any, dict[str, Any], str]] = [
    (EMBEDS, {}, "enable_prompt_embeds=True"),
    (np.ones((3, 5), np.float32), {"enable_prompt_embeds": True}, "num_prompt_tokens, 4"),
    (np.ones((3, 4), np.float64), {"enable_prompt_embeds": True}, "float64"),
    (np.ones((3, 4), np.int32), {"enable_prompt_embeds": True}, "int32"),
    (np.ones((1, 3, 4), np.float32), {"enable_prompt_embeds": True}, "shape"),
    (NAN, {"enable_prompt_embeds": True}, "NaN"),
    (NAN * 0 + np.inf, {"enable_prompt_embeds": True}, "NaN"),
    (np.ones((0, 4), np.float32), {"enable_prompt_embeds": True}, "empty"),
    (np.ones((32, 4), np.float32), {"enable_prompt_embeds": True}, "max_model_len"),
    (np.ones((3, 4), object), {"enable_prompt_embeds": True}, "cannot be read"),
    (EmbedsPrompt(prompt_embeds=[[1.0]]), {"enable_prompt_embeds": True}, "cannot be read"),
    (EmbedsPrompt(prompt_embeds=EMBEDS, prompt_token_ids=[1, 2, 3]), {"enable_prompt_embeds": True}, "give both"),
    (
        EmbedsPrompt(prompt_embeds=EMBEDS, prompt_token_ids=[1, 2, 3], prompt_is_token_ids=[True]),
        {"enable_prompt_embeds": True},
        "one bool for each token id",
    ),
]


@pytest.mark.parametrize(("prompt", "args", "hint"), BAD_EMBEDS)
def test_embeddings_that_are_refused(prompt: Any, args: dict[str, Any], hint: str) -> None:
    with pytest.raises(RequestRejected, match=hint) as caught:
        build(builder(**args), prompt)
    assert caught.value.parameter is not None and caught.value.parameter.startswith("prompt") and caught.value.remedy


# ------------------------------------------------------------------------ fields


def feature(tensor: Tensor | None = None, offset: int = 0, length: int = 1) -> MultiModalFeatureSpec:
    field = MultiModalField("batched", {"keep_on_cpu": False})
    data = {"pixel_values": MultiModalFieldElem([tensor or Tensor("float32", (1,), bytes(4))], field)}
    return MultiModalFeatureSpec(data, "image", "x", PlaceholderRange(offset, length))


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"priority": 1.5}, "priority"),
    ({"priority": 1 << 64}, "priority"),
    ({"priority": 1}, "priority"),  # the engine says first come, first served
    ({"lora_request": ("name", 1, "/path")}, "lora_request"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"trace_headers": {"a": 1}}, "trace_headers['a']"),
    ({"session_id": 3}, "session_id"),
    ({"mm_features": [feature()]}, "mm_features"),  # the model takes text alone
    ({"mm_features": "x"}, "mm_features"),
    ({"mm_features": [5]}, "mm_features"),
    ({"reasoning_ended": "yes"}, "reasoning_ended"),
    ({"kv_hints": {}}, "kv_hints"),
]


@pytest.mark.parametrize(("fields", "parameter"), BAD_FIELDS)
def test_refused_fields(fields: dict[str, Any], parameter: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        build(builder(scheduling_policy="fcfs"), **fields)
    assert (caught.value.parameter, caught.value.request_id) == (parameter, "label")


def test_features_pass_through_as_they_are(tmp_path: Path) -> None:
    config = {"vocab_size": 400, "vision_config": {}, "hidden_size": 4}
    model = ModelFacts.read(built_tokenizers.write_model(tmp_path / "model", config=config))
    made = builder(model=model)
    features = [feature(), feature(offset=2)]
    request = build(made, mm_features=features)
    assert request.mm_features is not None and all(a is b for a, b in zip(request.mm_features, features, strict=True))
    with pytest.raises(RequestRejected, match="not in the prompt"):
        build(made, mm_features=[feature(offset=2, length=2)])
    with pytest.raises(RequestRejected, match="torch_spelled"):  # numpy's name of a dtype deafens an engine
        build(made, mm_features=[feature(Tensor("<f4", (1,), bytes(4)))])


# ----------------------------------------------------------------------- pooling


@pytest.mark.parametrize(
    ("params", "filled"),
    [
        ({}, ("token_embed", True, True)),
        ({"task": "embed"}, ("embed", True, False)),
        ({"task": "classify", "use_activation": False}, ("classify", False, False)),
        ({"task": "embed", "skip_reading_prefix_cache": True}, ("embed", True, True)),
    ],
)
def test_pooling_parameters_are_filled(params: dict[str, Any], filled: tuple[Any, ...]) -> None:
    pooling = build(builder(tasks=POOL), params=PoolingParams(**params)).pooling_params
    assert pooling is not None
    assert (pooling.task, pooling.use_activation, pooling.skip_reading_prefix_cache) == filled


def test_the_poolers_own_defaults_come_first() -> None:
    made = builder(tasks=POOL, pooler_config={"use_activation": False, "dimensions": None})
    pooling = build(made, params=PoolingParams(task="embed")).pooling_params
    assert pooling is not None and pooling.use_activation is False


@pytest.mark.parametrize(
    ("sizes", "dimensions", "taken"),
    [((), 2, False), (None, 2, True), (None, 5, False), ((2, 3), 3, True), ((2, 3), 4, False)],
)
def test_dimensions(sizes: tuple[int, ...] | None, dimensions: int, taken: bool) -> None:
    model = ModelFacts(directory="model", vocab_size=400, hidden_size=4, embedding_sizes=sizes)
    made, params = builder(tasks=POOL, model=model), PoolingParams(task="embed", dimensions=dimensions)
    if taken:
        assert build(made, params=params).pooling_params.dimensions == dimensions  # type: ignore[union-attr]
    else:
        with pytest.raises(RequestRejected) as caught:
            build(made, params=params)
        assert caught.value.parameter == "dimensions"


def test_a_prompt_to_pool_may_fill_the_model() -> None:
    assert build(builder(tasks=POOL), (1,) * 32, PoolingParams()).prompt_token_ids == [1] * 32
    with pytest.raises(RequestRejected, match="33 tokens"):
        build(builder(tasks=POOL), (1,) * 33, PoolingParams())
    with pytest.raises(RequestRejected, match="does not generate"):
        build(builder(tasks=POOL))


def test_lora_is_never_loaded_in_every_step() -> None:
    request = build(builder(), lora_request=LoRARequest("a", 1, "/a", load_inplace=True))
    assert request.lora_request is not None and request.lora_request.load_inplace is False
