"""Admission of whole requests on the wire level: what is refused, and what the refusal names; nothing is registered."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from protocol_pieces import Consumer, nothing, output, request

from anyengine._protocol import Connection, EngineLimits
from anyengine._protocol.aborts import _REMEMBERED
from anyengine._wire import (
    DIALECTS,
    NEWEST,
    EngineCoreRequest,
    MultiModalFeatureSpec,
    MultiModalField,
    MultiModalFieldElem,
    PlaceholderRange,
    Tensor,
    UtilityOutput,
    WireLateChunkingParams,
    WireLoRARequest,
    WirePoolingParams,
    WireRepetitionDetection,
    WireSamplingParams,
    WireStructuredOutputs,
)
from anyengine.exceptions import EncodeError, LocalProtocolError, RequestRejected

LIMITS = EngineLimits(
    max_model_len=32,
    vocab_size=100,
    hidden_size=4,
    tasks=frozenset(("generate", "embed")),
    lora=True,
    prompt_embeds=True,
)
ADAPTER = WireLoRARequest("l", 7, "/adapters/l")


def connected(limits: EngineLimits | None = LIMITS, **values: Any) -> Connection:
    return Connection({0: NEWEST}, call_id_prefix=1, limits=None if limits is None else {0: limits}, **values)


def sampling(**fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest("a", [1, 2, 3], sampling_params=WireSamplingParams(**{"max_tokens": 4, **fields}))


def structured(**fields: Any) -> EngineCoreRequest:
    return sampling(structured_outputs=WireStructuredOutputs(**{"backend": "xgrammar", **fields}))


def pooling(**fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest("a", [1, 2, 3], pooling_params=WirePoolingParams(**{"task": "embed", **fields}))


def embeds(shape: tuple[int, ...], dtype: str = "float32") -> EngineCoreRequest:
    size = 4 * math.prod(shape)
    it = request(prompt_embeds=Tensor(dtype, shape, bytes(size)))
    it.prompt_token_ids = None
    return it


def feature(
    data: Any = None, factory: str = "batched", options: Any = None, place: tuple[int, int] = (0, 2), mask: Any = None
) -> EngineCoreRequest:
    elem = MultiModalFieldElem(data, MultiModalField(factory, {"keep_on_cpu": False} if options is None else options))
    spec = MultiModalFeatureSpec({"pixels": elem}, "image", "id", PlaceholderRange(*place, mask))
    return request(mm_features=[spec])


def matrix(shape: tuple[int, int], fill: int = 1, dtype: str = "<i4") -> Tensor:
    return Tensor(dtype, shape, fill.to_bytes(4, "little", signed=True) * (shape[0] * shape[1]))


BAD: dict[str, tuple[Any, str, str]] = {
    # name: request, parameter, words of the message
    "no request": ({"request_id": "a"}, "request", "is a dict"),
    "id not a str": (request(7), "request_id", "use a str"),  # type: ignore[arg-type]
    "id empty": (request(""), "request_id", "not empty"),
    "no prompt": (EngineCoreRequest("a", None, sampling_params=WireSamplingParams()), "prompt_token_ids", "no prompt"),
    "empty prompt": (EngineCoreRequest("a", []), "prompt_token_ids", "the prompt is empty"),
    "long prompt": (EngineCoreRequest("a", [1] * 32), "prompt_token_ids", "at most 31 tokens"),
    "token outside": (EngineCoreRequest("a", [1, 100]), "prompt_token_ids", "0 to 99"),
    "token negative": (EngineCoreRequest("a", [1, -1]), "prompt_token_ids", "0 to 99"),
    "token a bool": (EngineCoreRequest("a", [1, True]), "prompt_token_ids[1]", "Expected `int`"),
    "neither": (EngineCoreRequest("a", [1]), "sampling_params", "neither"),
    "both": (request(pooling_params=WirePoolingParams(task="embed")), "sampling_params", "both"),
    "time": (request(arrival_time=float("inf")), "arrival_time", "time.time()"),
    "priority": (request(priority=2**63), "priority", "out of range"),
    "wave": (request(current_wave=-1), "current_wave", "out of range"),
    "rank": (request(data_parallel_rank=-1), "data_parallel_rank", "out of range"),
    "headers": (request(trace_headers={"a": 1}), "trace_headers[...]", "Expected `str`"),
    "header names": (request(trace_headers={1: "a"}), "trace_headers", "Expected `str`"),
    "no max_tokens": (sampling(max_tokens=None), "sampling_params.max_tokens", "at most 29"),
    "temperature": (sampling(temperature=-1.0), "sampling_params.temperature", "at least 0"),
    "temperature as text": (sampling(temperature="0"), "sampling_params.temperature", "Expected `float`"),
    "min above max": (sampling(min_tokens=5), "sampling_params.min_tokens", "max_tokens=4"),
    "copies of one": (sampling(n=2, temperature=0.0), "sampling_params.n", "n=1"),
    "output kind": (sampling(output_kind=3), "sampling_params.output_kind", "at most 2"),
    "stop id": (sampling(stop_token_ids=[100]), "sampling_params.stop_token_ids", "0 to 99"),
    "other stop ids": (sampling(all_stop_token_ids={100}), "sampling_params.all_stop_token_ids", "0 to 99"),
    "eos": (sampling(eos_token_id=100), "sampling_params.eos_token_id", "0 to 99"),
    "bias": (sampling(logit_bias={100: 1.0}), "sampling_params.logit_bias", "0 to 99"),
    "bias of no size": (sampling(logit_bias={1: float("nan")}), "sampling_params.logit_bias[1]", "not finite"),
    "nothing allowed": (sampling(allowed_token_ids=[]), "sampling_params.allowed_token_ids", "is empty"),
    "bad word": (sampling(bad_words_token_ids=[[1], [100]]), "sampling_params.bad_words_token_ids", "0 to 99"),
    "bad word of nothing": (sampling(bad_words_token_ids=[[]]), "sampling_params.bad_words_token_ids", "no tokens"),
    "alternatives": (sampling(logprobs=101), "sampling_params.logprobs", "use -1"),
    "chosen alternatives": (
        sampling(logprobs=1, logprob_token_ids=[1, 2]),
        "sampling_params.logprobs",
        "use logprobs=2",
    ),
    "too many chosen": (sampling(logprob_token_ids=[1] * 129), "sampling_params.logprob_token_ids", "at most 128"),
    "matrix rows": (sampling(prompt_logprob_token_ids=matrix((3, 1))), "sampling_params.prompt_logprob_token_ids", "2"),
    "matrix ids": (
        sampling(prompt_logprob_token_ids=matrix((2, 1), 100)),
        "sampling_params.prompt_logprob_token_ids",
        "0 to 99",
    ),
    "matrix dtype": (
        sampling(prompt_logprob_token_ids=matrix((2, 1), dtype="<f4")),
        "sampling_params.prompt_logprob_token_ids",
        "'<i4'",
    ),
    "repetition": (
        sampling(repetition_detection=WireRepetitionDetection(1, 2, 2)),
        "sampling_params.repetition_detection.min_pattern_size",
        "max_pattern_size=1",
    ),
    "no backend": (
        structured(regex="a", backend=None),
        "sampling_params.structured_outputs.backend",
        "xgrammar",
    ),
    "two kinds": (structured(regex="a", json_object=True), "sampling_params.structured_outputs", "exactly one"),
    "no kind": (structured(), "sampling_params.structured_outputs", "exactly one"),
    "no object": (structured(json_object=False), "sampling_params.structured_outputs.json_object", "use True"),
    "blank schema": (structured(json=" "), "sampling_params.structured_outputs.json", "blank"),
    "blank grammar": (structured(grammar="\n"), "sampling_params.structured_outputs.grammar", "blank"),
    "NUL": (structured(regex="a\0"), "sampling_params.structured_outputs.regex", "NUL"),
    "task": (pooling(task="classify"), "pooling_params.task", "it can do embed"),
    "no task": (pooling(task=None), "pooling_params.task", "it can do embed"),
    "deltas of a vector": (pooling(output_kind=1), "pooling_params.output_kind", "use 2"),
    "dimensions": (pooling(dimensions=0), "pooling_params.dimensions", "at least 1"),
    "late chunks": (
        pooling(late_chunking_params=WireLateChunkingParams(0)),
        "pooling_params.late_chunking_params.chunk_size",
        "at least 1",
    ),
    "an adapter not loaded": (request(lora_request=ADAPTER), "lora_request.lora_path", "call add_lora"),
    "an adapter without id": (request(lora_request=WireLoRARequest("l", 0, "/l")), "lora_request.lora_int_id", "1"),
    "an adapter without path": (request(lora_request=WireLoRARequest("l", 1)), "lora_request.lora_path", "not empty"),
    "an adapter to load": (
        request(lora_request=WireLoRARequest("l", 7, "/adapters/l", load_inplace=True)),
        "lora_request.load_inplace",
        "call add_lora",
    ),
    "embeds of one dimension": (embeds((8,)), "prompt_embeds.shape", "[num_prompt_tokens, 4]"),
    "embeds of another model": (embeds((2, 8)), "prompt_embeds.shape", "[num_prompt_tokens, 4]"),
    "embeds of ints": (embeds((2, 4), "int32"), "prompt_embeds.dtype", "float32"),
    "embeds in numpy's spelling": (embeds((2, 4), "<f4"), "prompt_embeds.dtype", "float32"),
    "embeds of nothing": (embeds((0, 4)), "prompt_embeds", "empty"),
    "embeds for other ids": (request(prompt_embeds=Tensor("float32", (2, 4), bytes(32))), "prompt_embeds.shape", "3"),
    "a mask alone": (request(prompt_is_token_ids=[True] * 3), "prompt_is_token_ids", "both"),
    "a feature outside": (feature(place=(2, 2)), "mm_features[0].mm_position", "3 tokens"),
    "a feature of nothing": (feature(place=(0, 0)), "mm_features[0].mm_position", "3 tokens"),
    "a feature's mask": (feature(mask=Tensor("bool", (1,), b"\1")), "mm_features[0].mm_position.is_embed", "(2,)"),
    "a feature's dtype": (
        feature(Tensor("<f4", (1,), bytes(4))),
        "mm_features[0].data['pixels'].data.dtype",
        "torch",
    ),
    "a feature's text": (feature(["x"]), "mm_features", "tensor"),
    "a feature's factory": (feature(factory="x"), "mm_features[0].data['pixels'].field.factory", "flat"),
    "a feature's options": (feature(factory="flat"), "mm_features[0].data['pixels'].field.options", "slices"),
    "a feature's slices": (
        feature(factory="flat", options={"slices": [["a"]]}),
        "mm_features[0].data['pixels'].field.options['slices'][0]",
        "[start, stop, step]",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.feature("R54")
def test_a_request_that_would_hurt_is_refused(name: str) -> None:
    bad, parameter, words = BAD[name]
    connection = connected()
    with pytest.raises((RequestRejected, EncodeError)) as caught:
        connection.add(bad, 0, Consumer())
    error = caught.value
    if isinstance(error, EncodeError):  # what tensors could not be at all
        assert (error.field or "").startswith(parameter)
    else:
        assert error.parameter is not None and error.parameter.startswith(parameter)
        assert words in str(error) or words in str(error.remedy)
        assert error.remedy
        assert len(str(error)) < 700
        if isinstance(bad, EngineCoreRequest) and isinstance(bad.request_id, str) and bad.request_id:
            assert error.request_id == bad.request_id
    assert len(connection.requests) == 0
    assert connection.add(request("a"), 0, Consumer())  # its id is free


GOOD: dict[str, Any] = {
    "plain": request(),
    "longest": EngineCoreRequest("a", [0, 99] + [1] * 29, sampling_params=WireSamplingParams(max_tokens=10**9)),
    "greedy": sampling(temperature=0.0, seed=-1),
    "all alternatives": sampling(logprobs=-1, prompt_logprobs=100),
    "tokens": sampling(stop_token_ids=[99], all_stop_token_ids={0}, logit_bias={99: -100.0}, allowed_token_ids=[0]),
    "matrix": sampling(prompt_logprob_token_ids=matrix((2, 3), -1)),
    "structured": structured(json={"type": "object"}),
    "extra": sampling(extra_args={"kv_transfer_params": {"x": [1, None]}, "t": Tensor("<f4", (1,), bytes(4))}),
    "pooling": pooling(use_activation=True, dimensions=2),
    "embeds": embeds((2, 4)),
    "feature": feature([Tensor("bfloat16", (2,), bytes(4)), 1.5], mask=Tensor("bool", (2,), b"\0\1")),
    "flat": feature(factory="flat", options={"slices": [[0, 2, None]], "dim": 0}),
    "cached": request(mm_features=[MultiModalFeatureSpec(None, "image", "id", PlaceholderRange(0, 3))]),
}


@pytest.mark.feature("R38")
def test_a_feature_without_data_is_for_an_engine_that_keeps_items() -> None:
    """Another one would end of it."""
    connection = connected(msgspec.structs.replace(LIMITS, mm_cache=False))
    with pytest.raises(RequestRejected, match="keeps multi-modal items") as caught:
        connection.add(GOOD["cached"], 0, Consumer())
    assert caught.value.parameter == "mm_features[0].data" and "mm_processor_cache_type" in str(caught.value.remedy)
    assert connection.add(GOOD["feature"], 0, Consumer())
    assert connected(msgspec.structs.replace(LIMITS, mm_cache=True)).add(GOOD["cached"], 0, Consumer())


@pytest.mark.parametrize("name", GOOD)
def test_a_good_request_is_taken(name: str) -> None:
    for limits in (LIMITS, None):
        frames = connected(limits).add(GOOD[name], 0, Consumer())
        assert list(frames) == NEWEST.encode_add(GOOD[name])


@pytest.mark.parametrize("dialect", DIALECTS, ids=repr)
def test_every_release_is_judged_by_what_it_reads(dialect: Any) -> None:
    connection = Connection({0: dialect}, call_id_prefix=1)
    good = feature(Tensor("float32", (2,), bytes(8)))
    good.sampling_params = WireSamplingParams(max_tokens=4, eos_token_id=2)
    connection.add(good, 0, Consumer())
    for bad, parameter in (
        (request("b", priority="x"), "priority"),
        (request("b", mm_features=[MultiModalFeatureSpec(None, "image", 5, PlaceholderRange(0, 1))]), "mm_features"),  # type: ignore[arg-type]
        (request("b", lora_request=WireLoRARequest("x", "y", "z")), "lora_request.lora_int_id"),  # type: ignore[arg-type]
        (pooling(dimensions="x"), "pooling_params.dimensions"),
        (sampling(top_k=1.5), "sampling_params.top_k"),
    ):
        bad.request_id = "b"
        with pytest.raises(RequestRejected) as caught:
            connection.add(bad, 0, Consumer())
        assert caught.value.parameter is not None and caught.value.parameter.startswith(parameter)
    assert list(connection.requests.live) == ["a"]


@pytest.mark.parametrize("dialect", [DIALECTS[0], NEWEST], ids=repr)
def test_what_cannot_be_compared_is_refused_wherever_it_stands(dialect: Any) -> None:
    """Arrays: even ``==`` raises on them."""
    connection = Connection({0: dialect}, call_id_prefix=1, limits={0: LIMITS})
    array = np.arange(4)
    spoilt = {name: request() for name in EngineCoreRequest.__struct_fields__}
    for name, it in spoilt.items():
        setattr(it, name, array)
    spoilt |= {f"sampling_params.{name}": sampling(**{name: array}) for name in WireSamplingParams.__struct_fields__}
    lost = []
    for path, it in spoilt.items():
        try:
            lost.append(connection.check(it, 0))
        except (RequestRejected, EncodeError, LocalProtocolError) as exc:
            words = str(exc)
            assert path.rpartition(".")[2] in words, words
    plain = dialect.encode_add(request()), dialect.encode_add(sampling())
    assert all(list(frames) in plain for frames in lost)
    assert not (lost and dialect is NEWEST)
    assert not connection.requests.live


def test_what_an_engine_was_not_started_with() -> None:
    connection = connected(EngineLimits(32, tasks=frozenset(("embed",)), lora=False, prompt_embeds=False))
    for bad, parameter in (
        (request(), "sampling_params"),
        (pooling(task="token_embed"), "pooling_params.task"),
        (embeds((2, 4)), "prompt_embeds"),
    ):
        with pytest.raises(RequestRejected) as caught:
            connection.add(bad, 0, Consumer())
        assert caught.value.parameter == parameter
    with pytest.raises(RequestRejected, match="started without LoRA"):
        bad = pooling()
        bad.lora_request = ADAPTER
        connection.add(bad, 0, Consumer())


# ------------------------------------------------------------------------------------------------------------ adapters


def reply(connection: Connection, method: str, args: list[Any], failure: str | None = None) -> None:
    call, _ = connection.utility(method, args, 0, nothing)
    connection.utilities.resolve(0, UtilityOutput(call.call_id, failure, True))


def test_an_adapter_may_be_named_while_the_engine_has_it() -> None:
    connection = connected()
    wanting = [request(f"r{i}", lora_request=ADAPTER) for i in range(5)]

    def refused(it: EngineCoreRequest) -> bool:
        try:
            connection.add(it, 0, Consumer())
        except RequestRejected:
            return True
        return False

    call, _ = connection.utility("add_lora", [ADAPTER], 0, nothing)
    assert refused(wanting[0])  # asked for, not confirmed
    connection.utilities.resolve(0, UtilityOutput(call.call_id, "no such file", None))
    assert refused(wanting[0])
    reply(connection, "add_lora", [ADAPTER])
    assert not refused(wanting[0])
    assert refused(request("other", lora_request=WireLoRARequest("l", 7, "/adapters/other")))
    reply(connection, "remove_lora", [8])
    assert not refused(wanting[1])
    connection.utility("remove_lora", [7], 0, nothing)
    assert refused(wanting[2])  # asked for is enough
    loading, _ = connection.utility("add_lora", [ADAPTER], 0, nothing)
    removing, _ = connection.utility("remove_lora", [7], 0, nothing)
    for call in (loading, removing):  # the engine takes them in this order
        connection.utilities.resolve(0, UtilityOutput(call.call_id, None, True))
    assert refused(wanting[3])


# ----------------------------------------------------------------------------------------------------------------- ids


@pytest.mark.feature("R54")
def test_an_id_that_was_aborted_is_not_used_again() -> None:
    """vLLM holds an abort for an idle engine's next step, which would end the new request without a word."""
    connection = connected()
    connection.add(request(), 0, Consumer())
    connection.abort("a")
    with pytest.raises(LocalProtocolError, match=r"'a' was aborted.*another id"):
        connection.add(request(), 0, Consumer())
    connection.add(request("b"), 0, Consumer())
    connection.requests.dispatch([output("b", 1, finish_reason=0)])
    connection.add(request("b"), 0, Consumer())  # an id that finished is free


