"""Pages lead where they say, their code compiles, and README, CI and examples say the same."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import feature_index
import pytest

from anyengine.config import EngineSettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

ENGINES: dict[str, Callable[..., object]] = {kind.__name__: kind for kind in get_args(EngineSettings)}

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text()) if found == language]


def anchors(page: Path) -> set[str]:
    """GitHub's: lower case, punctuation gone, spaces to hyphens."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        path, _, anchor = link.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link}: leads out of the project"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_compile(page: Path) -> None:
    for source in blocks(page, "python"):
        compile(source, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_engines_of_python_blocks_can_be_made(page: Path) -> None:
    """Those with literal arguments: their constructors check them."""
    for source in blocks(page, "python"):
        for node in ast.walk(compile(source, str(page), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in ENGINES:
                continue
            try:
                positional = [ast.literal_eval(argument) for argument in node.args]
                named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
            except ValueError:  # names something of the program
                continue
            ENGINES[node.func.id](*positional, **named)


def test_the_readme_begins_with_the_whole_program() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.match(r"# anyengine\n\n```python\n", text)
    example = (ROOT / "docs" / "examples" / "first_answer.py").read_text()
    assert example.endswith("\n\n" + blocks(ROOT / "README.md", "python")[0])


def test_the_readme_has_two_commands() -> None:
    run, test = (command.strip() for command in blocks(ROOT / "README.md", "console"))
    for command in (run, test):
        assert "\n" not in command
        assert "pip install torch==2.13.0 && .venv/bin/pip install" in command
    for backend in ("trio", "asyncio"):
        assert f'.venv/bin/anyengine run "What is the capital of France?" --backend {backend}' in run
    assert test.endswith("&& .venv/bin/nox --no-venv")


def test_ci_runs_the_readme_s_command(tmp_path: Path) -> None:
    """Runs the real script on the real README, with a ``python3`` that stops right after it has been called."""
    (tmp_path / "python3").write_text('#!/bin/sh\necho "python3 $*"\nexit 7\n')
    (tmp_path / "python3").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        f"+ {blocks(ROOT / 'README.md', 'console')[1].strip()}",
        "python3 -m venv .venv",
    ]
    assert done.returncode == 7


def test_what_is_not_done_is_listed() -> None:
    """Every row is shown by a test, or among those that are not; and no mark names a row that there is not."""
    known = {identifier for _, identifier, _, _ in feature_index.rows()}
    done, _, missing = feature_index.render().partition("## Not done")
    shown, listed = (set(re.findall(r"^\| ([A-Z]\d+) \|", part, re.MULTILINE)) for part in (done, missing))
    assert shown | listed == known
    assert not shown & listed


def test_the_feature_index_is_up_to_date() -> None:
    assert feature_index.INDEX.read_text() == feature_index.render(), "run: python tests/docs/feature_index.py"
