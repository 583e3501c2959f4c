"""What a front end spends on each output token, in the steady part of a run.

Owns the counting, which is the same for every contestant, and the end of a line-driven program. Imports nothing but the
standard library, and nothing of ours: it runs in the environments of others too.
"""

from __future__ import annotations

import gc
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Window", "freeze_start_up", "say", "tell_apart"]


class Window:
    """Counts what all consumers get. The steady part lies between the first and the last eighth of all tokens, where
    every stream is running: streams start and end outside of it.

    A consumer adds to ``items`` (its wake-ups), ``tokens`` and ``characters``, and calls :meth:`note` when ``tokens``
    has reached ``mark``.
    """

    __slots__ = ("_end_mark", "_marks", "_total", "characters", "items", "mark", "tokens")

    def __init__(self, total_tokens: int) -> None:
        self.items: int = 0
        self.tokens: int = 0
        self.characters: int = 0
        self.mark: float = total_tokens // 8
        self._total = total_tokens
        self._end_mark = total_tokens - total_tokens // 8
        self._marks: list[tuple[float, float, int, int]] = []

    def note(self) -> None:
        """The mark is reached: look at the clocks."""
        self._marks.append((time.process_time(), time.perf_counter(), self.tokens, self.items))
        self.mark = self._end_mark if len(self._marks) == 1 else math.inf

    def figures(self) -> dict[str, Any]:
        """What was measured, as JSON.

        Raises:
            RuntimeError: not every token has come.
        """
        if self.tokens != self._total or len(self._marks) != 2:
            raise RuntimeError(f"{self.tokens} tokens came, of {self._total}")
        (cpu_s, wall_s, tokens, items), (cpu_end_s, wall_end_s, tokens_end, items_end) = self._marks
        steady = tokens_end - tokens
        return {
            "cpu_us_per_token": (cpu_end_s - cpu_s) / steady * 1e6,
            "items_per_token": (items_end - items) / steady,
            "tokens_per_s": steady / (wall_end_s - wall_s),
            "characters": self.characters,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


def freeze_start_up() -> None:
    """What start-up has left is no work of the garbage collector's from now on, as vLLM's server does it."""
    gc.collect()
    gc.freeze()


def tell_apart() -> Callable[[dict[str, Any]], None]:
    """:func:`say` on the standard output of now; what else is written there goes to standard error from now on."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    return lambda message: say(message, answers)


def say(message: dict[str, Any], stream: Any) -> None:
    """One line of JSON."""
    stream.write(json.dumps(message) + "\n")
    stream.flush()
