"""Deadlines of requests: how long one may take as a whole, to its first token, and from one token to the next.

Owns the one timer of a session. A request without a deadline costs nothing here, and one with a deadline no task and no
scope: an entry in a heap, which is looked at when it may be due. What an expiry does is the desk's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Any, Final, Self

import anyio
import anyio.lowlevel
import msgspec

from anyengine._rules import reject
from anyengine._wire import EngineCoreOutput
from anyengine.exceptions import RequestTimeout

from .scores import ScoredRequestState
from .state import BatchClock, RequestState

__all__ = ["Deadlines", "TimedRequestState", "TimedScoredRequestState", "Timeouts", "time_limits"]

_TURNS: Final = 3
"""What has arrived while our own loop was held up is read within so many turns of it."""
_PRUNE_FROM: Final = 64


class Timeouts(msgspec.Struct, frozen=True):
    """The limits of one request, in seconds from its first use (``inter_token``: from its latest token)."""

    total_s: float | None = None
    first_token_s: float | None = None
    inter_token_s: float | None = None

    @classmethod
    def of(cls, **limits_s: float | None) -> Self | None:
        """The limits given as ``timeout_s``, ``first_token_timeout_s`` and ``inter_token_timeout_s``, checked; ``None``
        if there are none.

        Raises:
            RequestRejected: one is no number above 0.
        """
        for name, value in limits_s.items():
            if value is not None and not (type(value) in (int, float) and value > 0):
                reject(name, value, "is no time limit", "use a number of seconds above 0, or None for no limit")
        if all(value is None for value in limits_s.values()):
            return None
        return cls(*(limits_s.get(name) for name in _NAMES))

    @property
    def needs_tokens_timed(self) -> bool:
        """Whether the times of its tokens matter."""
        return self.first_token_s is not None or self.inter_token_s is not None

    def before_sending_s(self) -> tuple[float, str]:
        """How long it may take until it is sent, and by which limit."""
        total_s = math.inf if self.total_s is None else self.total_s
        first_token_s = math.inf if self.first_token_s is None else self.first_token_s
        return (total_s, _NAMES[0]) if total_s <= first_token_s else (first_token_s, _NAMES[1])

    def expired(self, name: str, label: str | None, *, sent: bool = True) -> RequestTimeout:
        """The error of the limit of this name."""
        limit_s = dict(zip(_NAMES, (self.total_s, self.first_token_s, self.inter_token_s), strict=True))[name]
        what = dict(zip(_NAMES, ("had not ended", "had no token", "had no further token"), strict=True))[name]
        who = "the request" if label is None else f"request {label!r}"
        outcome = "it is aborted" if sent else "it was not sent"
        return RequestTimeout(f"{who} {what} within {name}={limit_s:g}: {outcome}", limit=name, request_id=label)


_NO_LIMITS: Final[Mapping[str, float | None]] = MappingProxyType({})
_NAMES: Final = ("timeout_s", "first_token_timeout_s", "inter_token_timeout_s")


def time_limits(
    timeout_s: float | None, first_token_timeout_s: float | None, inter_token_timeout_s: float | None
) -> Mapping[str, float | None]:
    """The limits of a request as they were given, for :meth:`Timeouts.of`; empty if there are none."""
    if timeout_s is first_token_timeout_s is inter_token_timeout_s is None:
        return _NO_LIMITS
    return dict(zip(_NAMES, (timeout_s, first_token_timeout_s, inter_token_timeout_s), strict=True))


class _Timed:
    """Mixed into a request's state: keeps the time of its latest token."""

    __slots__ = ()
    last_token_s: float | None
    clock: BatchClock

    def push(self, output: EngineCoreOutput) -> bool:
        if output.new_token_ids:
            self.last_token_s = self.clock.loop_now_s  # type: ignore[misc]  # the slot is the subclass's
        stopped: bool = super().push(output)  # type: ignore[misc]
        return stopped


class TimedRequestState(_Timed, RequestState):
    """A merge buffer that knows when its latest token came."""

    __slots__ = ("last_token_s",)

    def __init__(self, *args: Any, clock: BatchClock | None = None) -> None:
        super().__init__(*args, clock=clock)
        self.last_token_s = None


