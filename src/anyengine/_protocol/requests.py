"""The request registry: which requests this client has in its engines, and who gets their outputs.

Owns the answer to "is this id ours, and alive?". An entry exists from the moment before its ADD is sent until its final
output or its abort; the prompt tokens that wait for their first output come and
go with it. Pure: consumers are objects with three synchronous methods; nothing here sends or waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from anyengine._wire import EngineCoreOutput
from anyengine.exceptions import LocalProtocolError

from .aborts import AbortLedger

__all__ = ["OutputConsumer", "RequestEntry", "RequestRegistry"]


class OutputConsumer(Protocol):
    """Where a request's outputs go. The methods are synchronous and must not block. What ends it is called once, last:
    :meth:`push` of an output with a finish reason, :meth:`fail` or :meth:`aborted`."""

    def push(self, output: EngineCoreOutput) -> bool | None:
        """Take one output; whether it was the last one that it takes, although the engine would go on."""

    def fail(self, error: BaseException) -> None:
        """No further output will come; ``error`` is why."""

    def aborted(self) -> None:
        """Aborted through this client: no further output will come."""


class _Stage(Enum):
    QUEUED = auto()
    STARTED = auto()
    BROKEN = auto()


_STARTED = _Stage.STARTED  # a name of the module costs less than an attribute of the class, in the hot loop


@dataclass(slots=True, eq=False)
class RequestEntry:
    """One live request. ``consumer`` outlives the entry; the entry never outlives the request.

    Attributes:
        stage: ``QUEUED`` until its first output, then ``STARTED``; ``BROKEN`` when the consumer could not take an
            output, or wants no more, and whoever was told of it aborts the request.
        num_prompt_tokens: what it counts for in ``num_queued_tokens``.
        resumable: a finish reason ends a part of it, and not the request.
        sent_bytes: everything that its rank had been sent when this request had been.
    """

    request_id: str
    rank: int
    consumer: OutputConsumer
    stage: _Stage = _Stage.QUEUED
    num_prompt_tokens: int = 0
    sent_bytes: int = 0
    resumable: bool = False

    @property
    def broken(self) -> bool:
        """Whether the consumer could not take an output."""
        return self.stage is _Stage.BROKEN


@dataclass(slots=True)
class RequestRegistry:
    """Live requests by wire id, and what they add up to.

    Invariants: an id is opened at most once while it lives; after it has left (finished, aborted, failed) its outputs
    are strays: dropped and counted in ``late_outputs``. An id that has finished may be used again. One that was aborted
    may not: a vLLM engine keeps the abort until its next step, which then ends the new request without a word, and no
    reply of the engine tells when that was (INTEROP §1). (Since only live requests are aborted, one that is not
    remembered any more can be unsafe only if the engine made no step while all the others came and went.) An entry's
    prompt counts in ``num_queued_tokens`` from its opening on, and leaves it exactly once.
    """

    live: dict[str, RequestEntry] = field(default_factory=dict)
    late_outputs: int = 0
    aborts: AbortLedger = field(default_factory=AbortLedger)
    moved: bool = False
    """Whether a request has started or left, or an output was late, since somebody looked and reset it."""
    num_ended: int = 0
    """How many have left, in whatever way."""
    num_live: Counter[int] = field(default_factory=Counter)
    """How many of the live ones each rank has."""
    num_queued_tokens: int = 0
    """Prompt tokens of the requests that have had no output yet."""
    read_bytes: dict[int, int] = field(default_factory=dict)
    """How much of what it was sent a rank has read for certain, by what it has answered."""
    on_idle: Callable[[], None] | None = None
    """Called when the last live request has left."""

    def __len__(self) -> int:
        return len(self.live)

    def open(self, request_id: str, rank: int, consumer: OutputConsumer, *, num_prompt_tokens: int = 0) -> RequestEntry:
        """Register a request, before its ADD is sent.

        Raises:
            LocalProtocolError: the id is alive already, and a second ADD of it would kill a vLLM engine (PROTOCOL §12);
                or it was aborted not long ago.
        """
        if request_id in self.live:
            raise LocalProtocolError(f"request id {request_id!r} is alive already: use another id")
        if request_id in self.aborts:
            raise LocalProtocolError(
                f"request id {request_id!r} was aborted, and the engine may hold that against a new request of this id:"
                " use another id"
            )
        entry = self.live[request_id] = RequestEntry(request_id, rank, consumer, num_prompt_tokens=num_prompt_tokens)
        self.num_live[rank] += 1
        self.num_queued_tokens += num_prompt_tokens
        return entry

    def close(self, request_id: str, *, aborted: bool = False) -> RequestEntry | None:
        """Forget a request (``aborted``: its engine is told to); its entry, or ``None`` if it was not alive."""
        entry = self.live.pop(request_id, None)
        if entry is not None:
            self._leave(entry)
            if aborted:
                self.aborts.note(request_id, entry.rank)
            if not self.live and self.on_idle is not None:
                self.on_idle()
        return entry

    def keep_open(self, request_id: str, keep: bool) -> None:
        """Whether a finish reason leaves the request alive from now on, if it is."""
        if (entry := self.live.get(request_id)) is not None:
            entry.resumable = keep

    def dispatch(self, outputs: Sequence[EngineCoreOutput]) -> list[tuple[RequestEntry, Exception | None]]:
        """Give each output to its consumer: the client's hot loop.

        Returned are the entries that the caller must abort, each once, and which get nothing more: with the error of a
        consumer that failed, to be failed by the caller, or ``None`` for one that has had enough. One consumer's
        failure is its own: the other outputs are delivered all the same.
        """
        get = self.live.get
        to_abort: list[tuple[RequestEntry, Exception | None]] = []
        for output in outputs:
            entry = get(output.request_id)
            if entry is None:
                self.late_outputs += 1
                self.aborts.late_output(output.request_id)
                self.moved = True
                continue
            if entry.stage is not _STARTED:
                if entry.stage is _Stage.BROKEN:  # after what it could not take there would be a hole
                    if output.finish_reason is not None:
                        self.close(entry.request_id)
                    continue
                self._start(entry)
            if output.finish_reason is not None and not entry.resumable:
                self.close(entry.request_id)
            try:
                if entry.consumer.push(output):
                    entry.stage = _Stage.BROKEN
                    to_abort.append((entry, None))
            except Exception as exc:  # noqa: BLE001 - rule 5: whatever it is, it is this one request's error
                entry.stage = _Stage.BROKEN
                to_abort.append((entry, exc))
        return to_abort

    def by_rank(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """The live ones among ``request_ids``, grouped by the rank that runs them."""
        groups: dict[int, list[str]] = {}
        for request_id in dict.fromkeys(request_ids):
            entry = self.live.get(request_id)
            if entry is not None:
                groups.setdefault(entry.rank, []).append(request_id)
        return groups

    def of_rank(self, rank: int) -> frozenset[str]:
        """The ids of the live requests that ``rank`` runs."""
        return frozenset(entry.request_id for entry in self.live.values() if entry.rank == rank)

    def fail_all(
        self, error: BaseException, rank: int | None = None, *, only: Collection[str] | None = None
    ) -> list[RequestEntry]:
        """Fail every live request (of ``rank``, or of those with these ids, if given) and forget it; the entries that
        were failed.

        Everyone is told, whatever a consumer makes of it: its own exception ends with it.
        """
        doomed = [entry for entry in self.live.values() if rank is None or entry.rank == rank]
        if only is not None:
            doomed = [entry for entry in doomed if entry.request_id in only]
        for entry in doomed:
            self.close(entry.request_id)
        for entry in doomed:
            with suppress(Exception):
                entry.consumer.fail(error)
        return doomed

    def _start(self, entry: RequestEntry) -> None:
        """Its first output has come: the engine has read it, and everything sent before."""
        entry.stage = _STARTED
        self.moved = True
        self.num_queued_tokens -= entry.num_prompt_tokens
        if entry.sent_bytes > self.read_bytes.get(entry.rank, 0):
            self.read_bytes[entry.rank] = entry.sent_bytes

    def _leave(self, entry: RequestEntry) -> None:
        self.num_ended += 1
        self.num_live[entry.rank] -= 1
        self.moved = True
        if entry.stage is _Stage.QUEUED:
            self.num_queued_tokens -= entry.num_prompt_tokens
