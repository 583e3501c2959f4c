"""docs/guarantees.md and the marks agree; every guarantee is shown, within its budget where that is a time."""

from __future__ import annotations

import guarantees


def test_the_page_is_up_to_date() -> None:
    assert guarantees.PAGE.read_text() == guarantees.render(), "run: python tests/docs/guarantees.py"


def test_every_guarantee_is_shown() -> None:
    assert guarantees.missing() == []


def test_every_guarantee_is_shown_within_its_budget() -> None:
    assert guarantees.late() == []
