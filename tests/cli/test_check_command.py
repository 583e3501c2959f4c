"""``anyengine check``: what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from engines import mutant

from anyengine import CommandEngine, EmbeddedEngine, VLLMEngine
from anyengine.cli.check_options import CheckOptions
from anyengine.cli.options import parse_arguments
from anyengine.testing.conformance import AttachedEngine, registered


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "anyengine.cli", "check", *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.feature("P06")
@pytest.mark.parametrize("loop", [["--backend", "trio"], ["--uvloop"]])
def test_a_report_in_three_forms(tmp_path: Path, loop: list[str]) -> None:
    junit, plain = tmp_path / "report.xml", tmp_path / "report.json"
    result = run_check(
        *loop, "-k", "HS-*", "-k", "UTL-1*", "--junit", str(junit), "--json", str(plain), "--command", *mutant().argv
    )
    assert (result.returncode, result.stderr.count("Traceback")) == (0, 0), result.stderr
    assert "start and registration\n  pass  HS-01   the engine becomes ready\n" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("22 checks: ")
    assert ET.parse(junit).getroot().attrib["tests"] == "22"
    assert len(json.loads(plain.read_text())["results"]) == 22


def test_a_failure_is_told_and_is_exit_code_1() -> None:
    result = run_check("-k", "HS-*", "--quiet", "--command", *mutant("torch.float32").argv)
    assert result.returncode == 1
    first, *_ = result.stdout.splitlines()
    assert first == "  FAIL  HS-11   what the registration says makes sense"
    assert "torch.float32" in result.stdout and "see protocol.md §4" in result.stdout
    assert result.stderr == ""


def test_a_start_that_fails_is_one_failure_with_the_engines_words() -> None:
    program = "import sys; sys.exit('no weights ' + 60 * 'here or ' + 'there')"
    result = run_check("--command", sys.executable, "-c", program)
    assert result.returncode == 1
    assert result.stdout.count("FAIL") == result.stdout.count("did not become ready\n") == 1
    words = " ".join(result.stdout.split())
    assert "no weights here or" in words and "or there" in words


def test_the_list_starts_nothing() -> None:
    result = run_check("--list", "--vllm", "/no/such/python", "model")
    assert (result.returncode, result.stderr) == (0, "")
    assert [line.split()[0] for line in result.stdout.splitlines()] == [check.check_id for check in registered()]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["model", "--attach", "tcp://127.0.0.1:1"], 2, "name one engine"),
        (["--arg", "a=1"], 2, "--vllm PYTHON MODEL"),
        (["--vllm", "python", "model", "--arg", "novalue"], 2, "NAME=VALUE"),
        (["--attach", "somewhere"], 2, "tcp://HOST:PORT"),
        (["--attach", "tcp://127.0.0.1:99999"], 2, "tcp://HOST:PORT"),
        (["--attach", "tcp://203.0.113.1:1"], 2, "cannot listen there"),
        (["-k", "nothing fits this"], 2, "no check fits"),
        (["--command", "/no/such/program"], 2, "--command /no/such/program"),
        (["--command"], 2, "--command takes a program"),
        (["--vllm", "/no/such/python", "model"], 2, "--vllm /no/such/python"),
        (["--junit", "/no/such/directory/x.xml"], 2, "--junit /no/such/directory"),
        (["--json", "/no/such/directory/x.json"], 2, "--json /no/such/directory"),
        (["--patience", "-1"], 2, "--patience -1 must be"),
        (["--rank", "-1"], 2, "--rank -1 must be"),
    ],
)
def test_wrong_usage_is_a_readable_line(arguments: list[str], code: int, words: str) -> None:
    result = run_check(*arguments)
    assert result.returncode == code, result.stdout + result.stderr
    assert words in result.stderr and "Traceback" not in result.stderr


def target(*arguments: str) -> object:
    options = parse_arguments(["check", *arguments])
    assert isinstance(options, CheckOptions)
    return options.target()


def test_engines_are_named_in_four_ways() -> None:
    assert target() == EmbeddedEngine()
    assert target("smollm2-360m") == EmbeddedEngine(model="smollm2-360m")
    assert target("--command", "engine", "--flag", "-k") == CommandEngine(argv=("engine", "--flag", "-k"))
    assert target("--attach", "tcp://h:1") == AttachedEngine("tcp://h:1", local=False, headless=True)
    assert target("--attach", "tcp://h:1", "--attach-local") == AttachedEngine("tcp://h:1", local=True, headless=False)
    arguments = ["--arg", "max-model-len=8", "--arg", "dtype=float32", "--arg", 'compilation_config={"mode": 0}']
    assert target("--vllm", "python3", "model", *arguments, "--env", "A=b=c") == VLLMEngine(
        "model",
        python="python3",
        args={"max_model_len": 8, "dtype": "float32", "compilation_config": {"mode": 0}},
        env={"A": "b=c"},
    )
