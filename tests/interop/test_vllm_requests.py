"""Everything a request can carry, on a real vLLM engine core: log-probabilities, constraints, adapters, embeddings."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import transformers
from reference_generation import assert_agrees, reference_of
from request_models import EOS, adapted, log_probs, make_adapter, make_request_model
from tiny_models import VOCAB_SIZE
from vllm_engines import one_process, tiny_vllm

from anyengine import (
    EmbedsPrompt,
    EngineClient,
    FlatLogprobs,
    LoRARequest,
    OutputKind,
    OutputProcessingError,
    PoolingParams,
    RequestFailed,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    StructuredOutputsParams,
)

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4  # of log-probabilities in float32
rng = random.Random(7)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3, 30))] for _ in range(6)]
LONG_PROMPT = [rng.randrange(VOCAB_SIZE) for _ in range(300)]  # more than two blocks of vLLM's cache on CPUs
ENGINE: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "enable_prompt_embeds": True,
    "max_logprobs": -1,
    "scheduling_policy": "priority",
    "max_num_seqs": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_request_model(tmp_path_factory.mktemp("requests"))


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return make_adapter(model.parent / "adapter", model)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()


@pytest.fixture(scope="module")
async def client(vllm_python: str, model: Path) -> AsyncIterator[EngineClient]:
    engine = tiny_vllm(vllm_python, model, env=one_process, **ENGINE)
    async with EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30) as it:
        yield it


@pytest.fixture(scope="module")
async def pooling_client(vllm_python: str, model: Path) -> AsyncIterator[EngineClient]:
    engine = tiny_vllm(vllm_python, model, env=one_process, runner="pooling")
    async with EngineClient(engine=engine, startup_timeout_s=120, shutdown_grace_s=30) as it:
        yield it


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **params})


async def collect(client: EngineClient, prompt: Any, params: SamplingParams, **fields: Any) -> RequestOutput:
    """Everything of one request, as one output."""
    outputs = [out async for out in client.generate(prompt, params, **fields)]
    assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
    if params.output_kind is not OutputKind.DELTA:
        return outputs[-1]
    for out in outputs:
        assert out.logprobs is None or len(out.logprobs) == len(out.token_ids)
    rows = [row for out in outputs if out.logprobs is not None for row in out.logprobs]
    prompt_rows = [out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None]
    assert len(prompt_rows) <= 1
    return RequestOutput(
        request_id=outputs[0].request_id,
        text="".join(out.text for out in outputs),
        token_ids=[token for out in outputs for token in out.token_ids],
        finish_reason=outputs[-1].finish_reason,
        stop_reason=outputs[-1].stop_reason,
        facts=outputs[-1].facts,
        logprobs=rows or None,  # type: ignore[arg-type]
        cumulative_logprob=outputs[-1].cumulative_logprob,
        prompt_logprobs=prompt_rows[0] if prompt_rows else None,
    )


def assert_rows(name: str, rows: Any, expected: torch.Tensor, tokens: list[int], k: int) -> None:
    """Each row has its token first, then the ``k`` likeliest, with the ranks and log-probabilities of ``expected``."""
    assert len(rows) == len(tokens) == len(expected), name
    for position, (row, token, truth) in enumerate(zip(rows, tokens, expected, strict=True)):
        where = f"{name}, position {position}"
        assert next(iter(row)) == token, where
        assert (
            row[token].rank == int((truth >= truth[token] - 1e-6).sum())
            or abs(truth.topk(row[token].rank).values[-1] - truth[token]) < 10 * TOLERANCE
        ), where
        assert len(row) in (k, k + 1) if k else len(row) == 1, where
        for token_id, entry in row.items():
            assert abs(entry.logprob - truth[token_id]) < TOLERANCE, f"{where}: token {token_id}"
        likeliest = sorted(row.values(), key=lambda entry: -entry.logprob)[:k]
        assert torch.allclose(
            torch.tensor([entry.logprob for entry in likeliest]), truth.topk(k).values, atol=TOLERANCE
        ), where


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("kind", list(OutputKind))
async def test_log_probs_equal_transformers(client: EngineClient, reference: Any, kind: OutputKind) -> None:
    with anyio.fail_after(150):
        for i, prompt in enumerate(PROMPTS):
            out = await collect(client, prompt, greedy(logprobs=4, prompt_logprobs=3, output_kind=kind))
            assert_agrees(f"prompt {i}", out.token_ids, reference_of(reference, prompt, 8))
            truth = log_probs(reference, [*prompt, *out.token_ids])
            assert out.logprobs is not None and out.prompt_logprobs is not None and out.cumulative_logprob is not None
            assert_rows(f"output {i}", out.logprobs, truth[len(prompt) - 1 : -1], out.token_ids, 4)
            assert out.prompt_logprobs[0] is None
            assert_rows(f"prompt {i}", out.prompt_logprobs[1:], truth[: len(prompt) - 1], prompt[1:], 3)
            total = sum(row[token].logprob for row, token in zip(out.logprobs, out.token_ids, strict=True))  # type: ignore[index]
            assert abs(out.cumulative_logprob - total) < 1e-9


async def test_as_many_log_probs_as_were_asked_for(client: EngineClient, reference: Any) -> None:
    prompt = PROMPTS[1]
    with anyio.fail_after(150):
        none = await collect(client, prompt, greedy())
        assert none.logprobs is none.prompt_logprobs is none.cumulative_logprob is None
        one = await collect(client, prompt, greedy(logprobs=0))
        whole = await collect(client, prompt, greedy(logprobs=-1, prompt_logprobs=-1))
    truth = log_probs(reference, [*prompt, *one.token_ids])
    assert one.logprobs is not None and whole.logprobs is not None and whole.prompt_logprobs is not None
    assert_rows("logprobs=0", one.logprobs, truth[len(prompt) - 1 : -1], one.token_ids, 0)
    assert all(len(row) == VOCAB_SIZE for row in [*whole.logprobs, *whole.prompt_logprobs[1:]] if row is not None)
    assert_rows("logprobs=-1", whole.logprobs, truth[len(prompt) - 1 : -1], whole.token_ids, VOCAB_SIZE - 1)


async def test_neighbours_in_a_batch_get_their_own_number(client: EngineClient) -> None:
    """vLLM's engine sends everyone in a batch the columns of the most demanding one."""
    outs: dict[int, RequestOutput] = {}

    async def run(k: int) -> None:
        outs[k] = await collect(client, PROMPTS[k], greedy(logprobs=k, max_tokens=20))

    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, 1)
            tasks.start_soon(run, 5)
    for k, out in outs.items():
        assert out.logprobs is not None and all(len(row) in (k, k + 1) for row in out.logprobs if row is not None)


