"""Rules for values that users write: each checks one value, and gives it back in the form that is kept.

Owns the wording of refusals (parameter, value, remedy); must not know any parameter by name.
"""

from __future__ import annotations

import copy
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, NoReturn, TypeAlias, TypeVar

import msgspec

from anyengine.exceptions import RequestRejected

__all__ = [
    "INT64_MAX",
    "INT64_MIN",
    "UINT64_MAX",
    "Rule",
    "a_type",
    "apply_rules",
    "flag",
    "given",
    "instance",
    "integer",
    "integers",
    "mapping",
    "nested_integers",
    "number",
    "record",
    "reject",
    "strings",
    "text",
]

Rule: TypeAlias = Callable[[str, Any], Any]

T = TypeVar("T")

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1


def reject(parameter: str, value: Any, problem: str, remedy: str) -> NoReturn:
    """Refuse ``value``.

    Raises:
        RequestRejected: always.
    """
    raise RequestRejected(
        f"{parameter}={reprlib.repr(value)} {problem}", parameter=parameter, value=value, remedy=remedy
    )


def a_type(value: Any) -> str:
    """The type of ``value`` with its article: ``"a str"``, ``"an int"``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def instance(name: str, value: Any, kind: type[T]) -> T:
    """``value``, which must be a ``kind``: there is no reading one out of a dict.

    Raises:
        RequestRejected: it is something else.
    """
    if not isinstance(value, kind):
        reject(name, value, f"is {a_type(value)}", f"use {kind.__name__}(...)")
    return value


def given(name: str, value: T | None, kind: type[T]) -> T:
    """:func:`instance`, or the ``kind`` of all defaults where ``value`` is ``None``.

    Raises:
        RequestRejected: it is something else.
    """
    return kind() if value is None else instance(name, value, kind)


def apply_rules(record: msgspec.Struct, rules: Mapping[str, Rule]) -> None:
    """Check each field of ``record`` and keep what its rule gives back. For ``__post_init__`` of frozen structs.

    Raises:
        RequestRejected: the first value that breaks its rule.
    """
    for name, rule in rules.items():
        value = getattr(record, name)
        kept = rule(name, value)
        if kept is not value:
            msgspec.structs.force_setattr(record, name, kept)


def _range(low: float | None, high: float | None, above: float | None) -> str:
    floor = f"at least {low}" if low is not None else f"above {above}" if above is not None else ""
    ceiling = f"at most {high}" if high is not None else ""
    return " and ".join(part for part in (floor, ceiling) if part)


def integer(low: int = INT64_MIN, high: int = UINT64_MAX, *, optional: bool = False) -> Rule:
    """An int from ``low`` to ``high``. A bool is not an int; numpy's integers are."""
    limits = (
        _range(low if low != INT64_MIN else None, high if high != UINT64_MAX else None, None) or "of at most 64 bits"
    )
    remedy = f"use an int {limits}" + (", or None" if optional else "")

    def rule(name: str, value: Any) -> int | None:
        if value is None and optional:
            return None
        try:
            number = operator.index(value)
        except TypeError:
            reject(name, value, f"is {a_type(value)}, not an int", remedy)
        if isinstance(value, bool):
            reject(name, value, "is a bool, not an int", remedy)
        if not low <= number <= high:
            reject(name, value, "is out of range", remedy)
        return value if type(value) is int else number

    return rule


