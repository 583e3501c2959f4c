"""Which requests can go on in another engine, and how; with an engine of one line as the judge."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._protocol import continued, why_not_replayed
from anyengine._wire import (
    EngineCoreRequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Tensor,
    WireLoRARequest,
    WireSamplingParams,
    WireStructuredOutputs,
)

VOCABULARY = 5
EOS = 0


def request(**sampling: Any) -> EngineCoreRequest:
    return EngineCoreRequest("r", [1, 2], sampling_params=WireSamplingParams(**{"temperature": 0.0, **sampling}))


def one_more(tokens: list[int], num_generated: int, sampling: WireSamplingParams) -> int | None:
    """The next token of a greedy model: a function of all tokens so far, which may not be the end too early."""
    if num_generated == sampling.max_tokens:
        return None
    token = hash((len(tokens), *tokens[-3:])) % VOCABULARY
    return token if token != EOS or num_generated >= sampling.min_tokens else 1


def run(job: EngineCoreRequest, steps: int) -> tuple[list[int], bool]:
    """What an engine makes of ``job`` in so many steps, and whether it has ended."""
    assert job.prompt_token_ids is not None and job.sampling_params is not None
    out: list[int] = []
    while len(out) < steps:
        token = one_more([*job.prompt_token_ids, *out], len(out), job.sampling_params)
        if token is None:
            return out, True
        out.append(token)
        if token == EOS:
            return out, True
    return out, False


@pytest.mark.feature("L31")
@given(
    prompt=st.lists(st.integers(0, VOCABULARY), min_size=1, max_size=4),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 12),
    deaths=st.lists(st.integers(0, 4), max_size=5),
)
def test_a_request_that_goes_on_ends_as_if_nothing_had_happened(
    prompt: list[int], max_tokens: int, min_tokens: int, deaths: list[int]
) -> None:
    sampling = WireSamplingParams(temperature=0.0, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    job = EngineCoreRequest("r", prompt, sampling_params=sampling)
    received: list[int] = []
    for number, steps in enumerate([*deaths, 1000]):
        tokens, ended = run(continued(job, received, f"r.{number}"), steps)
        received += tokens
        if ended:
            break
        assert why_not_replayed(job, len(received)) is None
        if len(received) == max_tokens:
            break
    assert received == run(job, 1000)[0]
    assert job == EngineCoreRequest("r", prompt, sampling_params=sampling)  # which is kept as it was


@pytest.mark.parametrize(
    ("reason", "sampling"),
    [
        ("seed", {"seed": 1, "temperature": 0.5}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("frequency_penalty", {"frequency_penalty": -0.5}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("bad_words_token_ids", {"bad_words_token_ids": [[1, 2]]}),
        ("structured_outputs", {"structured_outputs": WireStructuredOutputs(json_object=True)}),
        ("extra_args", {"extra_args": {"kv_transfer_params": {}}}),
        ("thinking_token_budget", {"thinking_token_budget": 5}),
        ("trace_decode_token_ids", {"trace_decode_token_ids": [1, 2]}),
    ],
)
def test_what_depends_on_where_the_prompt_ends(reason: str, sampling: dict[str, Any]) -> None:
    job = request(**sampling)
    assert why_not_replayed(job, 0) is None
    assert reason in (why_not_replayed(job, 1) or "")


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.1},
        {"repetition_penalty": 1.2, "logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2], "logprobs": 3},
        {"stop_token_ids": [3], "all_stop_token_ids": {3}, "eos_token_id": 3, "min_tokens": 2, "ignore_eos": True},
    ],
)
def test_what_does_not(sampling: dict[str, Any]) -> None:
    assert why_not_replayed(request(**sampling), 5) is None


def test_other_parts_of_a_request() -> None:
    job = request()
    job.lora_request = WireLoRARequest("a", 1, "/a")
    job.cache_salt, job.priority, job.trace_headers, job.external_req_id = "salt", 3, {"a": "b"}, "mine"
    assert why_not_replayed(job, 5) is None
    job.session_id = "s"
    assert "session_id" in (why_not_replayed(job, 5) or "")
    embeds = request()
    embeds.prompt_token_ids, embeds.prompt_embeds = None, Tensor("<f4", (1, 1), b"\0\0\0\0")
    assert why_not_replayed(embeds, 0) is None
    assert "tokens alone" in (why_not_replayed(embeds, 1) or "")
    cached = request()
    cached.mm_features = [MultiModalFeatureSpec(None, "image", "x", PlaceholderRange(0, 1))]
    assert "cache" in (why_not_replayed(cached, 0) or "")
