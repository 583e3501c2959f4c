"""Structs of a release, derived from the canonical (newest) ones and the layout table.

Owns the derivation; must not know any message by name. What other layers see is uniform: a derived struct answers to
every canonical attribute, with the default where its release has no such field.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo

from anyengine.exceptions import EncodeError

from .layouts import LEGACY, LOSABLE

__all__ = ["StructType", "Written", "decoding_types", "keeping_later", "restrict", "writing_types"]

StructType: TypeAlias = type[msgspec.Struct]
_Layout: TypeAlias = Mapping[str, tuple[str, ...]]


class Written(NamedTuple):
    """How a release writes a struct: as ``struct``; its fields ``containing`` hold structs that it writes otherwise.

    ``readers`` give the values of ``struct``'s fields; ``refused`` are the attributes it has no place for, with the
    only value that may therefore be lost.
    """

    struct: StructType
    readers: tuple[Callable[[Any], Any], ...]
    containing: tuple[str, ...]
    refused: tuple[tuple[str, Any], ...]


def writing_types(canonical: Mapping[str, StructType], layout: _Layout) -> dict[StructType, Written]:
    """What a release writes otherwise than the canonical structs say; empty when it writes everything as it is."""
    found: dict[StructType, Written] = {}
    for message, struct in canonical.items():  # parts come before what contains them
        names = layout.get(message, struct.__struct_encode_fields__)
        infos = msgspec.structs.fields(struct)
        containing = tuple(info.name for info in infos if _mentions(info.type, found))
        if names != struct.__struct_encode_fields__:
            known = {info.encode_name: info for info in infos}
            readers = tuple(attrgetter(known[name].name) if name in known else _legacy_reader(name) for name in names)
            found[struct] = Written(_derive(struct, names, {}), readers, containing, _refused(message, infos, names))
        elif containing:
            found[struct] = Written(struct, (), containing, ())
    return found


def decoding_types(canonical: Mapping[str, StructType], layout: _Layout) -> dict[StructType, StructType]:
    """For each canonical struct that cannot read what a release writes, the struct that can.

    Readers ignore surplus positions and default missing ones, so a layout that only lacks the end needs none; nor does
    a map, unless it has keys that only this release has.
    """
    found: dict[StructType, StructType] = {}
    for message, struct in canonical.items():
        fields = struct.__struct_encode_fields__
        names = layout.get(message, fields)
        array_like = struct.__struct_config__.array_like
        differs = names != fields[: len(names)] if array_like else not set(names) <= set(fields)
        if differs or any(_mentions(info.type, found) for info in msgspec.structs.fields(struct)):
            if not array_like:  # missing keys cost nothing, and every canonical field stays one
                names = (*fields, *(name for name in names if name not in fields))
            found[struct] = _derive(struct, names, found)
    return found


def keeping_later(part: StructType, whole: StructType, names: Sequence[str]) -> StructType:
    """``whole``, read with ``names`` as further positions of each ``part`` in it, which is an array; a part tells what
    it has of them as ``surplus``."""

    def surplus(self: Any) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    longer = msgspec.defstruct(
        part.__name__,
        [(name, Any, None) for name in names],
        namespace={"surplus": property(surplus)},
        bases=(part,),
        module=part.__module__,
        array_like=True,
        gc=False,
    )
    return _derive(whole, whole.__struct_encode_fields__, {part: longer})


_COMPARABLE = (bool, int, float, str, bytes, list, tuple, dict)
"""Others may answer a comparison with anything, as arrays do; no default is one of them."""


def restrict(value: Any, written: Mapping[StructType, Written]) -> Any:
    """``value`` with every struct that ``written`` lists in its written form; ``value`` itself if nothing changes.

    Raises:
        EncodeError: a field is set that the release has no place for, and that must not be lost.
    """
    if type(value) is list and value and type(value[0]) in written:
        return [restrict(item, written) for item in value]
    form = written.get(type(value))
    if form is None:
        return value
    for name, losable in form.refused:
        part = getattr(value, name)
        if part is not losable and not (isinstance(part, _COMPARABLE) and part == losable):
            raise _no_place(value, name, part)
    if form.readers:
        names = form.struct.__struct_fields__
        return form.struct(*[_part(name, read(value), written) for name, read in zip(names, form.readers, strict=True)])
    changes = {}
    for name in form.containing:
        part = getattr(value, name)
        if (changed := _part(name, part, written)) is not part:
            changes[name] = changed
    return msgspec.structs.replace(value, **changes) if changes else value


def _part(name: str, value: Any, written: Mapping[StructType, Written]) -> Any:
    try:
        return restrict(value, written)
    except EncodeError as exc:
        exc.field = f"{name}.{exc.field}"
        raise


def _no_place(value: Any, name: str, part: Any) -> EncodeError:
    what = type(value).__name__.removeprefix("Wire")
    return EncodeError(
        f"{what}.{name}={part!r:.80} cannot be sent: the engine's release has no such field, or may have none",
        field=name,
        type_name=type(part).__qualname__,
    )


def _refused(message: str, infos: tuple[FieldInfo, ...], names: tuple[str, ...]) -> tuple[tuple[str, Any], ...]:
    losable = LOSABLE.get(message)
    if losable is None:  # an engine's message: a reader of that release never knew of it
        return ()
    return tuple(
        (info.name, _default(info))
        for info in infos
        if info.encode_name not in names and info.encode_name not in losable
    )


def _legacy_reader(name: str) -> Callable[[Any], Any]:
    legacy = LEGACY.get(name)
    if legacy is None or legacy.path is None:
        default = legacy.default if legacy else None
        return lambda value: getattr(value, name, default)
    default, path = legacy.default, legacy.path.split(".")

    def read(value: Any) -> Any:
        for step in path:
            value = getattr(value, step, None)
        return default if value is None else value

    return read


def _derive(struct: StructType, names: tuple[str, ...], parts: Mapping[StructType, StructType]) -> StructType:
    known = {info.encode_name: info for info in msgspec.structs.fields(struct)}
    fields = [_field(name, known.get(name), parts) for name in names]
    config = struct.__struct_config__
    computed = {name: value for name, value in vars(struct).items() if isinstance(value, property)}
    return msgspec.defstruct(
        struct.__name__,
        fields,
        namespace=computed | {info.name: _stand_in(info, names) for name, info in known.items() if name not in names},
        bases=struct.__bases__ if struct.__bases__ != (msgspec.Struct,) else None,
        module=struct.__module__,
        array_like=config.array_like,
        omit_defaults=config.omit_defaults,
        rename={field[0]: name for field, name in zip(fields, names, strict=True)},
        gc=False,
    )


def _field(
    name: str, info: FieldInfo | None, parts: Mapping[StructType, StructType]
) -> tuple[str, Any] | tuple[str, Any, Any]:
    if info is None:
        return name, Any, None
    annotation = _substitute(info.type, parts)
    if info.default_factory is not NODEFAULT:
        return info.name, annotation, msgspec.field(default_factory=info.default_factory)
    return (info.name, annotation) if info.default is NODEFAULT else (info.name, annotation, info.default)


def _stand_in(info: FieldInfo, names: tuple[str, ...]) -> Any:
    """What a struct answers for a field that its release lacks: older fields that say the same, or the default."""
    sources = {
        legacy.path.rpartition(".")[2]: name
        for name in names
        if (legacy := LEGACY.get(name)) and legacy.path and legacy.path.startswith(f"{info.name}.")
    }
    if not sources:
        return _default(info)
    part = next(arg for arg in typing.get_args(info.type) if isinstance(arg, type) and issubclass(arg, msgspec.Struct))
    return property(lambda self: part(**{field: getattr(self, name) for field, name in sources.items()}))


def _default(info: FieldInfo) -> Any:
    if info.default_factory is not NODEFAULT:
        return info.default_factory()
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
