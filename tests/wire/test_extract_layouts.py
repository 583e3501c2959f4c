"""The script that says what a release changed, on sources made from our own tables. Real wheels: tests/interop."""

from __future__ import annotations

import zipfile
from collections import defaultdict
from pathlib import Path

import pytest
from extract_layouts import WHERE, changes, main

from anyengine._wire.layouts import ROWS
from anyengine._wire.methods import METHODS, arity_at

NEWEST = (0, 33, 0)


def sources() -> dict[str, str]:
    """What a release with exactly our newest rows looks like."""
    modules: dict[str, list[str]] = defaultdict(list)
    for message, module in WHERE.items():
        body = [f"    {name}: int = 0" for name in ROWS[message][-1][1]]
        modules[module].append("\n".join([f"class {message}:", "    shared: ClassVar[int] = 1", *body]))
    body = [
        f"    def {method}(self{''.join(f', a{i}=None' for i in range(arity))}): ..."
        for method in METHODS
        if (arity := arity_at(method, NEWEST)) is not None and method != "handle_fault_tolerance"
    ]
    modules["v1/engine/core.py"].append("\n".join(["class EngineCore:", *body, "    def _private(self): ..."]))
    return {module: "\n\n".join(classes) for module, classes in modules.items()}


def unpacked(directory: Path, modules: dict[str, str]) -> str:
    for module, source in modules.items():
        path = directory / "vllm" / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return str(directory)


def test_nothing_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([unpacked(tmp_path, sources()), "0.33.0"]) == 0
    assert "0.33.0: nothing" in capsys.readouterr().out


def test_what_changed_is_told_as_the_rows_to_add(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = sources()
    engine = modules["v1/engine/__init__.py"]
    engine = engine.replace("    priority: int = 0\n", "    urgency: int = 0\n    priority: int = 0\n")
    engine = engine.replace("    kv_hints: int = 0", "    kv_hints: int = 0\n    last: int = 0")
    modules["v1/engine/__init__.py"] = engine.replace("    ec_transfer_params: int = 0\n", "")
    modules["v1/engine/core.py"] = modules["v1/engine/core.py"].replace("def profile(self", "def profile(self, more")
    modules["v1/engine/core.py"] += "\n    def brand_new(self, a): ..."
    modules["multimodal/inputs.py"] += "\n\nclass PlaceholderRange:\n    offset: int\n    length: int\n    other: int"
    wheel = tmp_path / "vllm-0.34.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for module, source in modules.items():
            archive.writestr(f"vllm/{module}", source)
    assert main([str(wheel)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        'EngineCoreRequest: add the row ("0.34.0", "+urgency@13 +last")',
        'EngineCoreOutput: add the row ("0.34.0", "-ec_transfer_params")',
        "PlaceholderRange: has no rows yet; was 'offset length is_embed', is 'offset length other'",
        'methods: "brand_new" takes 1, not None: add ((0, 34, 0), 1)',
        'methods: "profile" takes 6, not 5: add ((0, 34, 0), 6)',
    ]


def test_a_missing_class_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modules = sources() | {"lora/request.py": ""}
    assert main([unpacked(tmp_path, modules), "0.33.0"]) == 1
    assert "LoRARequest: not found in vllm/lora/request.py" in capsys.readouterr().out


def test_a_name_without_a_version_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nameless = tmp_path / "wheel"
    nameless.mkdir()
    assert main([str(nameless)]) == 2
    assert "give it as the second argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ("a b c", "a b c d", "+d"),
        ("a b c", "a x b c", "+x@1"),
        ("a b c", "a c", "-b"),
        ("a b c", "a c b", "-b +b"),
        ("a b c d", "d y a c", "-b -d +d@0 +y@1"),
    ],
)
def test_a_row_leads_from_one_release_to_the_next(before: str, after: str, row: str) -> None:
    assert changes(before.split(), after.split()) == row
