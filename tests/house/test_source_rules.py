"""Rules about what the source may import, read from the source itself, lazy imports included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PICKLERS = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
BACKENDS = {"asyncio", "curio", "sniffio", "trio", "uvloop"}
WAKE_UP_MODULE = "_client/session/wakeup.py"
PROGRAMS_OF_USERS = {f"bench/contestants/{name}.py" for name in ("streaming", "vllm_streaming")}


def imported_modules(source: str) -> Iterator[str]:
    """The top-level names of everything that ``source`` imports, anywhere in it, ``import_module("...")`` included."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.Call(
                func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name.partition(".")[0]


def importers(package_root: Path, banned: set[str]) -> set[str]:
    return {
        str(path.relative_to(package_root))
        for path in package_root.rglob("*.py")
        if banned & set(imported_modules(path.read_text()))
    }


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "importlib.import_module('pickle')",
        "__import__('pickle.x')",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert list(imported_modules(source)) == ["pickle"]


@pytest.mark.feature("F06")
def test_nothing_pickles(package_root: Path) -> None:
    assert importers(package_root, PICKLERS) == set()


@pytest.mark.feature("F06")
def test_no_loader_unpickles(package_root: Path) -> None:
    """``torch.load`` reads pickles unless it is told not to."""
    calls = {
        f"{path.relative_to(package_root)}:{node.lineno}"
        for path in package_root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
        if not any(keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
    }
    assert calls == set()


@pytest.mark.feature("L25")
def test_one_module_knows_the_backends(package_root: Path) -> None:
    assert importers(package_root, BACKENDS) <= {WAKE_UP_MODULE, *PROGRAMS_OF_USERS}
