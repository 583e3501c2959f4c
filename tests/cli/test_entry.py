"""Exit codes and error lines of the program itself, for everything that is refused before an engine starts."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run_cli(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "anyengine.cli", *arguments], input=stdin, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message", "remedy"),
    [
        (["run", "--temperature", "-1", "x"], b"", 2, b"error: temperature", b"  try: use a finite number"),
        (["run", "--max-tokens", "0", "x"], b"", 2, b"error: max_tokens", b"  try: use an int"),
        (["run", "--max-model-len", "1", "x"], b"", 2, b"error: max_model_len", b""),
        (["run", ""], b"", 2, b"error: the prompt is empty", b"  try: "),
        (["run", "  "], b"", 2, b"error: the prompt is empty", b"  try: "),
        (
            ["engine", "--runner", "x", "--handshake", "ipc:///nobody/listens"],
            b"",
            2,
            b"error: runner='x'",
            b"module:factory",
        ),
        (
            ["engine", "--runner", "nomod:f", "--handshake", "ipc:///nobody/listens"],
            b"",
            2,
            b"error: runner='nomod:f' cannot be found",
            b"No module named",
        ),
        (
            ["engine", "--logits-processors", "none", "--handshake", "ipc:///nobody/listens"],
            b"",
            2,
            b"error: logits_processors: 'none' cannot be loaded",
            b"an entry point of the group anyengine.logits_processors",
        ),
        (["bench", "engine", "--dtypes", "foo"], b"", 2, b"error: --dtypes foo", b"bfloat16"),
        (["bench", "engine", "--batch-sizes", "1,x"], b"", 2, b"error: --batch-sizes", b"1,8,32"),
        (["bench", "engine", "--rounds", "0"], b"", 2, b"error: --rounds 0", b"at least 1"),
        (
            ["engine", "/nope", "-q", "--handshake", "ipc:///nobody/listens"],
            b"",
            1,
            b"error: ",
            b"/nope does not exist",
        ),
        (["run", "-"], b"\n", 2, b"error: the prompt is empty", b"  try: "),
        (["run", "-"], b"\xff", 2, b"error: standard input is not UTF-8", b"  try: "),
    ],
)
def test_bad_input_is_a_readable_line(
    arguments: list[str], stdin: bytes, code: int, message: bytes, remedy: bytes
) -> None:
    result = run_cli(*arguments, stdin=stdin)
    assert (result.returncode, result.stdout) == (code, b"")
    assert result.stderr.startswith(message)
    assert remedy in result.stderr
    assert b"Traceback" not in result.stderr


def test_traceback_shows_where() -> None:
    result = run_cli("run", "--traceback", "--temperature", "-1", "x")
    assert result.returncode == 2
    assert b"Traceback" in result.stderr


@pytest.mark.feature("F20")
def test_help_loads_no_heavy_package() -> None:
    program = (
        "import sys\n"
        "from anyengine.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print({'torch', 'transformers', 'tokenizers', 'numpy', 'jinja2'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.rstrip().endswith("set()")
    assert "What is the capital of France?" in result.stdout
