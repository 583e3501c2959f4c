"""Bad input is refused before anything is sent, with the parameter, its value and what to do; the client stays
usable."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from tiny_models import VOCAB_SIZE, make_tiny_model

from anyengine import EmbeddedEngine, EngineClient, EngineStartupError, RequestRejected, SamplingParams
from anyengine.testing.pytest_plugin import BACKENDS

pytestmark = pytest.mark.anyio

MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("tiny"), eos_token_id=2)


@pytest.fixture(scope="module")
async def client(tiny_model: Path) -> AsyncIterator[EngineClient]:
    engine = EmbeddedEngine(model=str(tiny_model), max_model_len=MAX_MODEL_LEN, num_threads=1)
    async with EngineClient(engine=engine) as client:
        yield client


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "empty"),
    ("", "tokenizer"),
    ([VOCAB_SIZE], "outside the vocabulary"),
    ([-1], "outside the vocabulary"),
    ([1, 2.0], "float"),
    ([True], "bool"),
    (["a"], "str"),
    (None, "neither text nor"),
    (b"abc", "neither text nor"),
    (list(range(MAX_MODEL_LEN)), "max_model_len"),
    ("text without a tokenizer", "tokenizer"),
]

BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"n": 0}, "n"),
    ({"n": 2, "temperature": 0.0}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop_regex": ["("]}, "stop_regex"),
    ({"seed": "x"}, "seed"),
]


async def test_refused_before_anything_is_sent(client: EngineClient) -> None:
    """One engine takes them all: none of them reaches it, and it serves a good request afterwards."""
    with anyio.fail_after(60):
        before = await client.core.utility("get_engine_statistics")
        for prompt, hint in BAD_PROMPTS:
            with pytest.raises(RequestRejected, match=hint) as caught:
                await client.submit(prompt)
            assert isinstance(caught.value, ValueError)
            assert caught.value.parameter in ("prompt", "model"), prompt
            assert caught.value.remedy, prompt
        for parameters, name in BAD_PARAMETERS:
            with pytest.raises(RequestRejected) as caught:
                await client.submit([1], SamplingParams(**parameters))
            error = caught.value
            assert (error.parameter, bool(error.remedy)) == (name, True), parameters
            assert repr(error.value) in str(error) or str(error.value) in str(error), error
        with pytest.raises(RequestRejected, match="outside the vocabulary") as caught:
            await client.submit([1], SamplingParams(stop_token_ids=[VOCAB_SIZE]))
        assert caught.value.parameter == "stop_token_ids"
        with pytest.raises(RequestRejected, match="cannot be reached"):
            await client.submit([1] * 60, SamplingParams(min_tokens=10, max_tokens=20))
        with pytest.raises(RequestRejected, match="no text to find it in"):
            await client.submit([1], SamplingParams(stop=["x"]))
        with pytest.raises(RequestRejected, match="request_id"):
            await client.submit([1], request_id=7)  # type: ignore[arg-type]

        after = await client.core.utility("get_engine_statistics")
        assert after["adds_received"] == before["adds_received"]
        assert after["malformed_messages"] == 0
        assert client.statistics()["requests_in_flight"] == 0
        out = [out async for out in client.generate([1, 3], SamplingParams(max_tokens=4, ignore_eos=True))]
        assert sum(len(o.token_ids) for o in out) == 4


async def test_unbounded_output_stops_at_the_models_length(client: EngineClient) -> None:
    with anyio.fail_after(60):
        params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
        outputs = [out async for out in client.generate([1] * 60, params)]
    assert (outputs[-1].finish_reason, outputs[-1].num_output_tokens) == ("length", MAX_MODEL_LEN - 60)


@pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"])  # it is the engine that looks
async def test_an_unknown_model_says_what_was_tried() -> None:
    with anyio.fail_after(60), pytest.raises(EngineStartupError) as caught:
        async with EngineClient("./no/such/model"):
            pytest.fail("it must not become ready")
    assert "./no/such/model" in str(caught.value)
    assert caught.value.stage == "resolving"
