"""vLLM's front ends, unmodified, on ``anyengine mock``: the promised tokens, a log of what they said, a death."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from attached_engines import DEADLINE_S, AsyncLLMChild, RustFrontend, free_port
from vllm_engines import MAX_MODEL_LEN, make_vllm_model

from anyengine.testing.scripted import Record, expected_tokens, read_records

VOCABULARY = 256
PROMPT = [1, 2, 3]


@contextmanager
def mock_engine(port: int, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``anyengine mock``, killed at the end if it is still there."""
    command = [sys.executable, "-m", "anyengine.cli", "mock", "--handshake", f"tcp://127.0.0.1:{port}"]
    command += ["--log", str(log), "--vocab-size", str(VOCABULARY), "--max-model-len", str(MAX_MODEL_LEN), *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def adds(log: Path) -> list[Record]:
    return [one for one in read_records(log) if one.kind == "add"]


@pytest.mark.feature("F18")
def test_behind_async_llm(vllm_python: str, tmp_path: Path) -> None:
    """Exactly the tokens that it generates, an abort that arrives, its calls; then it dies of the third request."""
    model, port, log = make_vllm_model(tmp_path / "model"), free_port(), tmp_path / "log"
    options = ("--release", "0.32.0", "--tpot", "0.005", "--jitter", "0.5", "--fault", "dead_exit=9@add:3")
    with (
        AsyncLLMChild.started(vllm_python, model, port, tmp_path / "llm") as llm,
        mock_engine(port, log, *options) as engine,
    ):
        assert llm.wait_for("ready")["tasks"] == ["generate"]
        llm.generate("whole", PROMPT, max_tokens=12)
        llm.wait_for("end", "whole")
        assert llm.tokens("whole") == expected_tokens(PROMPT, 12, vocab_size=VOCABULARY)
        assert llm.outputs["whole"][-1]["finish_reason"] == "length"
        llm.generate("left", PROMPT, max_tokens=1000, leave_after=2)
        llm.wait_for("end", "left")
        assert llm.call("is_sleeping") is False
        ((aborted,),) = [one.body for one in read_records(log) if one.kind == "abort"]
        assert aborted == adds(log)[1].body[0]
        llm.generate("third", PROMPT, max_tokens=12)
        while (event := llm.next_event()).get("id") != "third":
            pass
        assert event["event"] == "dead"
        assert engine.wait(DEADLINE_S) == 9


@pytest.mark.feature("F18")
def test_behind_vllm_rs(tmp_path: Path) -> None:
    """The same over HTTP; the end of the engine is an error of the server's."""
    if not (vllm_rs := os.environ.get("ANYENGINE_VLLM_RS")):
        pytest.fail("ANYENGINE_VLLM_RS must name the executable vllm/vllm-rs of a vLLM wheel: `nox -s interop`")
    model, port, log = make_vllm_model(tmp_path / "model"), free_port(), tmp_path / "log"
    with (
        RustFrontend.started(vllm_rs, model, port, tmp_path / "server") as server,
        mock_engine(port, log, "--ttft", "0.01", "--fault", "dead_exit=9@add:2") as engine,
    ):
        server.wait_until_it_serves()
        answer = server.complete(PROMPT, max_tokens=12, return_token_ids=True)["choices"][0]
        assert answer["token_ids"] == expected_tokens(PROMPT, 12, vocab_size=VOCABULARY)
        assert answer["finish_reason"] == "length"
        status, _ = server.post("/v1/completions", {"model": str(model), "prompt": "x"})
        assert status >= 500
        assert engine.wait(DEADLINE_S) == 9
        assert len(adds(log)) == 2
