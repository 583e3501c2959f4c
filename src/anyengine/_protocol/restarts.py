"""Whether an engine that has failed is started again, and after how long.

Owns the account of one rank's failures under its policy. Starts nothing; time and chance are arguments.
"""

from __future__ import annotations

from collections import deque

import msgspec

from anyengine.exceptions import EngineError
from anyengine.policies import RestartPolicy

__all__ = ["Restart", "RestartBudget"]


class Restart(msgspec.Struct, frozen=True):
    """A start that is granted: number ``attempt`` of the present trouble, in ``delay_s`` from now."""

    attempt: int
    delay_s: float


class RestartBudget:
    """The account. Invariant: of any ``max_restarts + 1`` restarts in a row, the first and the last one were granted
    ``window_s`` apart, or more. Memory is bounded by that number."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._granted: deque[tuple[float, EngineError]] = deque(maxlen=policy.max_restarts)

    @property
    def history(self) -> tuple[EngineError, ...]:
        """What the restarts of the present trouble were granted for, the oldest first."""
        return tuple(failure for _, failure in self._granted)

    def failed(self, failure: EngineError, now_s: float, fraction: float) -> Restart | None:
        """The engine has died, or has not started; the restart that follows, or ``None`` if it is given up.

        ``fraction`` of 0 to 1 is the chance in the delay.
        """
        while self._granted and now_s - self._granted[0][0] >= self._policy.window_s:
            self._granted.popleft()
        if len(self._granted) == self._policy.max_restarts:
            return None
        self._granted.append((now_s, failure))
        attempt = len(self._granted)
        return Restart(attempt, self._policy.delay_s(attempt, fraction))
