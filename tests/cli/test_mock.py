"""``anyengine mock``: a script made of options, and an engine that a client joins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from anyengine import EngineClient, EngineDeadError, RemoteEngine, SamplingParams, Status
from anyengine.cli.mock import MockOptions, parse_fault
from anyengine.cli.options import parse_arguments
from anyengine.testing.scripted import Fault, Script, expected_tokens, read_records

PLACE = "--handshake tcp://127.0.0.1:29550"


def script_of(arguments: str) -> Script:
    options = parse_arguments(["mock", *arguments.split()])
    assert isinstance(options, MockOptions)
    return options.make_script()


def test_options_become_a_script(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"stray_outputs": 1, "step_interval_s": 9, "registration": {"dtype": "bfloat16"}}')
    typed = f"{PLACE} --script {file} --ttft 0.5 --tpot 0.25 --jitter 0.1 --seed 3 --max-running 2 --max-model-len 64"
    assert script_of(f"{typed} --late-outputs 4 --fault die@add:3 --fault slow=2@7") == Script(
        stray_outputs=1,
        first_token_delay_s=0.5,
        step_interval_s=0.25,
        jitter=0.1,
        seed=3,
        max_running=2,
        registration={"dtype": "bfloat16", "max_model_len": 64},
        outputs_after_abort=4,
        faults=(Fault(do="kill", direction="in", kind="add", nth=3), Fault(do="sleep", seconds=2.0, nth=7)),
    )
    assert script_of(PLACE) == Script()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("hang@outputs:5", Fault(do="hang", kind="outputs", nth=5)),
        ("exit=3@in:2", Fault(do="exit", exit_code=3, direction="in", nth=2)),
        ("kill=SIGSEGV@out:9", Fault(do="kill", signal="SIGSEGV", nth=9)),
        ("hang@is_sleeping:1", Fault(do="hang", direction="in", kind="is_sleeping")),
        ("malformed@reply:1", Fault(do="garbage", kind="reply", nth=1)),
        ("huge=100@4", Fault(do="huge", size_bytes=100, nth=4)),
    ],
)
def test_faults_are_spelt_in_a_word(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text", ["kill", "explode@1", "hang=3@1", "kill@0", "garbage@add:1", "sleep=long@1", "die@foo:1", "die@ad:1"]
)
def test_other_faults_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fault="):
        parse_fault(text)


def mock(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "anyengine.cli", "mock", *arguments]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_bad_options_are_told_in_a_line(tmp_path: Path) -> None:
    for arguments in (
        ["--handshake", "nowhere"],
        [*PLACE.split(), "--jitter", "2"],
        [*PLACE.split(), "--fault", "x"],
        [*PLACE.split(), "--script", "/nope"],
    ):
        with mock(*arguments) as process:
            assert process.stderr is not None
            assert process.stderr.read().startswith(b"error: ")
            assert process.wait(20) == 2


@pytest.mark.feature("F18")
def test_a_client_of_ours_joins_it(tmp_path: Path) -> None:
    """Tokens, a log, and a death by its own fault, which exits with its code; another one ends by SIGTERM."""
    started: list[subprocess.Popen[bytes]] = []

    def join(status: Status) -> None:
        options = ["--handshake", status.detail, "--log", str(tmp_path / "log"), "--fault", "exit=9@add:2"]
        started.append(mock(*options))

    async def main() -> None:
        engine = RemoteEngine(handshake="tcp://127.0.0.1:*")
        with anyio.fail_after(30):
            async with EngineClient(engine=engine, on_progress=join) as client:
                outputs = [out async for out in client.generate([1], SamplingParams(max_tokens=5))]
                assert [token for out in outputs for token in out.token_ids] == expected_tokens([1], 5)
                with pytest.raises(EngineDeadError):
                    async for _ in client.generate([2]):
                        pass

    anyio.run(main)
    (process,) = started
    with process:
        assert process.wait(20) == 9
        assert process.stderr is not None
        assert b"a mock engine for the front end" in process.stderr.read()
    assert [one.kind for one in read_records(tmp_path / "log") if one.kind == "add"] == ["add"] * 2
    assert json.loads((tmp_path / "log").read_text().splitlines()[0])[:3] == ["in", 1, "init"]


def test_a_signal_ends_it() -> None:
    with mock("--handshake", "ipc:///nowhere/at/all", "-q") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
