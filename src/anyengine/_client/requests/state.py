"""What the client holds for one request between the engine and the consumer: the merge buffer.

Owns tokens that have arrived and have not been taken, and how and when the request ended. Filled by the output
processor, emptied by the stream; knows neither sockets nor text, save for that of stop strings. The consumer's park and
wake are the client's hot loop.
"""

from __future__ import annotations

import math
from time import monotonic

from anyengine._client.session.wakeup import Parker
from anyengine._wire import EngineCoreOutput, Tensor, finish_reason_name
from anyengine.exceptions import EngineError, RequestFailed

from .stopping import Stopper

__all__ = ["BatchClock", "PooledRequestState", "RequestState"]

_ABORT = "abort"
_ERROR = "error"
_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3


class BatchClock:
    """When the outputs came that are being given out: looked at once for many of them. Owned by whoever gives them out,
    and read by all states.

    ``now_s`` is on the monotonic clock, ``loop_now_s`` on that of the event loop.
    """

    __slots__ = ("loop_now_s", "now_s")

    def __init__(self) -> None:
        self.now_s = monotonic()
        self.loop_now_s = -math.inf


class RequestState:
    """One request's merge buffer: the registry's consumer of its outputs.

    Invariants: at most one of ``finish_reason`` and ``error`` is set, once, and nothing is added afterwards.
    ``token_ids`` is the decoded list itself, adopted: nobody else holds it.
    """

    __slots__ = (
        "abort_expected",
        "attempts",
        "clock",
        "ended_s",
        "error",
        "finish_reason",
        "first_token_s",
        "interval",
        "label",
        "latest_token_s",
        "num_cached_tokens",
        "num_preemptions",
        "parker",
        "queued_s",
        "rank",
        "readable",
        "sent_s",
        "stop_reason",
        "stopper",
        "token_ids",
        "unmarked",
        "wire_id",
    )

    def __init__(self, wire_id: str, label: str, parker: Parker, *, clock: BatchClock | None = None) -> None:
        self.clock = clock or BatchClock()
        self.rank = 0
        """The rank that runs it."""
        self.wire_id = wire_id
        self.attempts = 1
        """How often the request has been sent."""
        self.label = label
        self.parker = parker
        self.token_ids: list[int] | None = None
        self.readable = False
        """Whether the consumer shall be given what has arrived."""
        self.interval = 1
        """How many tokens make an item, after the first."""
        self.unmarked = 0
        """How many tokens have arrived since the last item was due."""
        self.stopper: Stopper | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: EngineError | None = None
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_s: float | None = None
        self.sent_s = self.latest_token_s = self.ended_s = monotonic()
        self.first_token_s: float | None = None
        self.abort_expected = False
        """Whether this client has asked the engine to end all requests: then their abort is a normal end."""

    @property
    def ended(self) -> bool:
        """Whether nothing will be added any more."""
        return self.finish_reason is not None or self.error is not None

    def push(self, output: EngineCoreOutput) -> bool:
        """Take one output from the engine; whether the request ends here, although the engine would go on.

        The hot loop: one call for each output, and no other in the middle of a stream, save for the wake-up."""
        stopped = self.stopper is not None and self.stopper.look(output)
        ids = output.new_token_ids
        if self.token_ids is None:
            self.token_ids = ids
        else:
            self.token_ids += ids
        if ids:
            self.latest_token_s = self.clock.now_s
        if output.prefill_stats is not None:
            self.num_cached_tokens = output.prefill_stats.num_cached_tokens
        if output.events is not None:
            self._note_events(output)
        if output.finish_reason is not None:
            self._finish(output)
        if (self.interval == 1 and self.first_token_s is not None) or self._is_due(len(ids)):
            self.readable = True
            self.parker.wake()
        return stopped

    def fail(self, error: BaseException) -> None:
        """End with ``error``; what has arrived is still delivered first."""
        if not self.ended:
            assert isinstance(error, EngineError)
            self.error = error
            self._end()

    def aborted(self) -> None:
        """End with a normal final output: an abort that was asked for through this client."""
        if not self.ended:
            self.finish_reason = _ABORT
            self._end()

    def _end(self) -> None:
        if self.stopper is not None:
            self.stopper.end()
        self.ended_s = monotonic()
        self.readable = True
        self.parker.wake()

    def _is_due(self, num_tokens: int) -> bool:
        """Whether the consumer shall have an item now: at the first tokens, at every ``interval`` and at the end."""
        if self.first_token_s is None:
            if num_tokens:
                self.first_token_s = self.latest_token_s
            return True
        if self.interval == 1 or self.ended:
            return True
        self.unmarked += num_tokens
        if self.unmarked < self.interval:
            return False
        self.unmarked = 0
        return True

    def _note_events(self, output: EngineCoreOutput) -> None:
        """What the engine's scheduler did; its clock is its own, so only differences count."""
        times: dict[int, float] = {}
        for event in output.events or ():
            times.setdefault(event.type, event.timestamp)
            self.num_preemptions += event.type == _PREEMPTED
        if self.queued_s is None and _QUEUED in times and _SCHEDULED in times:
            self.queued_s = times[_SCHEDULED] - times[_QUEUED]

    def _finish(self, output: EngineCoreOutput) -> None:
        self.ended_s = monotonic()
        reason = finish_reason_name(output.finish_reason)
        if reason == _ERROR:
            detail = output.error
            self.error = RequestFailed(
                f"the engine failed request {self.label!r}: {detail.message if detail else 'it gave no reason'}",
                code=detail.code if detail else None,
                retryable=detail.retryable if detail else False,
                request_id=self.label,
            )
        elif reason == _ABORT and not self.abort_expected:
            self.error = RequestFailed(
                f"the engine aborted request {self.label!r}, which nobody asked for here: it is stopping, "
                "or was paused by someone else",
                code="engine_aborted",
                retryable=True,
                request_id=self.label,
            )
        else:
            self.finish_reason = reason
            self.stop_reason = output.stop_reason


class PooledRequestState(RequestState):
    """Where the result of a pooling request arrives."""

    __slots__ = ("data",)

    def __init__(self, wire_id: str, label: str, parker: Parker, *, clock: BatchClock | None = None) -> None:
        super().__init__(wire_id, label, parker, clock=clock)
        self.data: Tensor | None = None

    def push(self, output: EngineCoreOutput) -> bool:
        """Take one output from the engine.

        Raises:
            ValueError: it is a normal end without a result.
        """
        if output.pooling_output is not None:
            self.data = output.pooling_output
        elif output.finish_reason is not None and finish_reason_name(output.finish_reason) not in (_ABORT, _ERROR):
            raise ValueError("the engine ended a pooling request without a result")
        return super().push(output)
