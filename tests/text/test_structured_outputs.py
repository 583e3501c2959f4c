"""Which backend enforces a constraint, and what is refused because none would."""

from __future__ import annotations

import json
from typing import Any

import pytest
from schema_examples import ENFORCED, GAPS, PATTERNS

from anyengine import RequestRejected, StructuredOutputsParams
from anyengine._text import settle_structured_outputs
from anyengine._text.structured_outputs import choice_grammar


def settle(setting: str = "auto", used: str | None = None, **constraint: Any) -> tuple[StructuredOutputsParams, str]:
    return settle_structured_outputs(StructuredOutputsParams(**constraint), setting, used)


@pytest.mark.parametrize("constraint", [{"regex": "a+"}, {"grammar": 'root ::= "a"'}, {"json_object": True}])
def test_xgrammar_is_the_first_choice(constraint: dict[str, Any]) -> None:
    params, backend = settle(**constraint)
    assert (params, backend) == (StructuredOutputsParams(**constraint), "xgrammar")


@pytest.mark.parametrize("schema", ENFORCED)
def test_schemas_that_xgrammar_enforces(schema: dict[str, Any]) -> None:
    assert settle(json=schema)[1] == settle(json=json.dumps(schema))[1] == "xgrammar"


@pytest.mark.parametrize(("schema", "hint"), GAPS)
def test_what_a_backend_would_ignore_goes_to_another_or_is_refused(schema: dict[str, Any], hint: str) -> None:
    assert settle(json=schema)[1] == settle(json=json.dumps(schema))[1] == "guidance"
    for setting, used in (("xgrammar", None), ("auto", "xgrammar"), ("xgrammar", "xgrammar")):
        with pytest.raises(RequestRejected, match=hint) as caught:
            settle(setting, used, json=schema)
        assert (caught.value.parameter, bool(caught.value.remedy)) == ("structured_outputs", True)


def test_the_third_choice() -> None:
    assert settle(json=PATTERNS)[1] == "outlines"
    with pytest.raises(RequestRejected, match="earlier request"):
        settle("auto", "guidance", json=PATTERNS)
    for backend, constraint in (("outlines", {"json_object": True}), ("lm-format-enforcer", {"grammar": "root ::= x"})):
        with pytest.raises(RequestRejected, match="not supported by the backend"):
            settle(backend, **constraint)  # type: ignore[arg-type]


def test_the_first_backend_stays() -> None:
    for backend in ("guidance", "outlines"):
        assert settle("auto", backend, regex="a")[1] == backend


def test_choices_become_a_grammar_where_one_is_needed() -> None:
    params, _ = settle(choice=["a", 'say "b"\\\n', "\x07ü"])
    assert params.choice is None
    assert (
        params.grammar
        == 'root ::= "a" | "say \\"b\\"\\\\\\u000a" | "\\u0007ü"'
        == choice_grammar(["a", 'say "b"\\\n', "\x07ü"])
    )
    assert settle("guidance", choice=["a"])[0].choice == ("a",)


def nested(depth: int) -> Any:
    return {} if depth == 1 else {"properties": nested(depth - 1)}


@pytest.mark.parametrize(
    ("constraint", "hint"),
    [
        ({"json": "{"}, "cannot be parsed"),
        ({"json": "[" * 100_000}, "cannot be parsed"),
        ({"json": "true"}, "is an object"),
        ({"json": nested(65)}, "64 deep"),
        ({"json": json.dumps(nested(65))}, "64 deep"),
        ({"structural_tag": json.dumps(nested(81))}, "80 deep"),
        ({"structural_tag": "no json"}, "cannot be parsed"),
        ({"regex": "(a"}, "does not compile"),
        ({"regex": "a)"}, "does not compile"),
        ({"regex": "[a"}, "does not compile"),
        ({"regex": "*a"}, "does not compile"),
    ],
)
def test_broken_constraints(constraint: dict[str, Any], hint: str) -> None:
    with pytest.raises(RequestRejected, match=hint) as caught:
        settle(**constraint)
    assert caught.value.parameter == "structured_outputs"


@pytest.mark.parametrize(
    ("constraint", "hint"), [({"json": "   "}, "blank"), ({"grammar": " \n"}, "blank"), ({"regex": "a\0"}, "NUL")]
)
def test_constraints_that_say_nothing(constraint: dict[str, Any], hint: str) -> None:
    with pytest.raises(RequestRejected, match=hint) as caught:
        StructuredOutputsParams(**constraint)
    assert [caught.value.parameter] == list(constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": nested(64)},
        {"structural_tag": json.dumps(nested(80))},
        {"regex": r"\p{L}+"},
        {"regex": "(" * 5000 + ")" * 5000},
    ],
)
def test_what_is_left_to_the_engine(constraint: dict[str, Any]) -> None:
    assert settle(**constraint)[1] == "xgrammar"
