"""A real vLLM engine core behind our socket: right answers, alone and in company, and every way out of a request."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from reference_generation import Reference, assert_agrees, reference_of
from tiny_models import VOCAB_SIZE
from vllm_engines import (
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    VLLM_ENV,
    make_vllm_model,
    one_process,
    tiny_vllm,
    vllm_args,
)

from anyengine import EngineClient, OutputKind, RequestFailed, SamplingParams, Status, UtilityError

pytestmark = pytest.mark.anyio

MAX_TOKENS = 16
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
LONG = SamplingParams(max_tokens=8000, temperature=0.0, ignore_eos=True)

rng = random.Random(3)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 40))] for _ in range(32)]

SCORED = PROMPTS[:6]
SCORES: dict[str, Any] = {"logprobs": 4, "prompt_logprobs": 3}

stages: list[Status] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    reference_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    with torch.no_grad():
        return [reference_of(reference_model, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def theirs(vllm_python: str, model: Path) -> list[dict[str, Any]]:
    """AsyncLLM's answers: greedy for every prompt, one after the other; then with log-probabilities for some."""
    greedy = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}  # transformers invents one for qwen2
    requests = [{"prompt": prompt, "params": greedy} for prompt in PROMPTS]
    requests += [{"prompt": prompt, "params": greedy | SCORES} for prompt in SCORED]
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("async_llm_reference.py"))],
        input=json.dumps({"args": vllm_args(model), "requests": requests}) + "\n",
        env=os.environ | VLLM_ENV | one_process,
        stdout=subprocess.PIPE,
        text=True,
        timeout=250,
        check=True,
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
async def client(vllm_python: str, model: Path) -> AsyncIterator[EngineClient]:
    stages.clear()
    engine = tiny_vllm(vllm_python, model, env=one_process)
    async with EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30, on_progress=stages.append) as it:
        yield it


async def holds_no_request(client: EngineClient) -> bool:
    """vLLM clears its prefix cache only while no request has a block of it."""
    return bool(await client.core.utility("reset_prefix_cache"))


async def generate(client: EngineClient, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return [token async for out in client.generate(prompt, params) for token in out.token_ids]


async def test_it_tells_how_it_starts_and_what_it_is(client: EngineClient, model: Path) -> None:
    assert list(dict.fromkeys(status.stage for status in stages)) == ["spawned", "importing", "configuring", "loading"]
    assert client.core.model_dir == str(model)
    registration = client.core.registrations[0]
    assert registration is not None
    assert registration.vllm_version == "0.32.0"
    assert registration.max_model_len == MAX_MODEL_LEN
    assert registration.max_num_seqs == MAX_NUM_SEQS  # an argument


@pytest.mark.feature("D01")
async def test_greedy_ids_equal_transformers(client: EngineClient, references: list[Reference]) -> None:
    together: list[list[int]] = [[] for _ in PROMPTS]

    async def consume(i: int) -> None:
        together[i] = await generate(client, PROMPTS[i])

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(consume, i)
        alone = [await generate(client, prompt) for prompt in PROMPTS[:20]]
    for answers, name in ((alone, "alone"), (together, "together")):
        for i, answer in enumerate(answers):
            assert_agrees(f"{name} prompt {i}", answer, references[i])


@pytest.mark.feature("D01", "P07")
async def test_greedy_ids_equal_async_llm(client: EngineClient, theirs: list[dict[str, Any]]) -> None:
    together: list[list[int]] = [[] for _ in PROMPTS]

    async def consume(i: int) -> None:
        together[i] = await generate(client, PROMPTS[i], params)

    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with anyio.fail_after(120):
        alone = [await generate(client, prompt, params) for prompt in PROMPTS[:20]]
        async with anyio.create_task_group() as tasks:
            for i in range(len(PROMPTS)):
                tasks.start_soon(consume, i)
    expected = [answer["token_ids"] for answer in theirs[: len(PROMPTS)]]
    assert alone == expected[:20]
    assert together == expected


@pytest.mark.feature("P07")
async def test_log_probs_equal_async_llm(client: EngineClient, theirs: list[dict[str, Any]]) -> None:
    params = SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY, **SCORES
    )
    with anyio.fail_after(120):
        for prompt, expected in zip(SCORED, theirs[len(PROMPTS) :], strict=True):
            (out,) = [out async for out in client.generate(prompt, params)]
            assert out.token_ids == expected["token_ids"]
            for name in ("logprobs", "prompt_logprobs"):
                ours = getattr(out, name)
                assert len(ours) == len(expected[name])
                for mine, other in zip(ours, expected[name], strict=True):
                    assert (mine is None) is (other is None)
                    if mine is None:
                        continue
                    assert [(str(token), one.rank) for token, one in mine.items()] == [
                        (token, rank) for token, (_, rank) in other.items()
                    ]
                    assert [one.logprob for one in mine.values()] == pytest.approx(
                        [logprob for logprob, _ in other.values()], abs=1e-4
                    )


