"""Every shielded section has a time limit, or says why it needs none: no cancellation is held up for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMITED = {"move_on_after", "move_on_at", "fail_after", "fail_at"}

UNLIMITED = {
    "_process/supervisor.py": "ends with the process, which is killed in the end, and abandoned if that does not help",
    "engine/in_process.py": "a thread cannot be killed, and ends with its step",
}
"""Where a shield has no limit of its own, and why that is well."""


def shields(source: Path) -> Iterator[tuple[int, str]]:
    """The line of each call with ``shield=True``, and what is called; and of each ``.shield = ...``."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call):
            if any(keyword.arg == "shield" and getattr(keyword.value, "value", 1) for keyword in node.keywords):
                yield node.lineno, node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        elif isinstance(node, ast.Attribute) and node.attr == "shield" and isinstance(node.ctx, ast.Store):
            yield node.lineno, "assignment"


@pytest.mark.case("K75")
def test_every_shield_has_a_limit(package_root: Path) -> None:
    found = {
        (str(source.relative_to(package_root)), line, call)
        for source in package_root.rglob("*.py")
        for line, call in shields(source)
    }
    assert len(found) > 5
    unlimited = {where for where, _, call in found if call not in LIMITED}
    assert unlimited <= set(UNLIMITED), sorted(found)
    for where in UNLIMITED:
        assert len([call for path, _, call in found if path == where]) == 1


def test_the_check_sees_shields(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "with anyio.CancelScope(shield=True): pass\nscope.shield = True\nwith move_on_after(1, shield=x): pass\n"
    )
    assert sorted(shields(source)) == [(1, "CancelScope"), (2, "assignment"), (3, "move_on_after")]
