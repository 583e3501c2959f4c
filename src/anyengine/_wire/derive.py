"""Structs of a release, derived from the canonical (newest) ones and the layout table.

Owns the derivation; must not know any message by name beyond the table's. What other layers see is uniform: a derived
struct answers to every canonical attribute, with the default where its release has no such field.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo

from .layouts import Release, Row, row_at

__all__ = ["StructType", "Written", "decoding_types", "restrict", "writing_types"]

StructType: TypeAlias = type[msgspec.Struct]


class Written(NamedTuple):
    """How a release writes a struct: as ``struct``; its fields ``containing`` hold structs that it writes otherwise."""

    struct: StructType
    containing: tuple[str, ...]


def writing_types(
    canonical: Mapping[str, StructType], rows: Mapping[str, tuple[Row, ...]], release: Release
) -> dict[StructType, Written]:
    """What ``release`` writes otherwise than the canonical structs say; empty when it writes everything as it is."""
    found: dict[StructType, Written] = {}
    for name, struct in canonical.items():  # parts come before what contains them
        names = row_at(rows[name], release) if name in rows else struct.__struct_fields__
        containing = tuple(info.name for info in msgspec.structs.fields(struct) if _mentions(info.type, found))
        if names != struct.__struct_fields__:
            found[struct] = Written(_derive(struct, names, {}), containing)
        elif containing:
            found[struct] = Written(struct, containing)
    return found


def decoding_types(
    canonical: Mapping[str, StructType], rows: Mapping[str, tuple[Row, ...]], release: Release
) -> dict[StructType, StructType]:
    """For each canonical struct that cannot read what ``release`` writes, the struct that can.

    Readers ignore surplus positions and default missing ones, so a layout that only lacks the end needs none.
    """
    found: dict[StructType, StructType] = {}
    for name, struct in canonical.items():
        fields = struct.__struct_fields__
        names = row_at(rows[name], release) if name in rows else fields
        if names != fields[: len(names)] or any(_mentions(info.type, found) for info in msgspec.structs.fields(struct)):
            found[struct] = _derive(struct, names, found)
    return found


def restrict(value: Any, written: Mapping[StructType, Written]) -> Any:
    """``value`` with every struct that ``written`` lists in its written form; ``value`` itself if nothing changes."""
    if type(value) is list and value and type(value[0]) in written:
        return [restrict(item, written) for item in value]
    form = written.get(type(value))
    if form is None:
        return value
    if form.struct is not type(value):
        return form.struct(*[restrict(getattr(value, name, None), written) for name in form.struct.__struct_fields__])
    changes = {}
    for name in form.containing:
        part = getattr(value, name)
        if (changed := restrict(part, written)) is not part:
            changes[name] = changed
    return msgspec.structs.replace(value, **changes) if changes else value


def _derive(struct: StructType, names: tuple[str, ...], parts: Mapping[StructType, StructType]) -> StructType:
    known = {info.name: info for info in msgspec.structs.fields(struct)}
    absent = {name: _default(info) for name, info in known.items() if name not in names}
    return msgspec.defstruct(
        struct.__name__,
        [_field(name, known.get(name), parts) for name in names],
        namespace=absent,
        module=struct.__module__,
        array_like=struct.__struct_config__.array_like,
        gc=False,
    )


def _field(
    name: str, info: FieldInfo | None, parts: Mapping[StructType, StructType]
) -> tuple[str, Any] | tuple[str, Any, Any]:
    if info is None:
        return name, Any, None
    annotation = _substitute(info.type, parts)
    if info.default_factory is not NODEFAULT:
        return name, annotation, msgspec.field(default_factory=info.default_factory)
    return (name, annotation) if info.default is NODEFAULT else (name, annotation, info.default)


def _default(info: FieldInfo) -> Any:
    return None if info.default is NODEFAULT else info.default


def _mentions(annotation: Any, structs: Mapping[StructType, Any]) -> bool:
    return annotation in structs or any(_mentions(arg, structs) for arg in typing.get_args(annotation))


def _substitute(annotation: Any, parts: Mapping[StructType, StructType]) -> Any:
    if not _mentions(annotation, parts):
        return annotation
    if annotation in parts:
        return parts[annotation]
    args = tuple(_substitute(arg, parts) for arg in typing.get_args(annotation))
    origin = typing.get_origin(annotation)
    return typing.Union[args] if origin in (types.UnionType, typing.Union) else origin[args]  # noqa: UP007 -- built at run time
