"""What a client can know to be wrong never reaches the engine; what only the engine knows fails one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tiny_models import VOCAB_SIZE, make_tiny_model

from anyengine import EngineClient, RequestFailed, RequestRejected, SamplingParams
from anyengine.params import StructuredOutputsParams
from anyengine.testing.scripted import RequestRule, Script, ScriptedTwin, expected_tokens

pytestmark = pytest.mark.anyio

MAX_MODEL_LEN = 64
HOSTILE: list[tuple[Any, Callable[[], SamplingParams]]] = [
    ([], lambda: SamplingParams()),
    ([VOCAB_SIZE], lambda: SamplingParams()),
    ([-1], lambda: SamplingParams()),
    ([1 << 40], lambda: SamplingParams()),
    ([1] * (MAX_MODEL_LEN + 1), lambda: SamplingParams()),
    ([1], lambda: SamplingParams(max_tokens=0)),
    ([1], lambda: SamplingParams(max_tokens=4, min_tokens=5)),
    ([1], lambda: SamplingParams(temperature=float("nan"))),
    ([1], lambda: SamplingParams(temperature=-1.0)),
    ([1], lambda: SamplingParams(top_p=0.0)),
    ([1], lambda: SamplingParams(top_k=-2)),
    ([1], lambda: SamplingParams(repetition_penalty=0.0)),
    ([1], lambda: SamplingParams(presence_penalty=float("inf"))),
    ([1], lambda: SamplingParams(logit_bias={VOCAB_SIZE: 1.0})),
    ([1], lambda: SamplingParams(logit_bias={-1: 1.0})),
    ([1], lambda: SamplingParams(allowed_token_ids=[])),
    ([1], lambda: SamplingParams(allowed_token_ids=[VOCAB_SIZE])),
    ([1], lambda: SamplingParams(stop_token_ids=[1 << 70])),
    ([1], lambda: SamplingParams(logprobs=1000)),
    ([1], lambda: SamplingParams(prompt_logprobs=-2)),
    ([1], lambda: SamplingParams(bad_words=[""])),
    ([1], lambda: SamplingParams(stop=[""])),
    ([1], lambda: SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"]))),
    ([1], lambda: SamplingParams(structured_outputs=StructuredOutputsParams(choice=[]))),
    ([1], lambda: SamplingParams(n=0)),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model("qwen2", tmp_path_factory.mktemp("tiny")))


@pytest.mark.case("K06")
async def test_hostile_requests_never_reach_the_engine(tiny_model: str) -> None:
    """Not one frame for any of them, and what is right is served as ever."""
    scripted = ScriptedTwin(
        Script(registration={"max_model_len": MAX_MODEL_LEN}, vocab_size=VOCAB_SIZE), model_dir=tiny_model
    )
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:
            for prompt, params in HOSTILE:
                with pytest.raises(RequestRejected) as caught:
                    async for _ in client.generate(prompt, params()):
                        pass
                assert isinstance(caught.value, ValueError)
            assert scripted.received("add") == scripted.received("abort") == []
            outputs = [out async for out in client.generate([1], SamplingParams(max_tokens=3, detokenize=False))]
            tokens = [token for out in outputs for token in out.token_ids]
            assert tokens == expected_tokens([1], 3, vocab_size=VOCAB_SIZE)


@pytest.mark.case("K06")
async def test_what_the_engine_rejects_fails_one_request() -> None:
    """One of eight streams; the others get exactly their tokens."""
    scripted = ScriptedTwin(Script(requests=(RequestRule(first_token=3, after_tokens=2, finish="error"),)))
    failed: list[RequestFailed] = []
    with anyio.fail_after(60):
        async with EngineClient(engine=scripted.engine) as client:

            async def consume(first: int) -> None:
                tokens: list[int] = []
                try:
                    async for out in client.generate([first], SamplingParams(max_tokens=5)):
                        tokens += out.token_ids
                except RequestFailed as exc:
                    failed.append(exc)
                assert tokens == expected_tokens([first], len(tokens))
                assert len(tokens) == (2 if first == 3 else 5)

            async with anyio.create_task_group() as consumers:
                for first in range(1, 9):
                    consumers.start_soon(consume, first)
            assert len(failed) == 1
            assert scripted.received("abort") == []  # the engine has ended it itself
