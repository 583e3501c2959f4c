"""Utility calls: which an engine has, and which it would not survive.

Owns the decision; the names and reasons are data of the wire (``methods``). An engine looks a method up among all
attributes of its engine object, private ones included, and a result that it cannot encode ends its output thread:
it lives on, mute for everybody (PROTOCOL §12).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from anyengine._rules import a_type
from anyengine._wire import HANDLE_FAULT, HARMFUL, HARMFUL_IN_WORKERS, METHODS, OTHER_METHODS, Dialect
from anyengine.exceptions import UtilityRejected

from .limits import EngineLimits

__all__ = ["check_utility"]

_SURE = "if you are sure, unchecked=True sends it all the same"


def check_utility(method: object, args: Sequence[Any], dialect: Dialect, limits: EngineLimits, *, rank: int) -> None:
    """Check a utility call before it is sent. ``rank`` is for the error.

    Raises:
        UtilityRejected: the engine has no such method, takes fewer arguments, or would not survive the call.
    """
    try:
        if not isinstance(method, str):
            _refuse("method", method, f"is {a_type(method)}, not a name", "give the name of a method")
        _check_name(method, dialect, limits)
        _check_arguments(method, args, dialect, limits)
    except UtilityRejected as exc:
        exc.method, exc.rank = str(method), rank
        raise


def _refuse(parameter: str, value: Any, problem: str, remedy: str) -> NoReturn:
    message = f"{parameter}={reprlib.repr(value)} {problem}; nothing was sent: {remedy}"
    raise UtilityRejected(message, parameter=parameter, value=value, remedy=remedy)


def _check_name(method: str, dialect: Dialect, limits: EngineLimits) -> None:
    if method.startswith("_"):
        _refuse("method", method, "is private to the engine", _SURE)
    if (why := HARMFUL.get(method)) is not None:
        _refuse("method", method, f"must not be called: {why}", _SURE)
    if method == HANDLE_FAULT and limits.fault_tolerance is not True:
        problem = "leaves an engine deaf that was not started with fault tolerance"
        _refuse("method", method, problem, f"start it with enable_fault_tolerance=True; {_SURE}")
    if limits.known_methods_only and method not in OTHER_METHODS and dialect.utility_arity(method) is None:
        known = ", ".join(sorted(name for name in METHODS if dialect.utility_arity(name) is not None))
        _refuse("method", method, f"is no utility method of {dialect.releases}", f"it has {known}; {_SURE}")


def _check_arguments(method: str, args: Sequence[Any], dialect: Dialect, limits: EngineLimits) -> None:
    arity = dialect.utility_arity(method) if limits.known_methods_only else None
    if arity is not None and len(args) > arity:
        _refuse("args", list(args), f"are more than {method} takes", f"give at most {arity}")
    if method == "set_weight_version" and args and not isinstance(args[0], str):
        _refuse("args[0]", args[0], "would stand in every output, which nobody could read", "use a str")
    if method == "collective_rpc":
        _check_worker_call(args)


def _check_worker_call(args: Sequence[Any]) -> None:
    name = args[0] if args else None
    if not isinstance(name, str):
        problem = f"is {a_type(name)}: a callable would have to be pickled, which this client never does"
        _refuse("args[0]", name, problem, "give the name of a method that the workers have")
    if name.startswith("_"):
        _refuse("args[0]", name, "is private to the workers", _SURE)
    if (why := HARMFUL_IN_WORKERS.get(name)) is not None:
        _refuse("args[0]", name, f"must not be called: {why}", _SURE)
    _, _, positional, keyword = (*args, *(None,) * 4)[:4]
    if positional is not None and not isinstance(positional, list | tuple):
        _refuse("args[2]", positional, f"is {a_type(positional)}", "use a list of arguments")
    if keyword is not None and not (isinstance(keyword, Mapping) and all(isinstance(key, str) for key in keyword)):
        _refuse("args[3]", keyword, "are no keyword arguments", "use a dict with str keys, or None")
