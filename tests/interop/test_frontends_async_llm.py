"""AsyncLLM of vLLM 0.32, unmodified, on our engine core."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from attached_engines import DEADLINE_S, AsyncLLMChild, attached_engine, free_port
from real_model import SmolLM2
from reference_generation import Reference, assert_agrees, reference_of
from vllm_engines import MAX_MODEL_LEN, make_vllm_model

MAX_TOKENS = 16
LONG = 8000

rng = random.Random(5)
PROMPTS = [[rng.randrange(256) for _ in range(rng.randrange(2, 40))] for _ in range(12)]


class Pair(NamedTuple):
    llm: AsyncLLMChild
    engine: subprocess.Popen[bytes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference_model(model: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")


@pytest.fixture(scope="module")
def references(reference_model: transformers.PreTrainedModel) -> list[Reference]:
    with torch.no_grad():
        return [reference_of(reference_model, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def pair(vllm_python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A front end and an engine that all tests share; the last two of them end it."""
    logs, port = tmp_path_factory.mktemp("logs"), free_port()
    with (
        AsyncLLMChild.started(vllm_python, model, port, logs / "llm") as llm,
        attached_engine(model, port, logs / "engine") as engine,
    ):
        ready = llm.wait_for("ready")
        assert ready["max_model_len"] == MAX_MODEL_LEN
        assert ready["tasks"] == ["generate", "embed"]
        yield Pair(llm, engine)


@pytest.mark.feature("D02")
@pytest.mark.feature("P07")
def test_greedy_ids_equal_transformers_alone(pair: Pair, references: list[Reference]) -> None:
    for i, prompt in enumerate(PROMPTS):
        pair.llm.generate(f"alone {i}", prompt, max_tokens=MAX_TOKENS)
        pair.llm.wait_for("end", f"alone {i}")
        assert_agrees(f"prompt {i}", pair.llm.tokens(f"alone {i}"), references[i])


@pytest.mark.feature("D02")
@pytest.mark.feature("P07")
def test_greedy_ids_equal_transformers_together(pair: Pair, references: list[Reference]) -> None:
    names = [f"together {i}" for i in range(len(PROMPTS))]
    for name, prompt in zip(names, PROMPTS, strict=True):
        pair.llm.generate(name, prompt, max_tokens=MAX_TOKENS)
    pair.llm.wait_for("end", *names)
    for name, reference in zip(names, references, strict=True):
        assert_agrees(name, pair.llm.tokens(name), reference)


def test_tokens_stream_as_they_come(pair: Pair) -> None:
    pair.llm.generate("stream", PROMPTS[0], max_tokens=200)
    pair.llm.wait_for("end", "stream")
    outputs = pair.llm.outputs["stream"]
    assert len(outputs) > 20  # AsyncLLM merges what has come together
    assert [output["finish_reason"] for output in outputs] == [None] * (len(outputs) - 1) + ["length"]
    assert len(pair.llm.tokens("stream")) == 200


