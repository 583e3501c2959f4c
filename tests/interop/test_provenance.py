"""Nothing in this package is vLLM's source: no run of lines of the one is found in the other."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN_LINES = 5
"""Of code, that say something: imports, blank lines, comments and single brackets are left out. So are declarations of
fields: names, types and defaults of a message are the protocol, which cannot be written otherwise."""

DECLARATION = re.compile(r"\w+:[^()]+(=[^()]*)?,?")


def said(path: Path) -> Iterator[str]:
    for line in path.read_text("utf-8", "replace").splitlines():
        text = re.sub(r"\s+", "", line.partition("#")[0])
        if len(text) > 12 and not text.startswith(("import", "from")) and not DECLARATION.fullmatch(text):
            yield text


def runs(path: Path) -> Iterator[tuple[str, ...]]:
    lines = list(said(path))
    for at in range(len(lines) - RUN_LINES + 1):
        yield tuple(lines[at : at + RUN_LINES])


@pytest.mark.feature("P19")
def test_no_run_of_lines_is_vllms(vllm_python: str, repo_root: Path) -> None:
    script = "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"
    found = subprocess.run([vllm_python, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    theirs = {run: path for path in Path(found.stdout.strip()).rglob("*.py") for run in runs(path)}
    assert len(theirs) > 100_000
    ours = [(path, run) for path in (repo_root / "src").rglob("*.py") for run in runs(path)]
    assert len(ours) > 5_000
    shared = [
        f"{path.relative_to(repo_root)} and {theirs[run]}:\n  " + "\n  ".join(run)
        for path, run in ours
        if run in theirs
    ]
    assert not shared, "\n".join(shared)


@pytest.mark.feature("P19")
def test_the_notice_and_the_provenance_page_say_so(repo_root: Path) -> None:
    assert "contains no vLLM source code" in " ".join((repo_root / "NOTICE").read_text().split())
    assert "Apache-2.0" in (repo_root / "docs" / "provenance.md").read_text()
