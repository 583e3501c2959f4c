"""The front end of vllm-rs 0.33, unmodified, on our engine core, over HTTP."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from attached_engines import DEADLINE_S, RustFrontend, attached_engine, free_port
from real_model import SMOLLM2_TEXTS, SmolLM2
from reference_generation import assert_agrees, reference_of
from vllm_engines import MAX_MODEL_LEN, make_vllm_model

MAX_TOKENS = 16
LONG = 8000

rng = random.Random(6)
PROMPTS = [[rng.randrange(256) for _ in range(rng.randrange(2, 40))] for _ in range(6)]


class Pair(NamedTuple):
    server: RustFrontend
    engine: subprocess.Popen[bytes]


@pytest.fixture(scope="session")
def vllm_rs() -> str:
    """The executable of vLLM's Rust front end; ``nox -s interop`` gets it."""
    if not (path := os.environ.get("ANYENGINE_VLLM_RS")):
        pytest.fail("ANYENGINE_VLLM_RS must name the executable vllm/vllm-rs of a vLLM wheel: `nox -s interop`")
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(vllm_rs: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A front end and an engine that all tests share; the last one ends them."""
    logs, port = tmp_path_factory.mktemp("logs"), free_port()
    with (
        RustFrontend.started(vllm_rs, model, port, logs / "server") as server,
        attached_engine(model, port, logs / "engine") as engine,
    ):
        server.wait_until_it_serves()
        yield Pair(server, engine)


@pytest.mark.feature("D02")
@pytest.mark.feature("P07")
def test_greedy_ids_equal_transformers(pair: Pair, model: Path) -> None:
    reference_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    for i, prompt in enumerate(PROMPTS):
        answer = pair.server.complete(prompt, max_tokens=MAX_TOKENS, return_token_ids=True)
        with torch.no_grad():
            reference = reference_of(reference_model, prompt, MAX_TOKENS)
        assert_agrees(f"prompt {i}", answer["choices"][0]["token_ids"], reference)
        assert answer["usage"]["completion_tokens"] == MAX_TOKENS
        assert answer["choices"][0]["finish_reason"] == "length"


def test_it_knows_what_our_engine_said_of_itself(pair: Pair) -> None:
    _status, text = pair.server.get("/v1/models")
    assert json.loads(text)["data"][0]["max_model_len"] == MAX_MODEL_LEN


@pytest.mark.feature("D02")
def test_streaming(pair: Pair) -> None:
    whole = pair.server.complete(PROMPTS[0], max_tokens=40)["choices"][0]["text"]
    with pair.server.stream(PROMPTS[0], max_tokens=40) as events:
        choices = [event["choices"][0] for event in events]
    assert len(choices) > 10
    assert "".join(choice["text"] for choice in choices) == whole
    assert choices[-1]["finish_reason"] == "length"


def test_log_probabilities_of_answer_and_prompt(pair: Pair) -> None:
    answer = pair.server.complete("Hello", max_tokens=2, logprobs=2, echo=True)["choices"][0]
    logprobs = answer["logprobs"]
    assert logprobs["tokens"][:5] == list("Hello")
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["tokens"]) == 7
    for own, likeliest in zip(logprobs["token_logprobs"][5:], logprobs["top_logprobs"][5:], strict=True):
        assert own == max(likeliest.values())  # greedy


def test_a_refusal_is_an_answer_with_the_reason(pair: Pair) -> None:
    body = {"model": str(pair.server.complete("x", max_tokens=1)["model"]), "prompt": "x", "max_tokens": 1}
    status, text = pair.server.post("/v1/completions", {**body, "structured_outputs": {"regex": "[ab]+"}})
    assert status == 400
    assert json.loads(text)["error"]["message"] == (
        "structured_outputs needs a model with an end-of-sequence token, and this one names none"
    )
    assert pair.server.complete(PROMPTS[0], max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.feature("D02")
def test_a_client_that_hangs_up_takes_its_request_out_of_the_engine(pair: Pair) -> None:
    with pair.server.stream(PROMPTS[0], max_tokens=LONG, ignore_eos=True) as events:
        next(events)
        pair.server.wait_for_running_requests(1)
    pair.server.wait_for_running_requests(0)
    assert pair.engine.poll() is None


def test_its_routes_to_the_engine(pair: Pair) -> None:
    server = pair.server
    assert json.loads(server.get("/is_sleeping")[1]) == {"is_sleeping": False}
    assert server.post("/sleep")[0] == 200
    assert json.loads(server.get("/is_sleeping")[1]) == {"is_sleeping": True}
    assert server.post("/wake_up")[0] == 200
    assert server.post("/pause")[0] == 200
    assert json.loads(server.get("/is_paused")[1]) == {"is_paused": True}
    assert server.post("/resume")[0] == 200
    for route in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"):
        assert server.post(route)[0] == 200, route
    assert json.loads(server.post("/collective_rpc", {"method": "check_health"})[1]) == {"results": [None]}
    assert json.loads(server.get("/weight_info")[1]) == {"weight_version": "default"}
    assert json.loads(server.get("/get_world_size")[1]) == {"world_size": 1}
    assert server.complete(PROMPTS[0], max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.feature("P07")
def test_its_benchmark(pair: Pair, vllm_rs: str, model: Path) -> None:
    command = [
        vllm_rs, "bench", "serve", "--port", str(pair.server.port), "--model", str(model), "--prompt-token-ids",
        "--random-input-len", "32", "--random-output-len", "32", "--num-prompts", "64",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    results = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line and "ms" not in line)
    assert results["Successful requests"].split() == ["64"]
    assert results["Total generated tokens"].split() == [str(64 * 32)]


@pytest.mark.feature("D02")
def test_its_end_is_the_end_of_the_engine(pair: Pair) -> None:
    with pair.server.stream(PROMPTS[0], max_tokens=LONG, ignore_eos=True) as events:
        next(events)
        assert pair.server.stop() == 0
    assert pair.engine.wait(DEADLINE_S) == 0


@pytest.mark.feature("F15")
@pytest.mark.model
def test_an_engine_that_stays_serves_the_next_one(vllm_rs: str, smollm2: SmolLM2, tmp_path: Path) -> None:
    """With answers of a real model; and one that is constrained."""
    port, model = free_port(), smollm2.directory
    reference = smollm2.references(8)[0]
    with attached_engine(model, port, tmp_path / "engine", "--stay") as engine:
        for number in range(2):
            with RustFrontend.started(vllm_rs, model, port, tmp_path / f"server{number}") as server:
                server.wait_until_it_serves()
                answer = server.complete(SMOLLM2_TEXTS[0], max_tokens=8, temperature=0, ignore_eos=True)
                assert answer["choices"][0]["text"] == smollm2.text(reference.token_ids)
                bound = server.complete("The", max_tokens=20, structured_outputs={"regex": " (ab|cd){2}!"})
                assert re.fullmatch(r" (ab|cd){2}!", bound["choices"][0]["text"])
                server.process.send_signal((signal.SIGKILL, signal.SIGTERM)[number])
                server.process.wait(DEADLINE_S)
        assert engine.poll() is None
        engine.send_signal(signal.SIGINT)
        assert engine.wait(DEADLINE_S) == 0
        assert (tmp_path / "engine").read_text().count("loading the model") == 1


def test_the_end_of_the_engine_is_told(vllm_rs: str, model: Path, tmp_path: Path) -> None:
    port = free_port()
    with (
        RustFrontend.started(vllm_rs, model, port, tmp_path / "server") as server,
        attached_engine(model, port, tmp_path / "engine") as engine,
    ):
        server.wait_until_it_serves()
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(DEADLINE_S) == 0
        status, _text = server.post("/v1/completions", {"model": str(model), "prompt": "x"})
        assert status >= 500