def number(low: float | None = None, high: float | None = None, *, above: float | None = None) -> Rule:
    """A finite float (or int) within the limits; ``above`` is an excluded lower limit."""
    remedy = f"use a finite number {_range(low, high, above)}".rstrip()

    def rule(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            reject(name, value, f"is {a_type(value)}, not a number", remedy)
        try:
            kept = float(value)
        except OverflowError:  # an int beyond any float
            kept = math.inf
        if not math.isfinite(kept):
            reject(name, value, "is not finite", remedy)
        if (
            (low is not None and kept < low)
            or (high is not None and kept > high)
            or (above is not None and kept <= above)
        ):
            reject(name, value, "is out of range", remedy)
        return kept

    return rule


def flag(*, optional: bool = False) -> Rule:
    """A bool, and nothing that merely looks like one."""
    remedy = "use True, False or None" if optional else "use True or False"

    def rule(name: str, value: Any) -> bool | None:
        if not isinstance(value, bool) and not (optional and value is None):
            reject(name, value, f"is {a_type(value)}, not a bool", remedy)
        return value

    return rule


def text(*, optional: bool = False, empty: bool = True) -> Rule:
    """A str; ``empty`` says whether ``""`` will do."""
    remedy = ("use a str" if empty else "use a str that is not empty") + (", or None" if optional else "")

    def rule(name: str, value: Any) -> str | None:
        if value is None and optional:
            return None
        if not isinstance(value, str):
            reject(name, value, f"is {a_type(value)}, not a str", remedy)
        if not value and not empty:
            reject(name, value, "is empty", remedy)
        return value

    return rule


def _items(name: str, value: Any, remedy: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        reject(name, value, f"is {a_type(value)}, not a sequence", remedy)
    return value if isinstance(value, tuple) else tuple(value)


def strings(*, most: int | None = None) -> Rule:
    """A tuple of strings, none empty; one str counts as a sequence of one, ``None`` as an empty one."""
    remedy = "use a str or a sequence of str, none of them empty"

    def rule(name: str, value: Any) -> tuple[str, ...]:
        if value is None:
            return ()
        items = _items(name, (value,) if isinstance(value, str) else value, remedy)
        for item in items:
            if not isinstance(item, str):
                reject(name, value, f"has {a_type(item)} in it, not a str", remedy)
            if not item:
                reject(name, value, "has an empty string in it", remedy)
        if most is not None and len(items) > most:
            reject(name, value, f"has {len(items)} entries", f"use at most {most}")
        return items

    return rule


def integers(low: int = 0, high: int = UINT64_MAX, *, optional: bool = False, empty: bool = True) -> Rule:
    """A tuple of ints from ``low`` to ``high`` (token ids, mostly); ``None`` stays (``optional``) or is empty."""
    remedy = f"use a sequence of ints of {_range(low, high if high != UINT64_MAX else None, None)}"
    remedy += "" if empty else ", at least one of them"

    def rule(name: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None if optional else ()
        items = _items(name, value, remedy)
        if not items and not empty:
            reject(name, value, "is empty", remedy + (", or None" if optional else ""))
        for item in items:
            if type(item) is not int:
                break
        else:
            if not items or (min(items) >= low and max(items) <= high):
                return items
        return tuple([_integer_in(name, value, item, (low, high), remedy) for item in items])

    return rule


def _integer_in(name: str, value: Any, item: Any, limits: tuple[int, int], remedy: str) -> int:
    try:
        number = operator.index(item)
    except TypeError:
        reject(name, value, f"has {a_type(item)} in it, not an int", remedy)
    if isinstance(item, bool):
        reject(name, value, "has a bool in it, not an int", remedy)
    if not limits[0] <= number <= limits[1]:
        reject(name, value, f"has {number} in it, which is out of range", remedy)
    return number


def nested_integers(low: int, high: int) -> Rule:
    """``None``, or a tuple of tuples of ints, all of one length (a matrix), and none of them empty."""
    remedy = f"use a sequence of equally long sequences of ints of {_range(low, high, None)}, or None"
    row_rule = integers(low, high)

    def rule(name: str, value: Any) -> tuple[tuple[int, ...], ...] | None:
        if value is None:
            return None
        rows = tuple([row_rule(f"{name}[{index}]", row) for index, row in enumerate(_items(name, value, remedy))])
        if len({len(row) for row in rows}) > 1:
            reject(name, value, "has rows of different lengths", remedy)
        if not rows or not rows[0]:
            reject(name, value, "is empty", remedy)
        return rows

    return rule


def record(kind: type) -> Rule:
    """An instance of ``kind`` (whose own constructor has checked it), or ``None``."""

    def rule(name: str, value: Any) -> Any:
        if value is not None and not isinstance(value, kind):
            reject(name, value, f"is {a_type(value)}", f"use {kind.__name__}(...), or None")
        return value

    return rule


def mapping(check: Callable[[str, Any, Any], None] | None = None) -> Rule:
    """A deep copy of a mapping, or ``None``; ``check(name, key, value)`` sees each entry, the outermost ones only."""

    def rule(name: str, value: Any) -> dict[Any, Any] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            reject(name, value, f"is {a_type(value)}, not a mapping", "use a dict, or None")
        if check is not None:
            for key, item in value.items():
                check(name, key, item)
        return copy.deepcopy(dict(value))

    return rule
