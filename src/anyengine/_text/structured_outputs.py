"""Which backend of an engine enforces a constraint on the output, and in which form it gets it.

Owns what vLLM's front end decides for its engines, which check nothing themselves: the choice of a backend, the
features of JSON schemas that one of them silently ignores, the grammar that stands for a list of choices. Compiles
nothing: what a backend cannot build fails the request in the engine. Facts of vLLM 0.32.0:
``SamplingParams._validate_structured_outputs`` and ``v1/structured_output/``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NoReturn

import msgspec

from anyengine.exceptions import RequestRejected
from anyengine.params import StructuredOutputsParams

__all__ = ["choice_grammar", "settle_structured_outputs"]

_AUTO: Final = ("xgrammar", "guidance", "outlines")  # what "auto" tries, in this order

_MAX_NESTING: Final = 64
_TAG_NESTING: Final = 16  # what a structural tag wraps around its schemas

_NO_REGEX_ANYWHERE: Final = ("unterminated", "unbalanced parenthesis", "nothing to repeat")
"""Complaints of Python's ``re`` that every dialect of regular expressions shares."""


def settle_structured_outputs(
    params: StructuredOutputsParams, setting: str, used: str | None
) -> tuple[StructuredOutputsParams, str]:
    """``params`` in the form that the backend takes, and the backend.

    ``setting`` is the engine's: a backend by vLLM's name, or ``"auto"``. ``used`` is the backend of an earlier request:
    an engine builds one for its whole life, which then enforces also what names another.

    Raises:
        RequestRejected: the constraint is broken, or no backend that the engine can use enforces it.
    """
    _check_content(params)
    if used is not None or setting != "auto":
        backend = used or setting
        if (problem := _unsupported(params, backend)) is not None:
            since = ", which an earlier request has settled for the engine's life" if used and setting == "auto" else ""
            _refuse(params, f"{problem} by the backend {backend!r}{since}", "change it, or start another engine")
    else:
        found = next((name for name in _AUTO if _unsupported(params, name) is None), None)
        if found is None:
            _refuse(params, f"it has what is not supported by any of {', '.join(_AUTO)}", "change it")
        backend = found
    if backend == "xgrammar" and params.choice is not None:
        params = msgspec.structs.replace(params, choice=None, grammar=choice_grammar(params.choice))
    return params, backend


def choice_grammar(choices: Any) -> str:
    """An EBNF grammar of exactly these strings."""
    return "root ::= " + " | ".join([f'"{"".join(map(_escaped, choice))}"' for choice in choices])


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '\\"':
        return f"\\{character}"
    return f"\\u{code:04x}" if code < 0x20 or code == 0x7F else character


# ------------------------------------------------------------------- the content


def _check_content(params: StructuredOutputsParams) -> None:
    if params.json is not None:
        schema = _parsed("json", params.json)
        if not isinstance(schema, Mapping):
            _refuse(params, "a JSON schema is an object", "use a dict, or the JSON text of one")
        _check_nesting(params, schema, _MAX_NESTING)
    if params.structural_tag is not None:
        _check_nesting(params, _parsed("structural_tag", params.structural_tag), _MAX_NESTING + _TAG_NESTING)
    if params.grammar is not None and not params.grammar.strip():
        _refuse(params, "the grammar is blank", "write at least the rule root")
    if params.regex is not None:
        _check_regex(params, params.regex)


