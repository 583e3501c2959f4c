"""What the client holds for one request between the engine and the consumer: the merge buffer.

Owns tokens that have arrived and have not been taken, and how and when the request ended. Filled by the output
processor, emptied by the stream; knows neither sockets nor text, save for that of stop strings. The consumer's park and
wake are the client's hot loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from time import monotonic
from types import MappingProxyType
from typing import Final

import msgspec

from anyengine._client.session.wakeup import Parker
from anyengine._wire import EngineCoreOutput, PrefillStats, Tensor, finish_reason_name
from anyengine.exceptions import EngineError, RequestFailed
from anyengine.outputs import PrefillUsage, RequestFacts

from .account import Account
from .details import DetailCollector
from .stopping import Stopper

__all__ = ["BatchClock", "PooledRequestState", "RequestState", "aborted_by_others"]

_ABORT = "abort"
_ERROR = "error"
_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3
_LAST_DETAILS: Final = ("kv_transfer_params", "ec_transfer_params", "spec_decode_metrics", "surplus")
_NOT_CACHED: Final = "not in its cache of multi-modal items; send the request again with their data"
_NO_FACTS: Final = RequestFacts()
_NO_WEIGHTS: Final[Mapping[int, str]] = MappingProxyType({})


class BatchClock:
    """When the outputs came that are being given out: looked at once for many of them. Owned by whoever gives them out,
    and read by all states.

    ``now_s`` is on the monotonic clock, ``loop_now_s`` on that of the event loop.
    """

    __slots__ = ("loop_now_s", "now_s")

    def __init__(self) -> None:
        self.now_s: float = monotonic()
        self.loop_now_s: float = -math.inf


class _TouchedByEachToken:
    """The fields that every token needs, beside each other in memory: after a pause between two steps of the engine
    none of them is in a cache, and what a token costs is mostly how many lines of memory it needs."""

    __slots__ = (
        "clock",
        "details",
        "error",
        "facts",
        "finish_reason",
        "first_token_s",
        "interval",
        "label",
        "latest_token_s",
        "parker",
        "readable",
        "stopper",
        "token_ids",
        "unmarked",
    )


class RequestState(_TouchedByEachToken):
    """One request's merge buffer: the registry's consumer of its outputs.

    Invariants: at most one of ``finish_reason`` and ``error`` is set, once, and nothing is added afterwards.
    ``token_ids`` is the decoded list itself, adopted: nobody else holds it.
    """

    __slots__ = (
        "abort_expected",
        "account",
        "asked",
        "attempts",
        "ended_s",
        "is_corrupted",
        "num_preemptions",
        "prefill",
        "queued_s",
        "rank",
        "sent_s",
        "stop_reason",
        "taken",
        "weights",
        "wire_id",
    )

    def __init__(self, wire_id: str, label: str, parker: Parker, *, clock: BatchClock | None = None) -> None:
        self.clock: BatchClock = clock or BatchClock()
        self.rank: int = 0
        """The rank that runs it."""
        self.wire_id: str = wire_id
        self.attempts: int = 1
        """How often the request has been sent."""
        self.label = label
        self.parker = parker
        self.token_ids: list[int] | None = None
        self.taken: list[int] = []
        """What has been taken of the tokens; its consumer's own list."""
        self.account: Account | None = None
        """Where it is counted when it has ended; ``None``: nowhere, since it was never sent."""
        self.asked: RequestFacts = _NO_FACTS
        """What is known of the request before it is sent."""
        self.details: DetailCollector | None = None
        self.weights: Mapping[int, str] = _NO_WEIGHTS
        """The label of the weights of each rank, as of its latest batch."""
        self.facts: RequestFacts | None = None
        """What :meth:`make_facts` has made, if it still holds."""
        self.readable: bool = False
        """Whether the consumer shall be given what has arrived."""
        self.interval = 1
        """How many tokens make an item, after the first."""
        self.unmarked: int = 0
        """How many tokens have arrived since the last item was due."""
        self.stopper: Stopper | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: EngineError | None = None
        self.prefill: PrefillStats | None = None
        self.num_preemptions: int = 0
        self.is_corrupted: bool = False
        self.queued_s: float | None = None
        now_s = monotonic()
        self.sent_s: float = now_s
        self.latest_token_s: float = now_s
        self.ended_s: float = now_s
        self.first_token_s: float | None = None
        self.abort_expected: bool = False
        """Whether this client has asked the engine to end all requests: then their abort is a normal end."""

    @property
    def ended(self) -> bool:
        """Whether nothing will be added any more."""
        return self.finish_reason is not None or self.error is not None

    @property
    def prompt_was_run(self) -> bool:
        """Whether its first token has come."""
        return self.first_token_s is not None

    @property
    def num_tokens(self) -> int:
        """How many tokens have arrived."""
        return len(self.taken) + len(self.token_ids or ())

    @property
    def num_cached_tokens(self) -> int:
        """How many of the prompt's tokens came from a cache."""
        return 0 if self.prefill is None else self.prefill.num_cached_tokens

    def make_facts(self) -> RequestFacts:
        """What its outputs have in common as things stand: the same record until something changes."""
        if self.facts is None:
            prefill = self.prefill
            self.facts = msgspec.structs.replace(
                self.asked,
                rank=self.rank,
                queued_ts=self.sent_s,
                scheduled_ts=None if self.queued_s is None else self.sent_s + self.queued_s,
                first_token_ts=self.first_token_s,
                ended_ts=self.ended_s if self.ended else None,
                num_preemptions=self.num_preemptions,
                is_corrupted=self.is_corrupted,
                prefill=None if prefill is None else msgspec.convert(prefill, PrefillUsage, from_attributes=True),
            )
        return self.facts

    def moved(self, wire_id: str, rank: int) -> None:
        """It has been sent again."""
        self.wire_id, self.rank, self.facts = wire_id, rank, None

    def note_weights(self, version: str) -> None:
        """The weights of its engine are others from the next token on."""
        former = self.weights.get(self.rank)
        if self.details is None:
            if not self.num_tokens:
                return  # all of its tokens are theirs, which its end finds out, and nothing else has to be kept
            self.details = DetailCollector()
            if former is not None:
                self.details.weights(former, 0)
        self.details.weights(version, self.num_tokens)

    def push(self, output: EngineCoreOutput) -> bool:
        """Take one output from the engine; whether the request ends here, although the engine would go on.

        The hot loop: one call for each output, and no other in the middle of a stream, save for the wake-up."""
        stopped = self.stopper is not None and self.stopper.look(output)
        ids = output.new_token_ids
        if output.new_sampling_mask is not None or output.routed_experts is not None or output.num_nans_in_logits:
            self._note_details(output)
        if self.token_ids is None:
            self.token_ids = ids
        else:
            self.token_ids += ids
        if ids:
            self.latest_token_s = self.clock.now_s
        if output.prefill_stats is not None:
            self.prefill, self.facts = output.prefill_stats, None
        if output.events is not None:
            self._note_events(output)
        if output.finish_reason is not None:
            self._finish(output)
            if self.account is not None:
                self.account.close(self)
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
        self.ended_s, self.facts = monotonic(), None
        if self.account is not None:
            self.account.close(self)
        self.readable = True
        self.parker.wake()

    def _is_due(self, num_tokens: int) -> bool:
        """Whether the consumer shall have an item now: at the first tokens, at every ``interval`` and at the end."""
        if self.first_token_s is None:
            if num_tokens:
                self.first_token_s, self.facts = self.latest_token_s, None
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
        self.facts = None

    def _note_details(self, output: EngineCoreOutput) -> None:
        if output.num_nans_in_logits:
            self.is_corrupted, self.facts = True, None
        if self.details is None:
            self.details = DetailCollector()
        self.details.step(output)

    def _note_last_details(self, output: EngineCoreOutput) -> None:
        """What comes with the end, if anything does."""
        version = self.weights.get(self.rank)
        if self.details is None:
            if version is None and not any(getattr(output, name) for name in _LAST_DETAILS):
                return
            self.details = DetailCollector()
        self.details.last(output, version)

    def _finish(self, output: EngineCoreOutput) -> None:
        self.ended_s, self.facts = monotonic(), None
        if self.first_token_s is None and output.new_token_ids:
            self.first_token_s = self.latest_token_s
        self._note_last_details(output)
        reason = finish_reason_name(output.finish_reason)
        if reason == _ERROR:
            self.error = failed_by_engine(self.label, output)
        elif reason == _ABORT and not self.abort_expected:
            self.error = aborted_by_others(self.label)
        else:
            self.finish_reason = reason
            self.stop_reason = output.stop_reason