async def test_text_in_text_out(client: EngineClient) -> None:
    prompt = "Grüße, world"
    with anyio.fail_after(60):
        text = "".join([out.text async for out in client.generate(prompt, GREEDY)])
        ids = client.tokenizer.encode(prompt)
        assert len(ids) == len(prompt.encode())
        tokens = await generate(client, ids)
    assert text
    assert client.tokenizer.decode(tokens).startswith(text)


async def test_an_aborted_request_is_gone_from_the_engine(client: EngineClient) -> None:
    with anyio.fail_after(60):
        async with client.generate(PROMPTS[0], LONG, request_id="long") as stream:
            await anext(stream)
            assert not await holds_no_request(client)
            assert len(await client.abort("long")) == 1
            assert [out.finish_reason async for out in stream][-1] == "abort"
        assert await holds_no_request(client)
        assert client.statistics()["requests_in_flight"] == 0


async def test_an_abort_storm_leaves_nothing(client: EngineClient) -> None:
    async def leave_early(prompt: list[int], after: int) -> None:
        async with client.generate(prompt, LONG) as stream:
            for _ in range(after):
                await anext(stream)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for i, prompt in enumerate(PROMPTS):
                tasks.start_soon(leave_early, prompt, i % 4)
        await client.core.utility("is_sleeping")  # a fence behind the aborts
        assert await holds_no_request(client)
    assert client.statistics()["requests_in_flight"] == 0


async def test_utility_calls(client: EngineClient) -> None:
    call = client.core.utility
    with anyio.fail_after(60):
        assert await call("get_supported_tasks") == ["generate"]
        assert await call("reset_prefix_cache") is True
        assert await call("is_sleeping") is False
        with pytest.raises(UtilityError, match="LoRA is not enabled"):  # vLLM's own words
            await call("list_loras")
        with pytest.raises(UtilityError, match="no_such_method"):
            await call("no_such_method")
        with pytest.raises(UtilityError):
            await call("pause_scheduler", "no such mode", True)


async def test_pause_and_resume(client: EngineClient, references: list[Reference]) -> None:
    """A request that is sent to a paused engine waits, and is answered as ever when it resumes."""
    tokens: list[int] = []

    async def consume() -> None:
        tokens.extend(await generate(client, PROMPTS[0]))

    with anyio.fail_after(60):
        await client.core.utility("pause_scheduler", "keep", False)
        assert await client.core.utility("is_sleeping") is True  # vLLM counts paused as sleeping
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consume)
            while client.statistics()["requests_in_flight"] == 0:
                await anyio.lowlevel.checkpoint()
            await client.core.utility("is_sleeping")  # the engine has the request, and has had time for a step
            assert tokens == []
            await client.core.utility("resume_scheduler")
    assert_agrees("after a pause", tokens, references[0])


async def test_pause_aborts_what_runs(client: EngineClient) -> None:
    with anyio.fail_after(60):
        async with client.generate(PROMPTS[0], LONG) as stream:
            await anext(stream)
            await client.core.utility("pause_scheduler", "abort", True)
            # Nobody asked for it through this stream: an error with the tokens so far.
            with pytest.raises(RequestFailed) as caught:
                async for _ in stream:
                    pass
            assert caught.value.partial.token_ids
        await client.core.utility("resume_scheduler")
        assert await holds_no_request(client)
