"""How vLLM reads the strings of a command line, for those of its flags that a client understands.

Owns the spelling: short flags, ``--x`` and ``--no-x``, names with ``_`` or ``-``, ``--json.key value``,
``--json.list+ a,b``, ``4k`` for 4000. Must not know what the arguments mean. Pure.

Mirrors vLLM 0.32.0: ``FlexibleArgumentParser`` and the flags that ``EngineArgs.add_cli_args`` makes of types.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NoReturn

__all__ = ["parse_command_line"]


def parse_command_line(strings: Sequence[str], types: Mapping[str, str]) -> dict[str, Any]:
    """The values that ``strings`` give to the arguments named in ``types``; other arguments are left out.

    Raises:
        ValueError: a value that vLLM would refuse, too; or the strings refer to a file of arguments.
    """
    for string in strings:
        if string.partition("=")[0] == "--config":
            raise ValueError(
                f"{string!r} refers to a file of arguments, which the client does not read: give the arguments "
                "themselves"
            )
    found, _ = _parser(tuple(types.items())).parse_known_args(_without_dots(_normalised(strings)))
    return vars(found)


def _reader(name: str, read: Callable[[str], Any], *, optional: bool = False) -> Mapping[str, Any]:
    def read_value(text: str) -> Any:
        return None if optional and text in ("", "None") else read(text)

    read_value.__name__ = name  # what a refusal calls it
    return {"type": read_value}


_UNITS: Final = {unit: 10 ** (3 * power) for power, unit in enumerate("kmgt", 1)} | {
    unit: 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)
}


def _count(text: str) -> int:
    """``4096``, ``4k`` (thousand), ``4K`` (1024), ``1.5m``."""
    text = text.strip()
    unit = _UNITS.get(text[-1:])
    if unit is None or not re.fullmatch(r"\d+(\.\d+)?", text[:-1]):
        return int(text)
    return int(float(text[:-1]) * unit) if text[-1].islower() else int(text[:-1]) * unit


def _json_or_text(text: str) -> Any:
    return json.loads(text) if re.fullmatch(r"\s*{.*}\s*", text, re.DOTALL) else text


_SWITCH: Final = {"action": argparse.BooleanOptionalAction}  # --x and --no-x
_ON: Final = {"action": "store_true"}
_TEXT: Final = {"type": str}
_TEXT_OR_NONE: Final = _reader("str", str, optional=True)
_INT: Final = {"type": int}
_JSON: Final = _reader("JSON", json.loads)

_BY_TYPE: Final[Mapping[str, Mapping[str, Any]]] = {
    "bool": _SWITCH,
    "int": _INT,
    "int | None": _INT,
    "float": {"type": float},
    "str": _TEXT,
    "str | None": _TEXT_OR_NONE,
    "dict[str, Any] | None": _reader("JSON", json.loads, optional=True),
}

_OTHERWISE: Final[Mapping[str, Mapping[str, Any]]] = {
    "served_model_name": {**_TEXT_OR_NONE, "nargs": "+"},
    "tokenizer": _TEXT,  # where "None" is a name like any other
    "data_parallel_address": _TEXT,
    "hf_overrides": _reader("JSON", _json_or_text),
    "override_generation_config": _JSON,
    "structured_outputs_config": _JSON,
    "max_num_queued_reqs": _reader("int", int, optional=True),
    "max_num_queued_tokens": _reader("int", _count, optional=True),
    "collect_detailed_traces": {**_TEXT_OR_NONE, "nargs": "+"},
    "data_parallel_multi_port_external_lb": _ON,
    "headless": _ON,
    "disable_log_stats": _ON,
    "aggregate_engine_logging": _ON,
}
"""Flags that are not read as their type suggests."""

_SHORT: Final = {
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm",
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "prefill_context_parallel_size": "-pcp",
    "nnodes": "-n",
    "node_rank": "-r",
    "api_server_count": "-asc",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"vLLM's arguments cannot be right: {message}")


@cache
def _parser(types: tuple[tuple[str, str], ...]) -> _Parser:
    # No abbreviations: what one may stand for depends on all flags of vLLM. The launcher turns them off as well.
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, type_name in types:
        flags = [f"--{name.replace('_', '-')}", *filter(None, [_SHORT.get(name)])]
        parser.add_argument(*flags, dest=name, **(_OTHERWISE.get(name) or _BY_TYPE[type_name]))
    return parser


def _normalised(strings: Sequence[str]) -> list[str]:
    """The strings with ``-`` for ``_`` in the names of long flags, and ``-O3`` in full."""
    normal = []
    for string in strings:
        if string.startswith("--"):
            flag, equals, value = string.partition("=")
            name, dot, keys = flag.partition(".")
            normal.append(f"{name.replace('_', '-')}{dot}{keys}{equals}{value}")
        elif string.startswith("-O") and string != "-O":
            normal += ["--optimization-level", string.removeprefix("-O").removeprefix("=")]
        else:
            normal.append(string)
    return normal


def _without_dots(strings: Sequence[str]) -> list[str]:
    """The strings with all of ``--flag.key value`` of one flag together, at the end, as one JSON object."""
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(strings)
    for string in rest:
        path, equals, text = string.partition("=")
        if not path.startswith("-") or "." not in path:
            kept.append(string)
            continue
        if not equals:
            try:
                text = next(rest)
            except StopIteration:
                raise ValueError(f"vLLM's argument {path} stands without a value") from None
        value: Any = text.split(",") if path.endswith("+") else _json_value(text)
        flag, *keys = path.removesuffix("+").split(".")
        for key in reversed(keys):
            value = {key: value}
        _merge(objects.setdefault(flag, {}), value)
    return kept + [string for flag, value in objects.items() for string in (flag, json.dumps(value))]


def _json_value(text: str) -> Any:
    for read in (json.loads, _count):
        try:
            return read(text)
        except ValueError:
            pass
    return text


def _merge(target: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        present = target.get(key)
        if isinstance(present, dict) and isinstance(value, dict):
            _merge(present, value)
        elif isinstance(present, list) and isinstance(value, list):
            present += value
        else:
            target[key] = value
