"""What ``import anyengine`` loads, costs and does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

# What the base dependencies bring with them, apart from the standard library.
BASE = {"anyengine", "anyio", "idna", "msgspec", "sniffio", "typing_extensions", "zmq"}
HEAVY = {"gguf", "huggingface_hub", "jinja2", "numpy", "safetensors", "tokenizers", "torch", "transformers"}

BLOCK = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {BASE!r} and top not in sys.stdlib_module_names and not top.startswith(("_", "sitecustomize")):
            raise ModuleNotFoundError(f"not a base dependency: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
import anyengine
for name in anyengine.__all__:
    getattr(anyengine, name)
import anyengine.cli
"""

COST = """
import json, sys, time
before = time.process_time()
import anyengine
for name in anyengine.__all__:  # names are loaded when first used: the honest price is that of all of them
    getattr(anyengine, name)
cost_s = time.process_time() - before
print(json.dumps([cost_s, sorted({name.partition(".")[0] for name in sys.modules})]))
"""

DEPENDENCIES = """
import time
before = time.process_time()
import anyio, msgspec, zmq
from anyio import wait_readable
print(time.process_time() - before)
"""
DEPENDENCIES_S = 0.050
"""What that costs on the machine that the budget is meant for: others are slower, or busier, and so get more."""

QUIET = """
import sys

def refuse(event, arguments):
    if event.startswith(("socket.connect", "socket.gethost", "socket.getaddr", "socket.send", "urllib.")):
        raise RuntimeError(f"{event}: {arguments}")

sys.addaudithook(refuse)
"""

EVERY_MODULE = """
import importlib, pkgutil
import anyengine, anyengine.cli
for module in pkgutil.walk_packages(anyengine.__path__, "anyengine."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def python(source: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.feature("F20")
def test_import_is_cheap_and_loads_nothing_heavy() -> None:
    runs = [json.loads(python(COST)) for _ in range(6)][1:]  # the first one may write bytecode
    costs_s = [cost_s for cost_s, _ in runs]
    dependencies_s = min(float(python(DEPENDENCIES)) for _ in range(5))
    # Neighbours on the machine only ever add, to both.
    assert min(costs_s) < 0.150 * max(1.0, dependencies_s / DEPENDENCIES_S), (costs_s, dependencies_s)
    loaded = set(runs[0][1])
    assert not loaded & HEAVY
    assert loaded & {"trio", "uvloop", "pytest", "hypothesis"} == set()


@pytest.mark.feature("F20")
def test_base_dependencies_suffice_to_import() -> None:
    python(BLOCK)


@pytest.mark.feature("F20")
def test_base_dependencies_are_three(repo_root: Path) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["anyio>=4.14.2", "pyzmq>=27", "msgspec>=0.22"]


@pytest.mark.feature("F23")
@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import anyengine", id="package"),
        pytest.param(EVERY_MODULE, id="every-module", marks=pytest.mark.slow),
    ],
)
def test_import_talks_to_nobody(source: str) -> None:
    python(QUIET + source)


@pytest.mark.feature("F23")
def test_the_network_guard_of_these_tests_works() -> None:
    with pytest.raises(AssertionError, match=r"socket\.connect"):
        python(QUIET + "import socket\nsocket.socket().connect(('127.0.0.1', 9))")