async def test_log_probs_of_chosen_tokens(client: EngineClient, reference: Any) -> None:
    prompt, chosen = PROMPTS[2], [5, 17, 250]
    with anyio.fail_after(150):
        out = await collect(client, prompt, greedy(logprob_token_ids=chosen))
    truth = log_probs(reference, [*prompt, *out.token_ids])[len(prompt) - 1 : -1]
    assert out.logprobs is not None
    for row, token, values in zip(out.logprobs, out.token_ids, truth, strict=True):
        assert row is not None and set(row) == {token, *chosen} and next(iter(row)) == token
        assert all(abs(entry.logprob - values[token_id]) < TOLERANCE for token_id, entry in row.items())


async def test_what_the_engine_would_ignore_is_an_error(client: EngineClient) -> None:
    """The V1 model runner takes no prompt_logprob_token_ids, and says nothing."""
    with anyio.fail_after(150), pytest.raises(OutputProcessingError, match="V2 model runner"):
        await collect(client, [1, 2, 3], greedy(prompt_logprob_token_ids=[[1], [2]]))


async def test_texts_of_tokens(client: EngineClient) -> None:
    with anyio.fail_after(150):
        out = await collect(client, "Grüße", greedy(prompt_logprobs=0, allowed_token_ids=list(range(256)), logprobs=0))
    prompt_ids = client.tokenizer.encode("Grüße")
    assert isinstance(out.prompt_logprobs, FlatLogprobs)
    texts = [row[token].decoded_token for row, token in zip(out.prompt_logprobs[1:], prompt_ids[1:], strict=True)]  # type: ignore[index]
    assert texts == ["r", "", "ü", "", "ß", "e"]  # the second byte of a character has all of it


# --------------------------------------------------------------- what shapes an output


