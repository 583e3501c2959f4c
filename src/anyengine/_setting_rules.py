"""Rules for settings that users write: each refuses one value with a ``ValueError`` that names parameter and remedy.

Must not know any engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

__all__ = [
    "MAX_RANK",
    "check_address",
    "check_callable",
    "check_count",
    "check_flag",
    "check_plugin_names",
    "check_rank_count",
    "check_seconds",
    "check_text",
    "check_vllm_args",
]

MAX_RANK: Final = 0xFFFF  # an identity has two bytes
_MAX_PORT: Final = 0xFFFF
_SCHEMES: Final = ("tcp://", "ipc://")


def check_text(name: str, value: object, remedy: str) -> None:
    """Raises:
    ValueError: it is no str, or an empty one.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value!r} must be a non-empty str: {remedy}")


def check_count(name: str, value: object, low: int | None, none: str = "") -> None:
    """Raises:
    ValueError: it is no int, or below ``low``.
    """
    if none and value is None:
        return
    if type(value) is not int or (low is not None and value < low):
        wanted = "an int" if low is None else f"at least {low}" if type(value) is int else f"an int of at least {low}"
        raise ValueError(f"{name}={value!r} must be {wanted}" + (f", or None {none}" if none else ""))


def check_flag(name: str, value: object) -> None:
    """Raises:
    ValueError: it is neither ``True`` nor ``False``.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_plugin_names(name: str, value: object) -> None:
    """Raises:
    ValueError: it is no sequence of names of entry points and of ``"module:attribute"``, or has one of them twice.
    """
    names = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [None]
    if not all(isinstance(one, str) and _is_plugin_name(one) for one in names):
        raise ValueError(
            f"{name}={value!r} must be a sequence of str, each the name of an entry point or 'module:attribute'"
        )
    if len({*names}) < len(names):
        raise ValueError(f"{name}={value!r} must have each name once")


def _is_plugin_name(name: str) -> bool:
    module, separator, attribute = name.partition(":")
    return bool(module and (attribute or not separator))


def check_seconds(
    name: str, value: object, limit: Literal["at least 0", "above 0"] = "at least 0", *, none: str = ""
) -> None:
    """Raises:
    ValueError: it is no number, or below the limit.
    """
    if none and value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not isinstance(value, int | float) or not is_number or not (value > 0 if limit == "above 0" else value >= 0):
        wanted = limit if is_number else f"a number of seconds {limit}"
        raise ValueError(f"{name}={value!r} must be {wanted}" + (f", or None {none}" if none else ""))


def check_callable(name: str, value: object) -> None:
    """Raises:
    ValueError: it is neither a function nor ``None``.
    """
    if value is not None and not callable(value):
        raise ValueError(f"{name}={value!r} must be a function, or None")


def check_vllm_args(args: object) -> None:
    """Refuse what is no argument of vLLM in form.

    Raises:
        ValueError: it is neither a mapping of names to plain data nor a sequence of strings; or it has the model.
    """
    if isinstance(args, Sequence) and not isinstance(args, str | bytes) and all(isinstance(one, str) for one in args):
        if any(one.partition("=")[0] == "--model" for one in args):
            raise ValueError("args has --model, which is given twice: it is the first parameter")
        return
    if not isinstance(args, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in args):
        given = (
            f"{sorted(map(str, args))}" if isinstance(args, Mapping) else f"a {type(args).__name__}"
        )  # no values: secrets
        raise ValueError(
            f"args ({given}) must be a mapping of vLLM's argument names to values, or a sequence of command-line "
            'strings: {"max_model_len": 4096} or ["--max-model-len", "4096"]'
        )
    if "model" in args:
        raise ValueError(f"args['model']={args['model']!r} is given twice: it is the first parameter")
    for name, value in args.items():
        try:
            msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as exc:
            raise ValueError(f"args[{name!r}]={value!r} must be plain data, which JSON can carry: {exc}") from exc


def check_address(name: str, address: object) -> None:
    good = isinstance(address, str) and address.startswith(_SCHEMES) and address not in _SCHEMES
    if good and str(address).startswith("tcp://"):  # libzmq would take port 99999, and listen at another one
        host, _, port = str(address).removeprefix("tcp://").rpartition(":")
        good = bool(host) and (port == "*" or (port.isdecimal() and int(port) <= _MAX_PORT))
    if not good:
        raise ValueError(f"{name}={address!r} must be an address such as 'tcp://127.0.0.1:29550' or 'ipc:///path'")


def check_rank_count(name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_RANK + 1:
        raise ValueError(f"{name}={value!r} must be an int from 1 to {MAX_RANK + 1}")
