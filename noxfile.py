"""Every check of the project, one session each.

``nox`` builds an environment for each session; ``nox --no-venv`` runs them in the environment that nox itself is
installed in, which is what the README's test command and CI do: one environment, built once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "imports", "shape", "docs", "tests", "property"]

# With --no-venv the tools are looked up on PATH; they stand beside nox, whether that environment is activated or not.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# First and alone: an unpinned torch pulls gigabytes of CUDA libraries that no check needs.
TORCH = "torch==2.13.0"


def install(session: nox.Session) -> None:
    """Put the project and its tools into the session's own environment, if it has one."""
    if session.venv_backend != "none":
        session.install(TORCH)
        session.install("-e", ".[dev]")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff (rules and format) and flake8-async."""
    install(session)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    # The engine core is synchronous: a broad except in it swallows no cancellation.
    sources = [path for path in Path("src").rglob("*.py") if "engine" not in path.parts]
    session.run(
        "flake8-async",
        "--anyio",
        "--enable=ASYNC1,ASYNC2,ASYNC900",
        "--disable=ASYNC106",  # dislikes `from anyio import ...`
        "--startable-in-context-manager=own,watch",
        *map(str, sorted([*sources, *Path("docs/examples").rglob("*.py")])),
    )


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict inside; pyright says how complete the types are that users see."""
    install(session)
    session.run("mypy")
    session.run("mypy", "docs/examples", "noxfile.py")
    session.run("pytest", "tests/types", *session.posargs)  # pyright --verifytypes anyengine --ignoreexternal


@nox.session
def imports(session: nox.Session) -> None:
    """Which module may import which, and what ``import anyengine`` costs."""
    install(session)
    session.run("lint-imports", "--no-cache", "--no-logo")
    session.run("pytest", "tests/house/test_imports.py", *session.posargs)


@nox.session
def shape(session: nox.Session) -> None:
    """How long files and functions may be."""
    install(session)
    session.run("pytest", "tests/house/test_shape.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Links lead somewhere, code blocks compile, the feature index is up to date."""
    install(session)
    session.run("pytest", "tests/docs", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything else under tests/: asyncio in debug mode, uvloop and trio in one run."""
    install(session)
    session.run("pytest", "--ignore=tests/docs", "--ignore=tests/types", *session.posargs, env=_profile())


@nox.session(name="property")
def property_(session: nox.Session) -> None:
    """The property tests, as hard as HYPOTHESIS_PROFILE says: ci (default here) or deep."""
    install(session)
    session.run("pytest", "property_tests", *session.posargs, env=_profile())


def _profile() -> dict[str, str]:
    return {"HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci")}
