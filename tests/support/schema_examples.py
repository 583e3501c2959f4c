"""JSON schemas, and which of them a backend of structured outputs enforces; vLLM's front end is asked for the truth."""

from __future__ import annotations

from typing import Any

__all__ = ["ENFORCED", "GAPS", "PATTERNS"]

GAPS: list[tuple[dict[str, Any], str]] = [  # a schema that xgrammar takes and does not enforce; what is said of it
    ({"type": "integer", "multipleOf": 5}, "multipleOf"),
    ({"type": ["null", "number"], "multipleOf": 0.5}, "multipleOf"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "string", "format": "isbn"}, "isbn"),
    ({"type": "string", "pattern": "a+", "maxLength": 3}, "length beside a pattern"),
    ({"type": "object", "propertyNames": {"pattern": "a", "minLength": 1}}, "propertyNames"),
    ({"type": "object", "propertyNames": {}, "properties": {}}, "propertyNames beside properties"),
    ({"type": "object", "propertyNames": {}, "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"allOf": [{"type": "string"}, {"enum": ["a"]}]}, "allOf"),
    ({"type": "object", "properties": {"a": {"anyOf": [{"type": "array", "minContains": 1}]}}}, "minContains"),
]
PATTERNS = {"type": "object", "patternProperties": {"^a": {}, "^b": {}}}
ENFORCED: list[dict[str, Any]] = [
    {"type": "object", "properties": {"multipleOf": {"type": "string"}}},
    {"type": "string", "format": "date-time"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2},
    {"allOf": [{"type": "string"}]},
    {"type": "object", "patternProperties": {"^a": {}}},
    {"type": "string", "maxLength": 3},
]
