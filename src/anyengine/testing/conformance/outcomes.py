"""What a check can come to, and how it says so.

Owns the four outcomes, the record of one check's result and the two exceptions by which a check ends early. Knows no
engine and no report format.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

from anyengine._wire import FinishReason

__all__ = [
    "NOT_READY",
    "CheckFailed",
    "CheckResult",
    "CheckSkipped",
    "Outcome",
    "expect",
    "expect_that",
    "shown",
    "skip_if_refused",
]

NOT_READY = "the engine did not become ready"
"""Why every check is skipped that needs a running engine, where there is none."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxdict = 12


class Outcome(Enum):
    """How a check ended. Only ``FAILED`` is a reason to worry."""

    PASSED = "passed"
    FAILED = "failed"
    DEVIATES = "deviates"
    """It failed in the way that is known of this release; ``detail`` has the reason."""
    SKIPPED = "skipped"
    """It does not apply to this engine; ``detail`` says why."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check. ``detail`` is empty for a check that passed."""

    check_id: str
    title: str
    source: str
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0


class CheckFailed(Exception):
    """The engine did not do what it should: what was expected, what came, and where."""

    def __init__(self, where: str, *, expected: str, got: str) -> None:
        super().__init__(f"{where}: expected {expected}, got {got}")
        self.where = where
        self.expected = expected
        self.got = got


class CheckSkipped(Exception):
    """The check does not apply; the text says why."""


def shown(value: Any) -> str:
    """``value`` for a person, of bounded length."""
    return value if isinstance(value, str) and len(value) < 400 and " " in value else _repr.repr(value)


def expect(where: str, got: Any, expected: Any) -> None:
    """``got`` must equal ``expected`` and be of its type (``True`` is not 1).

    Raises:
        CheckFailed: it does not.
    """
    if got != expected or isinstance(got, bool) is not isinstance(expected, bool):
        raise CheckFailed(where, expected=_repr.repr(expected), got=_repr.repr(got))


def expect_that(condition: bool, where: str, *, expected: str, got: Any) -> None:
    """``condition`` must hold.

    Raises:
        CheckFailed: it does not.
    """
    if not condition:
        raise CheckFailed(where, expected=expected, got=shown(got))


def skip_if_refused(finish_reason: int | None, feature: str) -> None:
    """An optional feature that the engine refuses, one request at a time, is no failure.

    Raises:
        CheckSkipped: the request ended with ERROR.
    """
    if finish_reason == FinishReason.ERROR:
        raise CheckSkipped(f"the engine refuses {feature}")
