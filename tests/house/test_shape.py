"""How long files and functions may be. A longer one has an idea inside it that wants a name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def too_long(source: str) -> Iterator[str]:
    """What is over its limit in ``source``; a function is counted with its decorators and docstring."""
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{lines} lines; {MAX_FILE_LINES} at most"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            if (lines := node.end_lineno - first + 1) > MAX_FUNCTION_LINES:
                yield f"{node.name} (line {first}) has {lines} lines; {MAX_FUNCTION_LINES} at most"


def test_source_files_and_functions_are_short(package_root: Path) -> None:
    found = [
        f"{path.relative_to(package_root)}: {what}"
        for path in sorted(package_root.rglob("*.py"))
        for what in too_long(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 1\n" * MAX_FILE_LINES, 0),
        ("x = 1\n" * (MAX_FILE_LINES + 1), 1),
        ("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1), 0),
        ("async def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES, 1),
        ("@g\ndef f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1), 1),
    ],
)
def test_the_limits_are_exact(source: str, found: int) -> None:
    assert len(list(too_long(source))) == found