async def test_sampling_parameters_reach_the_sampler(client: EngineClient) -> None:
    prompt = PROMPTS[3]
    with anyio.fail_after(150):
        plain = await collect(client, prompt, greedy())
        biased = await collect(client, prompt, greedy(logit_bias={42: 100.0}))
        assert biased.token_ids == [42] * 8
        allowed = await collect(client, prompt, SamplingParams(max_tokens=20, allowed_token_ids=[7, 8, 9], seed=1))
        assert set(allowed.token_ids) <= {7, 8, 9}
        eos = {EOS: 100.0}
        ended = await collect(client, prompt, greedy(logit_bias=eos, ignore_eos=False, min_tokens=3, max_tokens=9))
        assert (len(ended.token_ids), ended.token_ids[-1], ended.finish_reason) == (4, EOS, "stop")
        stopped = await collect(client, prompt, greedy(stop_token_ids=[plain.token_ids[2]]))
        assert stopped.stop_reason == plain.token_ids[2] and len(stopped.token_ids) <= 3
        seeded = [await collect(client, prompt, SamplingParams(max_tokens=12, seed=seed)) for seed in (3, 3, 4)]
        assert seeded[0].token_ids == seeded[1].token_ids != seeded[2].token_ids


async def test_bad_words_never_appear(client: EngineClient) -> None:
    """Of 256 one-byte words, all that the model would like to say is forbidden, one after the other."""
    words: list[str] = []
    with anyio.fail_after(120):
        for _ in range(6):
            params = greedy(bad_words=words, allowed_token_ids=list(range(33, 94)), max_tokens=4)
            out = await collect(client, PROMPTS[4], params)
            assert not any(word in out.text for word in words)
            words += sorted(set(out.text) - set(words))
    assert len(words) > 6


@pytest.mark.parametrize(
    ("constraint", "matches"),
    [
        ({"regex": r"[a-c]{3}-[0-9]{2}"}, lambda text: re.fullmatch(r"[a-c]{3}-[0-9]{2}", text)),
        ({"choice": ["red", 'blu"e', "grün\n"]}, lambda text: text in ("red", 'blu"e', "grün\n")),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
        (
            {
                "json": {
                    "type": "object",
                    "properties": {"n": {"enum": [1, 22]}},
                    "required": ["n"],
                    "additionalProperties": False,
                }
            },
            lambda text: json.loads(text)["n"] in (1, 22),
        ),
        ({"json": '{"type": "array", "items": {"enum": [true]}, "minItems": 1, "maxItems": 2}'}, json.loads),
        ({"json_object": True}, None),
    ],
    ids=["regex", "choice", "grammar", "schema", "schema-text", "object"],
)
async def test_structured_outputs(client: EngineClient, constraint: dict[str, Any], matches: Any) -> None:
    params = SamplingParams(
        max_tokens=200, seed=11, structured_outputs=StructuredOutputsParams(**constraint), temperature=0.5
    )
    with anyio.fail_after(150):
        out = await collect(client, PROMPTS[5], params)
    if matches is None:  # a random model seldom ends an object
        assert out.text.lstrip().startswith("{")
    elif out.finish_reason == "stop":
        assert matches(out.text), out.text
    else:
        assert "json" in constraint, out  # white space without end is JSON too


async def test_a_grammar_that_cannot_be_built_fails_its_request_only(client: EngineClient) -> None:
    broken = StructuredOutputsParams(grammar="root ::= nothing_of_that_name")
    with anyio.fail_after(150):
        with pytest.raises(RequestFailed):
            await collect(client, [1, 2], greedy(structured_outputs=broken))
        with pytest.raises(RequestRejected, match="multipleOf"):  # ignored by the backend that is in use now
            schema = {"type": "integer", "multipleOf": 3}
            await client.submit([1], greedy(structured_outputs=StructuredOutputsParams(json=schema)))
        assert len((await collect(client, [1, 2], greedy())).token_ids) == 8


# ------------------------------------------------------------------ beside the prompt


