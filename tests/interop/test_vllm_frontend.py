"""Unmodified ``vllm serve`` as the parent: it starts the engines, and ``anyengine frontend`` as its front end."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_generation import assert_agrees, reference_of
from vllm_engines import make_vllm_model
from vllm_serve import Launcher, serving

import anyengine

pytestmark = [pytest.mark.timeout(400)]

MAX_TOKENS = 12
PROMPT = "Once upon a time"
READY_S = 240.0

APPLICATION = """
import json
import anyio
from anyengine import SamplingParams

async def serve(client, listener, args):
    async def answer(connection):
        async with connection:
            request = await connection.receive()
            head, _, body = request.partition(b"\\r\\n\\r\\n")
            ids = client.tokenizer.encode(json.loads(body)["prompt"])
            params = SamplingParams(max_tokens=args["seed"], temperature=0.0)
            tokens = [token async for output in client.generate(ids, params) for token in output.token_ids]
            reply = json.dumps({"prompt": ids, "tokens": tokens, "ranks": client.ranks}).encode()
            await connection.send(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(reply) + reply)
    try:
        async with await anyio.abc.SocketListener.from_socket(listener) as connections:
            await connections.serve(answer)
    finally:
        print("the application was cancelled", flush=True)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """``anyengine``, as a program of the environment of the client; the application is found in its directory."""
    (tmp_path / "application.py").write_text(APPLICATION)
    source = shlex.quote(str(Path(anyengine.__file__).parents[1]))
    program = tmp_path / "anyengine"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={source}:{tmp_path} exec {sys.executable} -m anyengine.cli "$@"\n')
    program.chmod(0o755)
    return program


def ask(path: Path, launcher: Launcher) -> Any:
    """What the application answers, as soon as somebody listens."""
    body = json.dumps({"prompt": PROMPT}).encode()
    deadline_s = time.monotonic() + READY_S
    while True:
        assert launcher.process.poll() is None and time.monotonic() < deadline_s, launcher.tail()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            try:
                connection.connect(str(path))
            except OSError:
                time.sleep(0.2)
                continue
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            with connection.makefile("rb") as answer:
                return json.loads(answer.read().partition(b"\r\n\r\n")[2])


@pytest.mark.feature("D18")
@pytest.mark.parametrize(("backend", "ranks"), [("asyncio", 2), ("trio", 1)])
def test_vllm_starts_our_front_end(
    vllm_python: str, model: Path, executable: Path, private_temp_dir: Path, backend: str, ranks: int
) -> None:
    path = private_temp_dir / "http"
    environment = {
        "VLLM_USE_RUST_FRONTEND": "1",
        "VLLM_RUST_FRONTEND_PATH": str(executable),
        "ANYENGINE_FRONTEND_APP": "application:serve",
        "ANYENGINE_BACKEND": backend,
    }
    args = ["--uds", str(path), "--seed", str(MAX_TOKENS), "--data-parallel-size", str(ranks)]
    with serving(vllm_python, model, *args, env=environment) as launcher:
        answers = [ask(path, launcher) for _ in range(2)]
        assert len(launcher.engines()) == ranks
        assert launcher.stop() == 0
        assert "the application was cancelled" in launcher.log.read_text(errors="replace")
    path.unlink(missing_ok=True)  # vLLM's
    reference_model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    with torch.no_grad():
        reference = reference_of(reference_model, answers[0]["prompt"], MAX_TOKENS)
    for answer in answers:
        assert len(answer["prompt"]) == len(PROMPT)
        assert answer["ranks"] == list(range(ranks))
        assert_agrees("the answer", answer["tokens"], reference)
