"""What the property tests did: counted as they run, printed at the end of the session."""

from __future__ import annotations

from collections import Counter
from typing import Final

__all__ = ["TALLY", "lines"]

TALLY: Final[Counter[str]] = Counter()
"""By what was counted, in words."""


def lines() -> list[str]:
    """One line for each count."""
    return [f"{count:>12,}  {what}" for what, count in sorted(TALLY.items())]