async def test_lora(client: EngineClient, model: Path, adapter: Path) -> None:
    lora = LoRARequest("tiny", 1, str(adapter))
    merged = adapted(model, adapter)
    with anyio.fail_after(150):
        for i, prompt in enumerate(PROMPTS):
            with_it = await collect(client, prompt, greedy(), lora_request=lora)
            without = await collect(client, prompt, greedy())
            assert_agrees(f"prompt {i} with the adapter", with_it.token_ids, reference_of(merged, prompt, 8))
            assert with_it.token_ids != without.token_ids
        assert await client.list_loras() == {1}
        with pytest.raises(RequestRejected, match="cannot load the LoRA adapter 'lost'") as caught:
            await client.submit(PROMPTS[0], greedy(), lora_request=LoRARequest("lost", 2, "/nowhere/at/all"))
        assert caught.value.parameter == "lora_request"
        assert await client.remove_lora(1)
        again = await collect(client, PROMPTS[0], greedy(), lora_request=lora)
        assert_agrees("loaded again", again.token_ids, reference_of(merged, PROMPTS[0], 8))


@pytest.mark.feature("R37")
async def test_cached_prefixes_are_shared_within_one_salt(client: EngineClient) -> None:
    with anyio.fail_after(150):
        await client.reset_prefix_cache()
        cached = []
        for salt in ("a", "a", "b", None, None):
            fields: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
            cached.append((await collect(client, LONG_PROMPT, greedy(max_tokens=2), **fields)).num_cached_tokens)
        skipping = await collect(client, LONG_PROMPT, greedy(max_tokens=2, skip_reading_prefix_cache=True))
    assert cached == [0, 256, 0, 0, 256]
    assert skipping.num_cached_tokens == 0


async def test_priority(client: EngineClient) -> None:
    """Two run at once; the urgent one came last, and is not the last to be answered."""
    finished: list[str] = []

    async def run(name: str, priority: int) -> None:
        await collect(client, PROMPTS[0], greedy(max_tokens=30), priority=priority, request_id=name)
        finished.append(name)

    with anyio.fail_after(150):
        # Not by the client's own method: behind that, the client lets nobody in.
        await client.core.utility("pause_scheduler", "keep", False)
        async with anyio.create_task_group() as tasks:
            for number, (name, priority) in enumerate({"first": 3, "second": 5, "urgent": -1}.items()):
                tasks.start_soon(run, name, priority)
                while client.statistics()["requests_in_flight"] <= number:
                    await anyio.lowlevel.checkpoint()
            await client.core.utility("resume_scheduler")
    assert finished[-1] == "second"