def _parsed(kind: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as exc:
        remedy = "use JSON text" + (", or a dict" if kind == "json" else "")
        raise RequestRejected(
            f"structured_outputs: {kind}={value!r:.200} cannot be parsed: {exc}; {remedy}",
            parameter="structured_outputs",
            value=value,
            remedy=remedy,
        ) from exc


def _check_nesting(params: StructuredOutputsParams, value: Any, limit: int) -> None:
    level = [value]
    for _ in range(limit):
        level = [child for node in level for child in _children(node) if isinstance(child, Mapping | list | tuple)]
        if not level:
            return
    _refuse(params, f"objects and arrays are nested more than {limit} deep", "make it flatter, or use $ref")


def _children(node: Any) -> Any:
    return node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()


def _check_regex(params: StructuredOutputsParams, regex: str) -> None:
    if "\0" in regex:
        _refuse(params, "the regex has a NUL character in it", "leave it out: no text has one")
    try:
        re.compile(regex)
    except re.error as exc:
        if any(complaint in exc.msg for complaint in _NO_REGEX_ANYWHERE):
            _refuse(params, f"the regex does not compile: {exc}", "repair it")
    except (RecursionError, OverflowError):
        pass  # too much for Python, which need not be too much for the engine


# ------------------------------------------------------------------- the backends


def _unsupported(params: StructuredOutputsParams, backend: str) -> str | None:
    """What ``backend`` would refuse or, worse, ignore; ``None`` if it enforces all of it."""
    if backend in ("outlines", "lm-format-enforcer"):
        kinds = ("grammar", "structural_tag") + (("json_object",) if backend == "outlines" else ())
        kind = next((kind for kind in kinds if getattr(params, kind) is not None), None)
        return None if kind is None else f"{kind} is not supported"
    if params.json is None or (gaps := _SCHEMA_GAPS.get(backend)) is None:
        return None
    for schema in _subschemas(_parsed("json", params.json)):
        for gap in gaps:
            if (found := gap(schema)) is not None:
                return f"{found} in a JSON schema is not supported"
    return None


def _subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in ``schema``, itself included; not all of them are schemas, which errs on the safe side."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            yield node
        pending.extend(_children(node))


def _types(schema: Mapping[str, Any]) -> set[str]:
    types = schema.get("type")
    return {item for item in (types if isinstance(types, list | tuple) else [types]) if isinstance(item, str)}


def _bounded_pattern(schema: Any) -> bool:
    """Lengths beside a pattern or format: one of the two would be ignored."""
    return (
        isinstance(schema, Mapping)
        and not schema.keys().isdisjoint(("pattern", "format"))
        and not schema.keys().isdisjoint(("minLength", "maxLength"))
    )


_FORMATS: Final = frozenset((
    "email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid", "uri", "uri-reference",
    "uri-template", "json-pointer", "relative-json-pointer",
))  # fmt: skip


def _number_gap(schema: Mapping[str, Any]) -> str | None:
    return "multipleOf" if "multipleOf" in schema and _types(schema) & {"integer", "number"} else None


def _array_gap(schema: Mapping[str, Any]) -> str | None:
    keys = ("uniqueItems", "contains", "minContains", "maxContains")
    return next((key for key in keys if key in schema), None) if "array" in _types(schema) else None


def _string_gap(schema: Mapping[str, Any]) -> str | None:
    if "string" not in _types(schema):
        return None
    if "format" in schema and schema["format"] not in _FORMATS:
        return f"format {schema['format']!r:.40}"
    return "a length beside a pattern or format" if _bounded_pattern(schema) else None


def _object_gap(schema: Mapping[str, Any]) -> str | None:
    if "object" not in _types(schema):
        return None
    if "propertyNames" in schema:
        if _bounded_pattern(schema["propertyNames"]):
            return "a length beside a pattern or format in propertyNames"
        for other in ("patternProperties", "properties"):
            if other in schema:
                return f"propertyNames beside {other}"
        if schema.get("unevaluatedProperties", True) is not True:
            return "propertyNames beside unevaluatedProperties"
    patterns = schema.get("patternProperties")
    if isinstance(patterns, Mapping) and ("properties" in schema or len(patterns) > 1):
        return "patternProperties beside other properties"
    return None


def _all_of_gap(schema: Mapping[str, Any]) -> str | None:
    branches = schema.get("allOf")
    return "allOf of several schemas" if isinstance(branches, list | tuple) and len(branches) > 1 else None


def _pattern_properties_gap(schema: Mapping[str, Any]) -> str | None:
    return "patternProperties" if "patternProperties" in schema else None


_SCHEMA_GAPS: Final[dict[str, tuple[Callable[[Mapping[str, Any]], str | None], ...]]] = {
    "xgrammar": (_number_gap, _array_gap, _string_gap, _object_gap, _all_of_gap),
    "guidance": (_pattern_properties_gap,),
}


def _refuse(params: StructuredOutputsParams, problem: str, remedy: str) -> NoReturn:
    raise RequestRejected(
        f"structured_outputs: {problem}; {remedy}", parameter="structured_outputs", value=params, remedy=remedy
    )
