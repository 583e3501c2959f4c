"""Programs written for vLLM's AsyncLLM run against the embedded engine when nothing but their imports is changed.

``programs/`` has them as they are for vLLM: the calls of vLLM's own asynchronous examples, in our words
(docs/migration.md says which of those there are, and which this is about).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from built_tokenizers import byte_level, write_model
from tiny_models import make_tiny_model

PROGRAMS = Path(__file__).parent / "programs"
IMPORT = re.compile(r"^from vllm[\w.]* import ", re.MULTILINE)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, byte_level())
    return make_tiny_model("llama", directory, vocab_size=400)


def with_our_imports(program: str) -> str:
    """``program``, with nothing else changed."""
    changed = IMPORT.sub("from anyengine.compat import ", program)
    assert "vllm" not in "".join(line for line in changed.splitlines() if "import" in line)
    differing = [old for old, new in zip(program.splitlines(), changed.splitlines(), strict=True) if old != new]
    assert differing and all(IMPORT.match(line) for line in differing)
    return changed


def run(*command: object) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
    assert "Error" not in done.stderr and "Warning" not in done.stderr, done.stderr


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with the programs, their imports changed."""
    for source in PROGRAMS.glob("*.py"):
        (tmp_path / source.name).write_text(with_our_imports(source.read_text(encoding="utf-8")), encoding="utf-8")
    return tmp_path


@pytest.mark.slow
@pytest.mark.feature("P10")
def test_a_program_runs_with_only_its_imports_changed(programs: Path, model_dir: Path) -> None:
    """And leaves nothing behind, which the leak check of every test sees to."""
    run(programs / "streaming.py", model_dir)


TOGETHER = """
import runpy, sys
from msgspec.structs import replace
from anyengine.compat import AsyncEngineArgs

made = AsyncEngineArgs.engines
AsyncEngineArgs.engines = lambda self: [replace(engine, in_process=True) for engine in made(self)]
model, *programs = sys.argv[1:]
for program in programs:
    sys.argv = [program, "--model", model] if "server" in program else [program, model]
    runpy.run_path(program, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.feature("P10")
def test_the_other_programs_with_engines_in_threads(programs: Path, model_dir: Path) -> None:
    """In one interpreter, which loads torch once: a process of its own for each engine is the test above."""
    others = [programs / f"{name}.py" for name in ("pause_resume", "data_parallel", "demo_server")]
    (programs / "together.py").write_text(TOGETHER, encoding="utf-8")
    run(programs / "together.py", model_dir, *others)