class TimedScoredRequestState(_Timed, ScoredRequestState):
    """The same, with log-probabilities."""

    __slots__ = ("last_token_s",)

    def __init__(self, *args: Any, clock: BatchClock | None = None) -> None:
        super().__init__(*args, clock=clock)
        self.last_token_s = None


class _Watch:
    """One request's deadlines."""

    __slots__ = ("started_s", "state", "timeouts")

    def __init__(self, state: RequestState, timeouts: Timeouts, started_s: float) -> None:
        self.state = state
        self.timeouts = timeouts
        self.started_s = started_s

    def next(self) -> tuple[float, str]:
        """When it is due, as things stand, and by which limit."""
        timeouts, started_s = self.timeouts, self.started_s
        due = (math.inf if timeouts.total_s is None else started_s + timeouts.total_s, _NAMES[0])
        last_s = getattr(self.state, "last_token_s", None)
        if last_s is None:
            if timeouts.first_token_s is not None:
                due = min(due, (started_s + timeouts.first_token_s, _NAMES[1]))
        elif timeouts.inter_token_s is not None:
            due = min(due, (last_s + timeouts.inter_token_s, _NAMES[2]))
        return due

    def look_at_s(self) -> float:
        """When to look again. A token that comes can only bring the time between tokens into play: until then, as if
        the first came now."""
        due_s, _ = self.next()
        if self.timeouts.inter_token_s is not None and getattr(self.state, "last_token_s", None) is None:
            due_s = min(due_s, anyio.current_time() + self.timeouts.inter_token_s)
        return due_s


class Deadlines:
    """See the module. Owning task: the one that runs :meth:`run`. Lifetime: one session.

    Memory: entries of requests that have ended stay until they would be due, or until they are the half of all.
    """

    def __init__(
        self,
        expire: Callable[[Sequence[tuple[RequestState, RequestTimeout]]], None],
        caught_up: Callable[[], Awaitable[None]],
    ) -> None:
        self._expire = expire
        self._caught_up = caught_up  # waits until what has been read has reached its consumers
        self._heap: list[tuple[float, int, _Watch]] = []
        self._numbers = count()
        self._prune_at = _PRUNE_FROM
        self._earlier = anyio.Event()
        self._sleeps_until_s = math.inf

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, state: RequestState, timeouts: Timeouts, started_s: float) -> None:
        """Expire ``state`` when it has overrun one of ``timeouts``, whoever waits for it. Synchronous."""
        self._push(_Watch(state, timeouts, started_s))
        if len(self._heap) >= self._prune_at:
            self._heap = [item for item in self._heap if not item[2].state.ended]
            heapq.heapify(self._heap)
            self._prune_at = max(_PRUNE_FROM, 2 * len(self._heap))

    async def run(self) -> None:
        """The timer. Runs for ever."""
        while True:
            now_s = anyio.current_time()
            if self._heap and self._heap[0][0] <= now_s:
                for _ in range(_TURNS):  # what has arrived counts, even if we are late to look at it
                    await anyio.lowlevel.checkpoint()
                await self._caught_up()
                self._expire_due(now_s)  # not what has become due since: its token may have come since, too
                continue
            self._earlier = anyio.Event()
            self._sleeps_until_s = self._heap[0][0] if self._heap else math.inf
            with anyio.CancelScope(deadline=self._sleeps_until_s):
                await self._earlier.wait()

    def _push(self, watch: _Watch) -> None:
        look_at_s = watch.look_at_s()
        heapq.heappush(self._heap, (look_at_s, next(self._numbers), watch))
        if look_at_s < self._sleeps_until_s:
            self._sleeps_until_s = look_at_s
            self._earlier.set()

    def _expire_due(self, now_s: float) -> None:
        expired: list[tuple[RequestState, RequestTimeout]] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, watch = heapq.heappop(self._heap)
            if watch.state.ended:
                continue
            due_s, name = watch.next()
            if due_s <= now_s:
                expired.append((watch.state, watch.timeouts.expired(name, watch.state.label)))
            else:
                self._push(watch)
        if expired:
            self._expire(expired)
