"""The utility registry: which named calls wait for which replies.

Owns call ids and the matching of replies. Call ids carry a random prefix for each client (given as an argument: nothing
here is random), with the top bit clear, so that -1 (EEP notification) and -2 (fault status) are never ours and a
re-attached client does not mistake a reply that was buffered for a dead one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from anyengine._wire import UtilityOutput
from anyengine.exceptions import EngineError, UtilityError

__all__ = ["PendingCall", "UtilityRegistry"]


@dataclass(slots=True, eq=False)
class PendingCall:
    """One call on its way. ``on_done`` is called, once, when ``value`` or ``error`` has been set."""

    call_id: int
    method: str
    rank: int
    on_done: Callable[[], None]
    value: Any = None
    error: EngineError | None = None


@dataclass(slots=True)
class UtilityRegistry:
    """Pending calls by id. A call leaves by its reply, by :meth:`forget` (the caller gave up) or by :meth:`fail_all`;
    a reply that finds no call is late: dropped and counted in ``late_replies``."""

    prefix: int
    pending: dict[int, PendingCall] = field(default_factory=dict)
    late_replies: int = 0
    _counter: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.prefix < 1 << 31:
            raise ValueError(f"prefix={self.prefix!r} must be a 31-bit number")

    def __len__(self) -> int:
        return len(self.pending)

    def open(self, method: str, rank: int, on_done: Callable[[], None]) -> PendingCall:
        """Register a call, before it is sent."""
        while True:
            self._counter = (self._counter + 1) & 0xFFFF_FFFF
            call_id = self.prefix << 32 | self._counter
            if call_id not in self.pending:  # it has come around to a call that still waits
                break
        call = self.pending[call_id] = PendingCall(call_id, method, rank, on_done)
        return call

    def forget(self, call_id: int) -> None:
        """The caller no longer waits (cancelled, or the send failed). Unknown ids are ignored."""
        self.pending.pop(call_id, None)

    def resolve(self, rank: int, output: UtilityOutput) -> None:
        """Match a reply with its call."""
        call = self.pending.pop(output.call_id, None)
        if call is None:
            self.late_replies += 1
            return
        if output.failure_message is not None:
            call.error = UtilityError(
                f"utility call {call.method!r} failed in engine {rank}: {output.failure_message}",
                method=call.method,
                call_id=call.call_id,
                rank=rank,
            )
        else:
            call.value = output.result
        call.on_done()

    def of_rank(self, rank: int) -> frozenset[int]:
        """The ids of the pending calls to ``rank``."""
        return frozenset(call.call_id for call in self.pending.values() if call.rank == rank)

    def fail_all(self, error: EngineError, rank: int | None = None, *, only: Collection[int] | None = None) -> None:
        """Fail every pending call (to ``rank``, or of those with these ids, if given); each gets its own instance of
        ``error``."""
        doomed = [call for call in self.pending.values() if rank is None or call.rank == rank]
        if only is not None:
            doomed = [call for call in doomed if call.call_id in only]
        for call in doomed:
            del self.pending[call.call_id]
        for call in doomed:
            call.error = error.for_waiter()
            call.on_done()