def test_stop_tokens_and_stop_strings(pair: Pair, references: list[Reference]) -> None:
    """The first is the engine's business; the second is the front end's, which then aborts."""
    third = references[0].token_ids[2]
    assert third not in references[0].token_ids[:2]
    pair.llm.generate("stop id", PROMPTS[0], max_tokens=MAX_TOKENS, stop_token_ids=[third])
    pair.llm.wait_for("end", "stop id")
    last = pair.llm.outputs["stop id"][-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", third)
    assert pair.llm.tokens("stop id") == references[0].token_ids[:3]
    text = "".join(output["text"] for output in pair.llm.outputs["alone 1"])
    letter = next(character for character in text[1:] if character.isascii() and character.isprintable())
    pair.llm.generate("stop text", PROMPTS[1], max_tokens=LONG, stop=[letter])
    pair.llm.wait_for("end", "stop text")
    last = pair.llm.outputs["stop text"][-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", letter)
    assert pair.llm.statistics()["num_running_requests"] == 0


def test_log_probabilities_equal_transformers(pair: Pair, reference_model: transformers.PreTrainedModel) -> None:
    pair.llm.generate("logprobs", PROMPTS[2], max_tokens=4, logprobs=2)
    pair.llm.wait_for("end", "logprobs")
    steps = [step for output in pair.llm.outputs["logprobs"] for step in output["logprobs"]]
    answer = pair.llm.tokens("logprobs")
    with torch.no_grad():
        logits = reference_model(input_ids=torch.tensor([PROMPTS[2] + answer])).logits[0]
    expected = logits[len(PROMPTS[2]) - 1 : -1].log_softmax(dim=-1)
    assert len(steps) == len(answer) == 4
    for step, token, row in zip(steps, answer, expected, strict=True):
        assert step[str(token)][1] == 1  # rank
        assert {int(name) for name in step} == set(row.topk(2).indices.tolist())
        for name, (logprob, _rank) in step.items():
            assert logprob == pytest.approx(float(row[int(name)]), abs=1e-3)


def test_what_our_engine_cannot_do_fails_one_request(pair: Pair) -> None:
    pair.llm.generate("budget", PROMPTS[0], max_tokens=4, thinking_token_budget=3)
    pair.llm.generate("fine", PROMPTS[0], max_tokens=4)
    seen = {}
    while len(seen) < 2:
        event = pair.llm.next_event()
        if event["event"] in ("end", "failed"):
            seen[event["id"]] = event
    assert seen["fine"]["event"] == "end"
    assert len(pair.llm.tokens("fine")) == 4
    assert pair.llm.tokens("budget") == []


@pytest.mark.feature("D02")
def test_a_generator_that_is_closed_early_leaves_nothing_in_the_engine(pair: Pair) -> None:
    aborts = pair.llm.statistics()["aborts_received"]
    names = [f"left {i}" for i in range(8)]
    for i, name in enumerate(names):
        pair.llm.generate(name, PROMPTS[i], max_tokens=LONG, ignore_eos=True, leave_after=1 + i % 3)
    pair.llm.wait_for("end", *names)
    counts = pair.llm.statistics()
    assert (counts["num_running_requests"], counts["num_waiting_requests"]) == (0, 0)
    assert counts["aborts_received"] == aborts + 8


def test_every_call_of_its_own(pair: Pair) -> None:
    call = pair.llm.call
    assert call("is_sleeping") is False
    assert call("reset_prefix_cache") is True
    assert [call(name) for name in ("reset_mm_cache", "reset_encoder_cache", "check_health")] == [None] * 3
    assert call("list_loras") == []
    assert call("collective_rpc", "check_health") == [None]
    assert call("get_weight_version") == "default"
    assert call("sleep") is None
    assert call("is_sleeping") is True
    assert call("wake_up") is True
    assert call("pause_generation") is None
    assert call("is_paused") is True
    assert call("resume_generation") is None
    assert call("is_paused") is False
    assert "profile_dir" in call("start_profile")
    pair.llm.generate("after all that", PROMPTS[0], max_tokens=4)
    pair.llm.wait_for("end", "after all that")


@pytest.mark.feature("D02")
def test_shutdown_of_the_front_end_is_the_end_of_the_engine(pair: Pair) -> None:
    pair.llm.generate("unfinished", PROMPTS[0], max_tokens=LONG, ignore_eos=True)
    pair.llm.wait_for("output")
    pair.llm.send("shutdown")
    assert pair.llm.process.wait(DEADLINE_S) == 0
    assert pair.engine.wait(DEADLINE_S) == 0


@pytest.mark.feature("D02")
@pytest.mark.feature("P07")
@pytest.mark.model
def test_two_ranks_of_a_real_model_and_the_end_of_one(vllm_python: str, smollm2: SmolLM2, tmp_path: Path) -> None:
    """AsyncLLM brings its coordinator along and balances. It did not start the engines and cannot watch their
    processes: the one that leaves has to say so."""
    port, model = free_port(), smollm2.directory
    with (
        AsyncLLMChild.started(vllm_python, model, port, tmp_path / "llm", data_parallel_size=2) as llm,
        attached_engine(model, port, tmp_path / "engine 0"),
        attached_engine(model, port, tmp_path / "engine 1", "--rank", "1") as engine,
    ):
        llm.wait_for("ready")
        for i, prompt in enumerate(smollm2.prompts):
            llm.generate(str(i), prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        llm.wait_for("end", *map(str, range(len(smollm2.prompts))))
        for i, reference in enumerate(smollm2.references(MAX_TOKENS)):
            assert_agrees(f"prompt {i}", llm.tokens(str(i)), reference)
        assert "Paris" in smollm2.text(llm.tokens("0"))
        counts = llm.call("core.call_utility_all_async", "get_engine_statistics")
        assert sum(rank["adds_received"] for rank in counts) == len(smollm2.prompts)
        assert all(rank["adds_received"] for rank in counts)
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(DEADLINE_S) == 0
        llm.generate("too late", smollm2.prompts[0], max_tokens=4)
        while (event := llm.next_event()).get("id") != "too late":
            pass
        assert event["event"] == "dead"