async def test_headers_and_session(client: EngineClient) -> None:
    fields: dict[str, Any] = {
        "trace_headers": {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"},
        "session_id": "s",
    }
    with anyio.fail_after(150):
        assert len((await collect(client, PROMPTS[0], greedy(), **fields)).token_ids) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
async def test_prompts_of_embeddings(client: EngineClient, reference: Any, dtype: torch.dtype) -> None:
    """The embeddings of tokens say what the tokens say; a mixed prompt too, whatever stands at the other rows."""
    prompt = PROMPTS[1]
    table = reference.get_input_embeddings().weight.data
    embeds = table[torch.tensor(prompt)].to(dtype)
    with anyio.fail_after(150):
        out = await collect(client, embeds, greedy(max_tokens=1, logprobs=3))
        with torch.no_grad():
            truth = torch.log_softmax(reference(inputs_embeds=embeds.float()[None]).logits[0, -1].float(), dim=-1)
        assert_rows("embeddings", out.logprobs, truth[None], out.token_ids, 3)
        if dtype is torch.float32:
            by_tokens = await collect(client, prompt, greedy())
            assert (await collect(client, embeds.numpy(), greedy())).token_ids == by_tokens.token_ids
            marks = [i % 2 == 0 for i in range(len(prompt))]
            junk = embeds.clone()
            junk[torch.tensor(marks)] = 3.0
            mixed = EmbedsPrompt(prompt_embeds=junk, prompt_token_ids=prompt, prompt_is_token_ids=marks)
            assert (await collect(client, mixed, greedy())).token_ids == by_tokens.token_ids


@pytest.mark.feature("R57", "R54")
async def test_what_would_end_the_engine_is_refused(client: EngineClient) -> None:
    fatal: list[tuple[Any, dict[str, Any], str]] = [
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([1], {"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ([1], {"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
        ([1], {"logprobs": VOCAB_SIZE + 1}, "logprobs"),
        (torch.zeros(3, 64), {}, "prompt_embeds.shape"),
        (torch.zeros(3, 128, dtype=torch.float64), {}, "prompt_embeds"),
        (torch.full((3, 128), float("nan")), {}, "prompt_embeds"),
        (torch.zeros(3, 128), {"prompt_logprobs": 1}, "prompt_logprobs"),
        ([1], {"thinking_token_budget": 5}, "thinking_token_budget"),
        ([1], {"trace_decode_token_ids": [1]}, "trace_decode_token_ids"),
    ]
    with anyio.fail_after(150):
        for prompt, params, parameter in fatal:
            with pytest.raises(RequestRejected) as caught:
                await client.submit(prompt, greedy(**params))
            assert (caught.value.parameter, bool(caught.value.remedy)) == (parameter, True)
        with pytest.raises(RequestRejected, match="generates only"):
            await client.encode([1, 2, 3], PoolingParams(task="embed"))
        assert len((await collect(client, [1, 2], greedy())).token_ids) == 8


# ------------------------------------------------------------------------- pooling


async def test_embeddings_equal_transformers(pooling_client: EngineClient, reference: Any) -> None:
    client = pooling_client
    with anyio.fail_after(150):
        assert {"embed", "token_embed"} <= set(await client.supported_tasks())
        for prompt in PROMPTS:
            with torch.no_grad():
                hidden = reference.model(torch.tensor([prompt])).last_hidden_state[0]
            out = await client.encode(prompt, PoolingParams(task="embed"))
            assert out.num_prompt_tokens == len(prompt)
            norm = torch.nn.functional.normalize(hidden, dim=-1)
            assert torch.allclose(torch.tensor(out.data.tolist()), norm[-1], atol=TOLERANCE)
            raw = await client.encode(prompt, PoolingParams(task="embed", use_activation=False))
            assert torch.allclose(torch.from_numpy(raw.data.numpy().copy()), hidden[-1], rtol=1e-3, atol=1e-3)
            tokens = await client.encode(prompt)  # what vLLM does without a task
            assert torch.allclose(torch.tensor(tokens.data.tolist()), norm, atol=TOLERANCE)


async def test_the_ways_out_of_a_pooling_request(pooling_client: EngineClient) -> None:
    client = pooling_client
    with anyio.fail_after(150):
        for task in ("classify", "no such task"):
            with pytest.raises(RequestRejected, match="none of the engine's"):
                await client.encode([1], PoolingParams(task=task))
        with pytest.raises(RequestRejected, match="Matryoshka"):
            await client.encode([1], PoolingParams(task="embed", dimensions=16))
        with pytest.raises(RequestRejected, match="does not generate"):
            await client.submit([1], greedy())
        with anyio.move_on_after(0) as scope:
            await client.encode(LONG_PROMPT, PoolingParams(task="embed"))
        assert scope.cancelled_caught
        assert client.statistics()["requests_in_flight"] == 0
        assert (await client.encode("text", PoolingParams(task="embed"))).num_prompt_tokens == 4


# ------------------------------------------------------------------------------------------------- prompts in parts


@pytest.mark.feature("C44")
@pytest.mark.parametrize("ahead", [False, True])
async def test_each_part_continues_the_whole(client: EngineClient, reference: Any, ahead: bool) -> None:
    """With the answers before it, but for their last token, whose keys and values vLLM has not computed."""
    parts = [list(PROMPTS[0]), [7, 8, 9], [11, 12]]
    answers: list[list[int]] = [[] for _ in parts]
    with anyio.fail_after(60):
        async with client.input_session(greedy(max_tokens=4)) as session:
            answered = 0
            for part in parts:
                await session.send(part)
                while not ahead and len(answers[answered]) < 4:
                    answers[answered] += (await anext(session)).token_ids
                answered += not ahead
            session.end()
            async for out in session:
                answers[answered] += out.token_ids
                answered += out.finish_reason is not None
        await client.drain()
        assert client.stats().in_flight == 0
    context: list[int] = []
    for part, answer in zip(parts, answers, strict=True):
        context += part
        assert_agrees(f"part {part}", answer, reference_of(reference, context, 4))
        context += answer[:-1]
    plain = await collect(client, PROMPTS[0], greedy(max_tokens=4))  # and nothing is left of it
    assert_agrees("behind it", plain.token_ids, reference_of(reference, PROMPTS[0], 4))
