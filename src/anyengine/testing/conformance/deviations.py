"""Where releases of vLLM are known to do otherwise than a check expects.

Owns a table of data. An entry holds for the releases in its range, and only for the failure that it describes: another
one is a failure. Sources: docs/protocol.md, section 12, and docs/interop.md, measured on 0.32.0; the ranges are those
of the code that is at fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from anyengine._wire.layouts import Release

__all__ = ["DEVIATIONS", "Deviation", "deviations_of", "known_deviation"]

_ALWAYS: Final[Release] = (0, 12, 0)


@dataclass(frozen=True, slots=True)
class Deviation:
    """vLLM from ``since`` up to but not including ``until`` (``None``: no end is known) fails ``check_id``; what comes
    instead matches the pattern ``got``."""

    check_id: str
    got: str
    reason: str
    since: Release = _ALWAYS
    until: Release | None = None

    def holds_for(self, release: Release) -> bool:
        return self.since <= release and (self.until is None or release < self.until)


_INPUT_THREAD = "the input thread has no try block: it ends, and the engine is deaf from then on (protocol.md §12)"
_OUTPUT_THREAD = "the output thread has no try block: it ends, and the engine is mute from then on (protocol.md §12)"
_MAIN_LOOP = "nothing validates requests in the engine: the main loop raises, and the engine ends (protocol.md §12)"


def _rows(reason: str, got: str, *check_ids: str) -> list[Deviation]:
    return [Deviation(check_id, got, reason) for check_id in check_ids]


DEVIATIONS: Final[tuple[Deviation, ...]] = (
    *_rows(
        _INPUT_THREAD, "^deaf",
        "MAL-01", "MAL-02", "MAL-03", "MAL-04", "MAL-05", "MAL-06", "MAL-07", "MAL-08", "MAL-09", "MAL-10",
        "MAL-28", "MAL-29", "MAL-30",
    ),
    *_rows(_OUTPUT_THREAD, "^mute", "MAL-11", "MAL-12", "MAL-13"),
    *_rows(
        _MAIN_LOOP, "^dead",
        "MAL-14", "MAL-15", "MAL-16", "MAL-17", "MAL-18", "MAL-19", "MAL-20", "MAL-21",
    ),
    Deviation(
        "MAL-25",
        "the result",
        "an attribute that is no method and counts as false is returned as the result (interop.md)",
    ),
    Deviation("MAL-26", "length|stop", "a LoRA request runs on the base model if LoRA is off (protocol.md §12)"),
)  # fmt: skip
"""All known ones."""


def deviations_of(release: Release) -> list[Deviation]:
    """Those that hold for ``release``."""
    return [deviation for deviation in DEVIATIONS if deviation.holds_for(release)]


def known_deviation(check_id: str, release: Release, got: str) -> Deviation | None:
    """The entry that explains why ``check_id`` fails with ``got``; ``None``: nothing does."""
    return next(
        (item for item in deviations_of(release) if item.check_id == check_id and re.search(item.got, got)), None
    )
