"""What users may ask: every rule, with parameter, value and remedy; what is normalised; what is copied."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from anyengine import compat
from anyengine.exceptions import EngineError, RequestRejected
from anyengine.params import (
    LateChunkingParams,
    LateInteractionParams,
    LoRARequest,
    OutputKind,
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)

NAN, INF = math.nan, math.inf

BAD_SAMPLING: list[tuple[str, list[Any], str]] = [
    # parameter, values that are refused, part of the remedy
    ("n", [0, -1, 16385, True, 1.0, "2", None], "at least 1 and at most 16384"),
    ("presence_penalty", [-2.1, 2.1, NAN, INF, "0", None, True], "at least -2 and at most 2"),
    ("frequency_penalty", [-2.1, 2.1, NAN, -INF, [0]], "at least -2 and at most 2"),
    ("repetition_penalty", [0, -1.0, NAN, INF, False], "above 0"),
    ("temperature", [-0.1, 2.1, NAN, INF, "hot", None, True, 10**400], "at least 0 and at most 2"),
    ("top_p", [0, -0.1, 1.1, NAN, True, "0.5"], "above 0 and at most 1"),
    ("top_k", [-2, 1.5, True, "5", None], "at least -1"),
    ("min_p", [-0.1, 1.1, NAN, None], "at least 0 and at most 1"),
    ("seed", [1.5, "7", True, 2**63, -(2**63) - 1], "int"),
    ("stop", ["", ["a", ""], [1], 5, b"a", {"a": 1}], "none of them empty"),
    ("stop_regex", ["", ["a", ""], [1], 5, b"a"], "none of them empty"),
    ("stop_regex", ["(a", "a**", "(?L)a", r"\p{L}", "a{99999999999}"], "re.compile()"),
    ("stop_regex", ["a*", "(a|)", r"\b", "^", "(?<=a)", "(a?)" + r"\1"], "needs a character"),
    ("stop_regex", ["END$", r"END\Z", "(?:a|b$)", "(?m)a$"], r"such as \n"),
    ("stop_regex", ["a(?=b)", "(?:x|a(?!b))", "(?=a)a"], "a part of the match"),
    ("stop_regex", [r"END\b", r"a\Bb", r"(?:\bEND){2}", r"(?:a|\bb)?\bc"], "at the beginning only"),
    ("stop_token_ids", [[-1], [1.0], [True], ["a"], "12", 7, [2**64]], "ints of at least 0"),
    ("bad_words", ["", ["a", ""], [None], 5], "none of them empty"),
    ("bad_words", [["a"] * 129], "at most 128"),
    ("ignore_eos", [1, 0, None, "yes"], "True or False"),
    ("max_tokens", [0, -1, 1.0, True, "16", INF], "at least 1"),
    ("min_tokens", [-1, 1.5, None, True], "at least 0"),
    ("logprobs", [-2, 1.0, True, "5"], "at least -1"),
    ("prompt_logprobs", [-2, 1.0, True], "at least -1"),
    ("logprob_token_ids", [[-1], 5, ["a"]], "ints of at least 0"),
    ("prompt_logprob_start", [-1, 1.0, True], "at least 0"),
    ("prompt_logprob_token_ids", [[[1], [1, 2]], 5], "equally long sequences"),
    ("flat_logprobs", [1], "True or False"),
    ("detokenize", [0], "True or False"),
    ("skip_special_tokens", ["no"], "True or False"),
    ("spaces_between_special_tokens", [None], "True or False"),
    ("include_stop_str_in_output", [1], "True or False"),
    ("output_kind", [1, "delta", None], "OutputKind.DELTA"),
    ("stream_interval", [0, -1, 1.0, True], "at least 1"),
    ("structured_outputs", [{"json": "{}"}, "{}"], "StructuredOutputsParams(...)"),
    ("logit_bias", [[1, 2], "x"], "dict"),
    ("allowed_token_ids", [[], [-1], 5], "at least one"),
    ("extra_args", [[1], "x"], "dict"),
    ("skip_reading_prefix_cache", [1, "no"], "None"),
    ("thinking_token_budget", [-2, 1.0, True], "at least -1"),
    ("repetition_detection", [{"min_count": 2}], "RepetitionDetectionParams(...)"),
    ("routed_experts_prompt_start", [-1, None], "at least 0"),
    ("trace_decode_token_ids", [[-1], 5], "ints of at least 0"),
    ("watermarking", [1], "None"),
]


def refused(make: Any, parameter: str, value: Any, remedy: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        make()
    error = caught.value
    assert isinstance(error, ValueError)
    assert isinstance(error, EngineError)
    assert error.parameter == parameter
    assert error.value is value or error.value == value
    assert error.remedy is not None
    assert remedy in error.remedy
    assert parameter in str(error)
    assert error.remedy in str(error)


@pytest.mark.parametrize(
    ("parameter", "value", "remedy"),
    [
        pytest.param(parameter, value, remedy, id=f"{parameter}-{index}")
        for parameter, values, remedy in BAD_SAMPLING
        for index, value in enumerate(values)
    ],
)
def test_a_bad_sampling_parameter_is_refused(parameter: str, value: Any, remedy: str) -> None:
    refused(lambda: SamplingParams(**{parameter: value}), parameter, value, remedy)


def test_every_sampling_parameter_has_a_bad_value_in_the_table() -> None:
    assert {parameter for parameter, _, _ in BAD_SAMPLING} == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("values", "parameter", "value", "remedy"),
    [
        ({"min_tokens": 17}, "min_tokens", 17, "max_tokens=16"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", 3, "max_tokens=2"),
        ({"n": 2, "temperature": 0}, "n", 2, "n=1 or a temperature above 0"),
        ({"stop": "a", "detokenize": False}, "stop", ("a",), "detokenize=True"),
        ({"stop_regex": "a", "detokenize": False}, "stop_regex", ("a",), "detokenize=True"),
        ({"stop_regex": ["a", "b("]}, "stop_regex", "b(", "re.compile()"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias key", "5", "int"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias key", -1, "at least 0"),
        ({"logit_bias": {5: "much"}}, "logit_bias[5]", "much", "finite number"),
        ({"logit_bias": {5: INF}}, "logit_bias[5]", INF, "finite number"),
        ({"prompt_logprob_token_ids": [[1], [-2]]}, "prompt_logprob_token_ids[1]", [-2], "at least -1"),
        ({"prompt_logprob_token_ids": [[2**31]]}, "prompt_logprob_token_ids[0]", [2**31], "at most 2147483647"),
        ({"prompt_logprob_token_ids": [1]}, "prompt_logprob_token_ids[0]", 1, "sequence of ints"),
        ({"extra_args": {1: 2}}, "extra_args key", 1, "str keys"),
        ({"extra_args": {"a": [{"b": 2**64}]}}, "extra_args['a'][0]['b']", 2**64, "64 bits"),
    ],
)
def test_a_contradiction_is_refused(values: dict[str, Any], parameter: str, value: Any, remedy: str) -> None:
    refused(lambda: SamplingParams(**values), parameter, value, remedy)


@pytest.mark.parametrize(
    ("kind", "values", "parameter", "remedy"),
    [
        (StructuredOutputsParams, {}, "structured_outputs", "exactly one of json, regex"),
        (StructuredOutputsParams, {"regex": "a", "json": "{}"}, "structured_outputs", "exactly one of json, regex"),
        (StructuredOutputsParams, {"regex": ""}, "regex", "not empty"),
        (StructuredOutputsParams, {"json": 5}, "json", "dict"),
        (StructuredOutputsParams, {"json_object": False}, "json_object", "True"),
        (StructuredOutputsParams, {"choice": []}, "choice", "at least one"),
        (StructuredOutputsParams, {"choice": "yes"}, "choice", "at least one"),
        (StructuredOutputsParams, {"choice": [1]}, "choice", "str"),
        (StructuredOutputsParams, {"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace", "True"),
        (RepetitionDetectionParams, {"max_pattern_size": -1}, "max_pattern_size", "at least 0"),
        (RepetitionDetectionParams, {"min_pattern_size": 3, "max_pattern_size": 2}, "min_pattern_size", "at most"),
        (RepetitionDetectionParams, {"max_pattern_size": 2, "min_count": 1}, "min_count", "at least 2"),
        (PoolingParams, {"task": ""}, "task", "not empty"),
        (PoolingParams, {"dimensions": 0}, "dimensions", "at least 1"),
        (PoolingParams, {"use_activation": 1}, "use_activation", "None"),
        (PoolingParams, {"returned_token_ids": [-1]}, "returned_token_ids", "at least 0"),
        (PoolingParams, {"late_interaction_params": {}}, "late_interaction_params", "LateInteractionParams(...)"),
        (LateInteractionParams, {"mode": "", "query_key": "k"}, "mode", "not empty"),
        (LateInteractionParams, {"mode": "m", "query_key": "k", "query_uses": 0}, "query_uses", "at least 1"),
        (LateChunkingParams, {"chunk_size": 0}, "chunk_size", "at least 1"),
        (LoRARequest, {"lora_name": "", "lora_int_id": 1, "lora_path": "p"}, "lora_name", "not empty"),
        (LoRARequest, {"lora_name": "a", "lora_int_id": 0, "lora_path": "p"}, "lora_int_id", "at least 1"),
        (LoRARequest, {"lora_name": "a", "lora_int_id": 1, "lora_path": ""}, "lora_path", "not empty"),
        (
            LoRARequest,
            {"lora_name": "a", "lora_int_id": 1, "lora_path": "p", "load_inplace": 1},
            "load_inplace",
            "True",
        ),
    ],
)
def test_other_records_refuse_bad_values(kind: Any, values: dict[str, Any], parameter: str, remedy: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        kind(**values)
    assert caught.value.parameter == parameter
    assert caught.value.remedy is not None
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"top_p": 1e-9}, {"min_p": 1}, {"top_k": -1},
        {"n": 16384}, {"logprobs": -1}, {"logprobs": 0}, {"max_tokens": None, "min_tokens": 99}, {"min_tokens": 16},
        {"seed": 2**63 - 1}, {"seed": -(2**63)},
        {"stop": ["a", "b"]}, {"n": 2, "temperature": 0.01}, {"thinking_token_budget": -1},
        {"stop_token_ids": range(3)}, {"logit_bias": {5: -100}}, {"logit_bias": {}}, {"bad_words": ["x"] * 128},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=2, min_count=2)},
        {"structured_outputs": StructuredOutputsParams(json={"type": "object"})},
    ],
)  # fmt: skip
def test_the_limits_themselves_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_defaults_are_those_of_vllm_but_for_the_output_kind() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.n) == (1.0, 1.0, 0, 16, 1)
    assert params.output_kind is OutputKind.DELTA
    assert [kind.value for kind in OutputKind] == [0, 1, 2]


def test_normalisation() -> None:
    assert SamplingParams(temperature=0.001).temperature == 0.01
    assert SamplingParams(temperature=1e-9).temperature == 0.01
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.001).greedy
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop_regex="a+").stop_regex == ("a+",)
    assert SamplingParams(stop_regex=None).stop_regex == ()  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]  # as requests of OpenAI's API have it
    assert isinstance(SamplingParams(temperature=1).temperature, float)
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        max_tokens=np.int64(5),  # type: ignore[arg-type]
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
    )
    assert (params.temperature, params.max_tokens, params.stop_token_ids) == (0.5, 5, (3, 4))
    assert {type(value) for value in (params.max_tokens, *params.stop_token_ids)} == {int}


@pytest.mark.case("K53")
def test_later_changes_by_the_caller_have_no_effect() -> None:
    stop, ids, bias, extra = ["a"], [1], {1: 1.0}, {"k": {"deep": [1]}}
    schema: dict[str, Any] = {"properties": {"a": {}}}
    params = SamplingParams(
        stop=stop,
        stop_token_ids=ids,
        logit_bias=bias,
        extra_args=extra,
        structured_outputs=StructuredOutputsParams(json=schema),
    )
    given = (stop, ids, bias, extra, schema)
    untouched: Any = (["a"], [1], {1: 1.0}, {"k": {"deep": [1]}}, {"properties": {"a": {}}})
    assert given == untouched
    stop.append("b")
    ids.append(2)
    bias[2] = 2.0
    extra["k"]["deep"].append(2)
    schema["properties"].clear()
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})
    assert params.extra_args == {"k": {"deep": [1]}}
    assert params.structured_outputs is not None
    assert params.structured_outputs.json == {"properties": {"a": {}}}


@pytest.mark.feature("R35")
def test_a_bad_pattern_is_refused_with_the_position() -> None:
    with pytest.raises(RequestRejected, match=r"missing \), unterminated subpattern at position 3"):
        SamplingParams(stop_regex="abc(d")


@pytest.mark.feature("R35")
@pytest.mark.parametrize("kind", [SamplingParams, compat.SamplingParams])
@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("best_of", 3, "use n and take"),
        ("top_p_decay", 0.9, "min_p"),
        ("no_repeat_ngram_size", 2, "repetition_detection"),
        ("early_stopping", True, "BeamSearchParams"),
    ],
)
def test_parameters_of_other_engines_are_never_ignored(kind: Any, name: str, value: Any, remedy: str) -> None:
    refused(lambda: kind(**{name: value}), name, value, remedy)
    refused(lambda: kind.from_optional(**{name: value}), name, value, remedy)
    with pytest.raises(TypeError, match="nobodys"):
        kind(nobodys=1)


def test_records_are_frozen_comparable_and_replaceable() -> None:
    params = SamplingParams(stop=["a"], max_tokens=5)
    with pytest.raises(AttributeError):
        params.max_tokens = 6  # type: ignore[misc]
    assert params == SamplingParams(stop=("a",), max_tokens=5)
    assert msgspec.structs.replace(params, max_tokens=6).max_tokens == 6
    with pytest.raises(RequestRejected):
        msgspec.structs.replace(params, max_tokens=0)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_a_refusal_survives_pickling() -> None:
    with pytest.raises(RequestRejected) as caught:
        SamplingParams(top_p=0)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (twin.parameter, twin.value, twin.remedy) == ("top_p", 0, caught.value.remedy)


def test_a_huge_bad_value_does_not_flood_the_message() -> None:
    with pytest.raises(RequestRejected) as caught:
        SamplingParams(stop_token_ids=["x"] * 100_000)  # type: ignore[list-item]
    assert len(str(caught.value)) < 400
