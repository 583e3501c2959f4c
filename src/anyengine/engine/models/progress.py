"""Progress of a long stage, reported a few times a second.

Owns the rate limit. Safe to call from the threads of a downloader.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from anyengine._process.status import Status

__all__ = ["Progress"]

_INTERVAL_S = 0.25


class Progress:
    """Counts towards ``total`` units of one stage.

    ``total`` may be learnt on the way; without one there is no fraction.
    """

    def __init__(self, report: Callable[[Status], None], stage: str, detail: str, total: int | None = None) -> None:
        self._report = report
        self._stage = stage
        self._detail = detail
        self._total = total
        self._lock = threading.Lock()
        self._reported_at_s = 0.0
        self._send(0)

    def update(self, done: int, total: int | None = None) -> None:
        """``done`` units so far."""
        with self._lock:
            self._total = total or self._total
            now_s = time.monotonic()
            if now_s - self._reported_at_s >= _INTERVAL_S:
                self._reported_at_s = now_s
                self._send(done)

    def finish(self) -> None:
        """The stage is complete; this is always reported."""
        with self._lock:
            self._report(Status(self._stage, detail=self._detail, fraction=1.0))

    def _send(self, done: int) -> None:
        fraction = min(done / self._total, 1.0) if self._total else None
        self._report(Status(self._stage, detail=self._detail, fraction=fraction))
