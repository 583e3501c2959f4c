"""``anyengine run`` with the real default model: the answer, the signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT

import psutil
import pytest
from built_tokenizers import write_model
from tiny_models import make_tiny_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTION = "What is the capital of France?"
LIMIT_S = 240


@pytest.fixture(autouse=True)
def compile_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a directory for compiled kernels at its import, in the temporary directory; it is meant to stay."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For what does not depend on the answer: it is there in half the time."""
    directory = make_tiny_model("qwen2", tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    return str(write_model(directory, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}))


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program, in a process group of its own as a shell starts it; killed if a failed test left it running."""
    command = [sys.executable, "-m", "anyengine.cli", "run", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_gone(children: list[psutil.Process]) -> None:
    """All of ``children`` have been reaped; there is no zombie either, for their parent is gone."""
    assert children, "the engine must have been running, or the test shows nothing"
    assert [child for child in children if child.is_running()] == []


@pytest.mark.blocking_ok
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_capital_of_france(backend: str) -> None:
    with started("--backend", backend, QUESTION) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err.decode()
    assert "Paris" in out.decode()
    assert out.endswith(b"\n")
    assert b"anyengine: loading the model" in err


@pytest.mark.blocking_ok
def test_json_lines_and_a_raw_prompt_from_standard_input() -> None:
    arguments = ["--uvloop", "--json", "--raw", "--quiet", "--max-tokens", "8", "-"]
    result = subprocess.run(
        [sys.executable, "-m", "anyengine.cli", "run", *arguments],
        input=b"The capital of France is",
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")
    *outputs, usage = [json.loads(line) for line in result.stdout.splitlines()]
    assert "Paris" in "".join(item["text"] for item in outputs)
    assert sum(len(item["token_ids"]) for item in outputs) == usage["usage"]["completion_tokens"] <= 8
    assert outputs[-1]["finish_reason"] in ("stop", "length")


@pytest.mark.blocking_ok
@pytest.mark.feature("L38")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_ctrl_c_in_the_middle_of_an_answer_leaves_nothing_behind(backend: str, tiny_model: str) -> None:
    arguments = ["--json", "--backend", backend, "--raw", "--max-tokens", "4000", "--model", tiny_model, "Once upon"]
    with started(*arguments) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["token_ids"]  # the answer has begun
        children = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, SIGINT)  # a terminal sends it to the whole group, the engine included
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err.decode()
    assert b"Traceback" not in err
    assert_gone(children)


@pytest.mark.blocking_ok
def test_a_reader_that_leaves_ends_the_program_quietly(tiny_model: str) -> None:
    arguments = ["--json", "--raw", "--quiet", "--max-tokens", "4000", "--model", tiny_model, "Once upon"]
    with started(*arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children(recursive=True)
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""
    assert_gone(children)


@pytest.mark.blocking_ok
def test_an_unknown_model_is_a_readable_error() -> None:
    with started("--quiet", "--model", "/no/such/directory", QUESTION) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (1, b"")
    assert err.startswith(b"error: ")
    assert b"/no/such/directory" in err
