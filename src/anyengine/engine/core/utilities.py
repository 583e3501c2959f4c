"""The utility calls of an engine: an allow-list, by name.

Owns the look-up and the check of the arguments. A name that is not in the table does not exist, whatever attributes
any object has. Knows nothing of sockets and call ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

__all__ = ["UtilityTable"]


class UtilityTable:
    """Name to callable. Arguments are positional and are checked against the annotations of the callable (strictly:
    no bool for an int, no int for a str)."""

    def __init__(self, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._methods = {name: (method, inspect.signature(method, eval_str=True)) for name, method in methods.items()}

    def call(self, name: str, args: Sequence[Any]) -> Any:
        """Raises:
        LookupError: no such method.
        TypeError: too many or too few arguments, or one of a wrong type.
        """
        if name not in self._methods:
            raise LookupError(f"{name!r} is not a utility of this engine; it has {', '.join(sorted(self._methods))}")
        method, signature = self._methods[name]
        bound = signature.bind(*args)  # raises TypeError
        for parameter, value in bound.arguments.items():
            try:
                bound.arguments[parameter] = msgspec.convert(value, signature.parameters[parameter].annotation)
            except msgspec.ValidationError as exc:
                raise TypeError(f"{parameter}={value!r}: {exc}") from exc
        return method(*bound.args)
