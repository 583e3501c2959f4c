"""Each known bug, planted, is found by whoever is there to find it; without the bug, the same look finds nothing."""

from __future__ import annotations

import pytest

from mutants import MUTANTS, Mutant

every_mutant = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


@every_mutant
def test_a_planted_bug_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    assert mutant.find() != []


@every_mutant
def test_what_finds_it_finds_nothing_else(mutant: Mutant) -> None:
    assert mutant.find() == []