def failed_by_engine(label: str, output: EngineCoreOutput) -> RequestFailed:
    """The error of a request that the engine has ended with one."""
    detail, missing = output.error, tuple(output.mm_cache_miss_hashes or ())
    why, code = "it gave no reason", None
    if missing:
        why, code = f"{', '.join(map(repr, missing))} {_NOT_CACHED}", "multimodal_cache_miss"
    error = RequestFailed(
        f"the engine failed request {label!r}: {detail.message if detail else why}",
        code=detail.code if detail else code,
        retryable=detail.retryable if detail else False,
        request_id=label,
    )
    error.missing_hashes = missing
    return error


def aborted_by_others(label: str) -> RequestFailed:
    """The error of a request that the engine has aborted on its own account."""
    return RequestFailed(
        f"the engine aborted request {label!r}, which nobody asked for here: it is stopping, or was paused by someone "
        "else",
        code="engine_aborted",
        retryable=True,
        request_id=label,
    )


class PooledRequestState(RequestState):
    """Where the result of a pooling request arrives."""

    __slots__ = ("data",)

    def __init__(self, wire_id: str, label: str, parker: Parker, *, clock: BatchClock | None = None) -> None:
        super().__init__(wire_id, label, parker, clock=clock)
        self.data: Tensor | None = None

    @property
    def prompt_was_run(self) -> bool:
        """Whether its result has come."""
        return self.data is not None

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
