"""The environment variables of vLLM that stand in for settings which nobody has made."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from child_scripts import Transcript
from engines import toy

import anyengine._client.session.defaults as defaults
from anyengine import EmbeddedEngine, EngineClient, EngineCoreClient, VLLMEngine
from anyengine._environment import VARIABLES, Variable
from anyengine._process.launch import launch_engine
from anyengine._transport.endpoints import open_endpoints

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"


@pytest.mark.feature("F10")
@pytest.mark.parametrize("variable", VARIABLES, ids=lambda variable: variable.name)
def test_each_has_a_default_a_clear_refusal_and_a_line_in_the_documentation(variable: Variable[Any]) -> None:
    assert variable.value({}) == variable.value({variable.name: " "}) == variable.default
    with pytest.raises(ValueError, match=f"{variable.name}='no such thing' must be {variable.expected}"):
        variable.value({variable.name: "no such thing"})
    assert f"`{variable.name}`" in DOCUMENT.read_text()


@pytest.mark.feature("F10")
def test_start_up_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "77")
    assert EngineClient().core._settings.startup_timeout_s == 77
    assert EngineClient(startup_timeout_s=5).core._settings.startup_timeout_s == 5
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "-1")
    with pytest.raises(ValueError, match="VLLM_ENGINE_READY_TIMEOUT_S='-1' must be a number of seconds above 0"):
        EngineClient()
    assert EngineClient(startup_timeout_s=5).core._settings.startup_timeout_s == 5


@pytest.mark.feature("F10")
def test_time_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "50")
    assert EngineCoreClient(VLLMEngine("m"))._settings.shutdown_grace_s == 65
    theirs = VLLMEngine("m", env={"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "7"})
    assert EngineCoreClient(theirs)._settings.shutdown_grace_s == 22
    child = launch_engine(
        VLLMEngine("m", python=sys.executable, env=dict(theirs.env)), handshake_address="ipc:///h", rank=0
    )
    try:
        assert child._orphans_grace_s == 7
    finally:
        child.reap()


async def check_directories(base: Path) -> None:
    with open_endpoints() as endpoints:
        assert endpoints.input_address.startswith(f"ipc://{base}/anyengine-")
    child, said = (
        launch_engine(VLLMEngine("m", python=sys.executable), handshake_address="ipc:///h", rank=0),
        Transcript(),
    )
    try:
        assert child._scratch_dir is not None and child._scratch_dir.path.parent == base
        await said.watch(child)
    finally:
        child.reap()


@pytest.mark.anyio
@pytest.mark.blocking_ok
@pytest.mark.feature("F10")
async def test_where_private_directories_are_made(monkeypatch: pytest.MonkeyPatch, private_temp_dir: Path) -> None:
    base = private_temp_dir / "b"
    await anyio.Path(base).mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(base))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(private_temp_dir))
    with anyio.fail_after(30):
        await check_directories(base)
        async with EngineClient(engine=toy()) as client:
            assert client.core.session.endpoints.input_address.startswith(f"ipc://{base}/")
    assert not list(base.iterdir())
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(base / "nowhere"))
    with pytest.raises(ValueError, match=r"VLLM_RPC_BASE_PATH=.*must be a directory that exists"):
        open_endpoints()
    base.rmdir()


LIMITS = """
import json
from anyengine import SamplingParams
accepted = []
for given in ({"n": 3}, {"n": 4}, {"bad_words": ["a", "b"]}, {"bad_words": ["a", "b", "c"]}):
    try:
        SamplingParams(**given)
        accepted.append(True)
    except ValueError:
        accepted.append(False)
print(json.dumps(accepted))
"""


@pytest.mark.feature("F10")
def test_limits_of_requests() -> None:
    def run(n: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "VLLM_MAX_N_SEQUENCES": n, "VLLM_MAX_NUM_BAD_WORDS": "2", "PYTHONPATH": "src"}
        root = DOCUMENT.parents[1]
        return subprocess.run([sys.executable, "-c", LIMITS], cwd=root, env=env, capture_output=True, text=True)

    assert json.loads(run("3").stdout) == [True, False, True, False]
    assert "VLLM_MAX_N_SEQUENCES='0' must be a whole number of at least 1" in run("0").stderr


@pytest.mark.feature("F10")
def test_pickles_are_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    defaults._warn_once.cache_clear()
    EngineCoreClient(VLLMEngine("m", env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "0"}))
    assert not caplog.records
    EngineCoreClient(VLLMEngine("m", env={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    EngineCoreClient()
    (record,) = caplog.records
    assert record.message.startswith("VLLM_ALLOW_INSECURE_SERIALIZATION is set, and this client never unpickles")


def test_values_of_an_environment_are_not_shown() -> None:
    engine = VLLMEngine("m", args={"max_model_len": 8}, python="p", env={"HF_TOKEN": "a secret"})
    assert repr(engine) == (
        "VLLMEngine('m', args={'max_model_len': 8}, python='p', env={'HF_TOKEN': '...'}, model_dir=None)"
    )
    with pytest.raises(ValueError, match="not both") as caught:
        EngineClient("model", engine=engine)
    assert "secret" not in str(caught.value)


ECHO_ENVIRONMENT = """#!{python} -SE
import json, os
print(json.dumps(dict(os.environ)), flush=True)
"""


@pytest.mark.anyio
@pytest.mark.blocking_ok
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, {"GOMP_SPINCOUNT": "5000", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ({"OMP_WAIT_POLICY": "active"}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}),
        ({"GOMP_SPINCOUNT": "7", "GLIBC_TUNABLES": "x=1"}, {"GOMP_SPINCOUNT": "7", "GLIBC_TUNABLES": "x=1"}),
    ],
    ids=["nothing chosen", "wait policy chosen", "all chosen"],
)
async def test_our_engine_is_tuned_where_the_user_has_not_chosen(
    chosen: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(ECHO_ENVIRONMENT.format(python=sys.executable))
    python.chmod(0o755)
    names = ("GOMP_SPINCOUNT", "GLIBC_TUNABLES", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", str(python))
    child, said = launch_engine(EmbeddedEngine(), handshake_address="ipc:///h"), Transcript()
    try:
        await said.watch(child)
        environment = json.loads(said.stdout[0])
    finally:
        child.reap()
    assert {name: environment[name] for name in names if name in environment} == {**chosen, **expected}
