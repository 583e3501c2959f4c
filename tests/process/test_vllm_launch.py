"""How a vLLM engine core is described and started, as far as it can be seen without vLLM (``tests/interop`` has it)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from child_scripts import PATIENCE_S, Transcript

from anyengine import EngineClient, EngineStartupError, VLLMEngine
from anyengine._process.launch import launch_engine
from anyengine._process.status import Status, decode_status

LAUNCHER = Path(sys.modules["anyengine"].__file__ or "").parent / "vllm" / "launcher.py"

# Stands in for the interpreter: says what it was given, and leaves.
ECHO = f"""#!{sys.executable}
import json, os, sys
print(json.dumps([sys.argv[1:], json.loads(sys.stdin.readline()), dict(os.environ)]))
"""


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": ""}, "model=''"),
        ({"model": Path("m")}, "must be a non-empty str"),
        ({"model": "m", "args": "--max-model-len 5"}, "mapping of vLLM's argument names"),
        ({"model": "m", "args": ["--max-model-len", 5]}, "mapping of vLLM's argument names"),
        ({"model": "m", "args": ["--model=n"]}, "given twice"),
        ({"model": "m", "args": ["--config", "vllm.yaml"]}, "a file of arguments"),
        ({"model": "m", "args": {"--max-model-len": 5}}, "max_model_len"),
        ({"model": "m", "args": {"model": "n"}}, "given twice"),
        ({"model": "m", "args": {"dtype": object()}}, r"args\['dtype'\]"),
        ({"model": "m", "env": {"A": 1}}, "env must be str"),
        ({"model": "m", "python": ""}, "python=''"),
    ],
)
def test_what_is_wrong_is_refused_at_once(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VLLMEngine(**wrong)


def test_secrets_are_not_in_the_error() -> None:
    with pytest.raises(ValueError, match="HF_TOKEN") as caught:
        VLLMEngine("m", env={"HF_TOKEN": "secret", "A": 1})  # type: ignore[dict-item]
    assert "secret" not in str(caught.value)
    for args in (["--hf-token", "secret", 1], {"hf_token": "secret", "--x": 1}):
        with pytest.raises(ValueError, match="mapping of vLLM's argument names") as caught:
            VLLMEngine("m", args=args)  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)


@pytest.mark.anyio
@pytest.mark.blocking_ok
@pytest.mark.feature("F01", "F09")
@pytest.mark.parametrize(
    ("args", "arrive"),
    [
        (
            {"max_model_len": 5, "no_such_argument": {"deep": [1, None, "é"]}},
            {"model": "some/model", "max_model_len": 5, "no_such_argument": {"deep": [1, None, "é"]}},
        ),
        (
            ["--max_model_len", "4k", "--no-such-flag.a=é", "-dp=2", "-xyz", "5"],
            ["--model=some/model", "--max_model_len", "4k", "--no-such-flag.a=é", "-dp=2", "-xyz", "5"],
        ),
    ],
    ids=["names", "strings"],
)
async def test_arguments_and_environment_arrive_unchanged(
    args: Any, arrive: Any, tmp_path: Path, private_temp_dir: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(ECHO)
    python.chmod(0o755)
    engine = VLLMEngine("some/model", args=args, python=str(python), env={"HF_TOKEN": "secret"})
    child, said = launch_engine(engine, handshake_address="ipc:///h", rank=3), Transcript()
    try:
        await said.watch(child)
        argv, launch, env = json.loads(said.stdout[0])
    finally:
        child.reap()
    assert argv == [str(LAUNCHER)]  # so that no secret is in it, for one
    scratch_dir = Path(launch.pop("scratch_dir"))
    assert launch == {"handshake_address": "ipc:///h", "rank": 3, "args": arrive}
    assert env["HF_TOKEN"] == "secret"
    assert env["TMPDIR"] == env["VLLM_RPC_BASE_PATH"] == str(scratch_dir)
    assert scratch_dir.parent == private_temp_dir
    assert not await anyio.Path(scratch_dir).exists()  # reaped


@pytest.mark.anyio
async def test_an_interpreter_without_vllm_says_so() -> None:
    with anyio.fail_after(PATIENCE_S), pytest.raises(EngineStartupError) as caught:
        async with EngineClient(engine=VLLMEngine("m", python=sys.executable)):
            pytest.fail("it must not become ready")
    assert caught.value.child_exception == (
        f"ModuleNotFoundError: {sys.executable} has no vllm: let VLLMEngine(python=...) name an interpreter that can "
        "import it"
    )
    assert (caught.value.exit_code, caught.value.stage) == (1, "importing")


@pytest.mark.anyio
async def test_no_such_interpreter() -> None:
    """And no directory is left for it (the leak check sees)."""
    with pytest.raises(EngineStartupError, match="no-such-python"):
        async with EngineClient(engine=VLLMEngine("m", python="/no-such-python")):
            pytest.fail("it must not start")


@pytest.fixture
def launcher(tmp_path: Path, private_temp_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher as in the environment of vLLM: away from the package, with a vLLM that takes long to import."""
    (tmp_path / "vllm.py").write_text("import time; time.sleep(60)")
    (private_temp_dir / "scratch").mkdir()
    launch = {
        "handshake_address": "ipc:///h",
        "rank": 0,
        "scratch_dir": str(private_temp_dir / "scratch"),
        "args": {"model": "m"},
    }
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-S", str(LAUNCHER)]  # -S: no installed packages, ours included
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=env) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        yield process
        process.kill()


def test_the_launcher_ends_with_its_host(launcher: subprocess.Popen[bytes], private_temp_dir: Path) -> None:
    assert launcher.stdin is not None and launcher.stdout is not None
    assert decode_status(launcher.stdout.readline()) == Status("importing")
    launcher.stdin.close()
    assert launcher.wait(PATIENCE_S) == 1
    assert not (private_temp_dir / "scratch").exists()  # nobody else is there to remove it