def test_the_memory_of_aborted_ids_is_bounded() -> None:
    registry = connected().requests
    registry.open("first", 0, Consumer())
    registry.close("first", aborted=True)
    for i in range(_REMEMBERED - 1):
        registry.open(f"r{i}", 0, Consumer())
        registry.close(f"r{i}", aborted=True)
    with pytest.raises(LocalProtocolError):
        registry.open("first", 0, Consumer())
    for i in range(10 * _REMEMBERED):
        registry.open(f"s{i}", 0, Consumer())
        registry.close(f"s{i}", aborted=True)
        assert len(registry.aborts) <= 2 * _REMEMBERED
    registry.open("first", 0, Consumer())


@pytest.mark.parametrize("bad", [5, None, [5], ["a", None], {"a": 1}.values()], ids=repr)
def test_an_abort_names_requests_by_str(bad: Any) -> None:
    connection = connected()
    connection.add(request(), 0, Consumer())
    with pytest.raises(RequestRejected) as caught:
        connection.abort(bad)
    assert (caught.value.parameter, bool(caught.value.remedy)) == ("request_ids", True)
    assert list(connection.requests.live) == ["a"]
    [(_, frames)] = connection.abort("a")  # one str is one id
    assert NEWEST.decode_input(frames).request_ids == ["a"]  # type: ignore[union-attr]


@pytest.mark.parametrize("bad", [5, {"a": 1}, [5], [MultiModalFeatureSpec(5, "image", "id", PlaceholderRange(0, 1))]])  # type: ignore[arg-type]
def test_features_of_wrong_types_for_releases_that_want_them_listed(bad: Any) -> None:
    connection = Connection({0: DIALECTS[0]}, call_id_prefix=1)
    with pytest.raises(EncodeError) as caught:
        connection.add(request(mm_features=bad), 0, Consumer())
    assert (caught.value.field or "").startswith("mm_features")
    assert len(connection.requests) == 0
