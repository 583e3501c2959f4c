"""docs/guarantees.md and the marks agree; every guarantee is shown, within its budget where that is a time."""

from __future__ import annotations

import guarantees

UNSHOWN = frozenset(["K06", "K39", "K40", "K42", "L23"])
LATE = frozenset(
    ["K01", "K10", "K17", "K18", "K21", "K22", "K26", "K28", "K32", "K33", "K34", "K37", "K69", "L01", "L05", "L18"]
)
"""What is still to be shown, and still to be shown within its time: to become empty, never to grow."""


def test_the_page_is_up_to_date() -> None:
    assert guarantees.PAGE.read_text() == guarantees.render(), "run: python tests/docs/guarantees.py"


def test_every_guarantee_is_shown() -> None:
    assert set(guarantees.missing()) <= UNSHOWN


def test_every_guarantee_is_shown_within_its_budget() -> None:
    assert set(guarantees.late()) <= LATE
