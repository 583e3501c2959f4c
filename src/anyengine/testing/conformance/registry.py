"""The list of checks: id, title, source and function of each.

Owns the registration and the selection by pattern. Knows nothing of how a check is run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from anyengine._wire.layouts import Release

if TYPE_CHECKING:
    from .engine_link import EngineLink

__all__ = ["FAMILIES", "Check", "CheckFunction", "check", "registered", "select"]

CheckFunction: TypeAlias = "Callable[[EngineLink], Awaitable[None]]"
"""Returns when the engine did as it should; else raises CheckFailed or CheckSkipped."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check. ``check_id`` is stable: reports of different days can be compared by it.

    ``source`` says which rule it follows: a section of docs/protocol.md, and a release where that matters.
    ``destructive``: it may hurt the engine or ends it, so it runs last, and only if asked for. ``since``: the first
    release with what is checked. ``handshake``: it looks at the start alone, and can judge one that failed.
    """

    check_id: str
    title: str
    source: str
    run: CheckFunction
    destructive: bool = False
    since: Release | None = None
    handshake: bool = False

    @property
    def family(self) -> str:
        """What its id begins with: a key of :data:`FAMILIES`."""
        return self.check_id.partition("-")[0]


_CHECKS: dict[str, Check] = {}

FAMILIES: Final = {
    "HS": "start and registration",
    "ENC": "encoding, both ways",
    "REQ": "requests",
    "STP": "stop conditions",
    "SMP": "sampling",
    "OUT": "outputs",
    "ABT": "aborts",
    "UTL": "utility calls",
    "PAU": "pause, resume, sleep",
    "PFX": "prefix cache",
    "LGP": "log-probabilities",
    "POL": "pooling",
    "LOD": "load",
    "MAL": "malformed input (destructive)",
    "END": "the end of an engine (destructive)",
}
"""What ids begin with, in the order in which the checks run: what breaks an engine comes last."""


def check(
    check_id: str,
    title: str,
    source: str,
    *,
    destructive: bool = False,
    since: Release | None = None,
    handshake: bool = False,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register the decorated function as a check. An id that is taken is an error."""

    def register(function: CheckFunction) -> CheckFunction:
        if check_id in _CHECKS:
            raise ValueError(f"check id {check_id!r} is given twice")
        _CHECKS[check_id] = Check(check_id, title, source, function, destructive, since, handshake)
        return function

    return register


def registered() -> tuple[Check, ...]:
    """Every check, in the order in which they run."""
    from . import checks  # noqa: F401 - the families register themselves

    order = list(FAMILIES)
    return tuple(sorted(_CHECKS.values(), key=lambda item: order.index(item.family)))


def select(patterns: Sequence[str] = (), *, destructive: bool = False, among: Iterable[Check] = ()) -> list[Check]:
    """The checks whose id or title matches one of ``patterns`` (a shell pattern of the id, or a part of either; case
    does not matter), or all. Destructive ones only with ``destructive``."""
    found = []
    for item in among or registered():
        names = (item.check_id.lower(), item.title.lower())
        wanted = not patterns or any(
            fnmatch.fnmatchcase(names[0], pattern.lower()) or any(pattern.lower() in name for name in names)
            for pattern in patterns
        )
        if wanted and (destructive or not item.destructive):
            found.append(item)
    return found
