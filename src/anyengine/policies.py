"""What a client does by itself when something fails: start an engine again, send a request again.

Owns the choices and their checks. When and how it is done is the client's.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Backoff", "RestartPolicy", "RetryPolicy"]


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """How long is waited before the next try: ``backoff_s`` before the first one, ``backoff_factor`` times as long
    before each further one, ``max_backoff_s`` at most; less a random part of up to the fraction ``jitter``.

    Raises:
        ValueError: a value out of range.
    """

    backoff_s: float = 0.5
    backoff_factor: float = 2.0
    max_backoff_s: float = 30.0
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for name in ("backoff_s", "max_backoff_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number of seconds, at least 0")
        if not 1 <= self.backoff_factor < float("inf"):
            raise ValueError(f"backoff_factor={self.backoff_factor!r} must be at least 1")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"jitter={self.jitter!r} must be from 0 to 1")

    def delay_s(self, attempt: int, fraction: float) -> float:
        """How long to wait before try number ``attempt``, which begins with 1; ``fraction`` of 0 to 1 is the chance."""
        try:
            longest_s = self.backoff_s * self.backoff_factor ** (attempt - 1)
        except OverflowError:
            longest_s = self.max_backoff_s
        return min(longest_s, self.max_backoff_s) * (1 - self.jitter * fraction)


class RestartPolicy(Backoff, frozen=True, kw_only=True):
    """Start an engine that died again, ``max_restarts`` times within any ``window_s``; then its death is final.

    A start that fails counts as one. ``in_flight`` says what becomes of the requests that the engine had: they fail
    with its death, or are sent again with the tokens that they have, where that cannot be told from an undisturbed run
    (others fail, and the error says why). ``while_down`` says what a new request does while no engine serves: wait, or
    fail at once.

    Raises:
        ValueError: a value out of range.
    """

    max_restarts: int = 3
    window_s: float = 60.0
    in_flight: Literal["fail", "replay"] = "fail"
    while_down: Literal["wait", "fail"] = "wait"

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.max_restarts) is not int or self.max_restarts < 1:
            raise ValueError(f"max_restarts={self.max_restarts!r} must be an int of at least 1")
        if not self.window_s > 0:
            raise ValueError(f"window_s={self.window_s!r} must be a number of seconds above 0")
        if self.in_flight not in ("fail", "replay"):
            raise ValueError(f"in_flight={self.in_flight!r} must be 'fail' or 'replay'")
        if self.while_down not in ("wait", "fail"):
            raise ValueError(f"while_down={self.while_down!r} must be 'wait' or 'fail'")


class RetryPolicy(Backoff, frozen=True, kw_only=True):
    """Send a request again that failed before its first token with an error that says ``retryable``: ``max_attempts``
    in all, the first one included.

    Raises:
        ValueError: a value out of range.
    """

    max_attempts: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.max_attempts) is not int or self.max_attempts < 1:
            raise ValueError(f"max_attempts={self.max_attempts!r} must be an int of at least 1")
