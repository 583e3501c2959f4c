"""What an answered utility call tells of an engine: that it runs, is paused, or sleeps.

Owns the reading of the answers, and nothing else. A call that was only sent tells nothing; nor does one that failed.
Mirrors ``EngineCore.pause_scheduler``, ``sleep``, ``wake_up`` and ``is_sleeping`` of vLLM 0.32 (``v1/engine/core.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from .life_events import RankState

__all__ = ["MODE_METHODS", "mode_after"]

MODE_METHODS: Final = frozenset(
    (
        "is_scheduler_paused",
        "is_sleeping",
        "pause_generation",
        "pause_scheduler",
        "release_kv_cache_memory",
        "resume_scheduler",
        "sleep",
        "wake_up",
    )
)
"""The methods whose answers tell something."""


def mode_after(
    method: str, args: Sequence[Any], answer: Any, before: RankState, *, sleep_is_pause: bool = True
) -> RankState:
    """What the engine is in, once it has answered ``method(*args)`` with ``answer``; ``before`` is what it was in.

    ``sleep_is_pause``: its release counts paused as sleeping, as those that know ``is_scheduler_paused`` do.
    """
    awake = RankState.ASLEEP if before is RankState.ASLEEP else RankState.READY  # only waking ends a sleep
    paused = RankState.ASLEEP if before is RankState.ASLEEP else RankState.PAUSED
    match method:
        case "pause_generation" | "pause_scheduler":
            return paused
        case "resume_scheduler":
            return awake
        case "sleep":
            return paused if args and args[0] == 0 else RankState.ASLEEP
        case "release_kv_cache_memory":
            return RankState.ASLEEP
        case "wake_up":
            return _woken(args[0] if args else None, answer, before)
        case "is_scheduler_paused" if isinstance(answer, bool):
            return paused if answer else awake
        case "is_sleeping" if isinstance(answer, bool):
            if sleep_is_pause:
                return paused if answer else RankState.READY
            return RankState.ASLEEP if answer else RankState.READY if before is RankState.ASLEEP else before
    return before


def _woken(tags: Any, answer: Any, before: RankState) -> RankState:
    if isinstance(answer, bool):  # whether all of it is back: 0.32 tells, 0.28 does not
        return RankState.READY if answer else RankState.ASLEEP
    if tags is None or (before is RankState.PAUSED and "scheduling" in tags):
        return RankState.READY
    return before  # a part of it: is_sleeping tells
