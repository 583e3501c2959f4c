"""The output processor: takes what a session's feed brings, in the order received, and feeds the merge buffers.

Owns the pace: it works in slices, of little time and few rows, and lets other tasks run in between, so that one large
batch holds up nobody. What is left of a batch is kept here, so an interruption between two slices loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import anyio.lowlevel

from anyengine._client.core_client import EngineCoreClient
from anyengine._client.engines.burials import RankDeath
from anyengine._client.engines.fences import FencePassed
from anyengine._client.session.session import SessionItem
from anyengine._protocol import UtilityReply
from anyengine._wire import EngineCoreOutput, OutputBatch
from anyengine.exceptions import EngineDeadError, OutputProcessingError

from .resubmission import state_of
from .state import BatchClock

__all__ = ["OutputProcessor"]

_SLICE_S: Final = 0.001
_SLICE_ROWS: Final = 256
"""Each row wakes a consumer, which runs before we do again: its work counts too."""
_CHUNK_ROWS: Final = 128
"""Rows between two looks at the clock; most batches have fewer."""


class OutputProcessor:
    """See the module. Owning task: the one that runs :meth:`run`. Lifetime: one session."""

    def __init__(self, core: EngineCoreClient, on_end: Callable[[EngineDeadError], None]) -> None:
        self._core = core
        self._on_end = on_end
        self._session = core.session
        self.clock: BatchClock = BatchClock()
        """Of the outputs that are being given out."""
        self._rest: Sequence[EngineCoreOutput] = ()  # of the batch that is being processed
        self._next_row = 0
        self._rows_done = 0
        self._items_taken = 0
        self.weights: dict[int, str] = {}
        """The label of the weights that sampled the latest batch of each rank."""

    async def run(self) -> None:
        """Process until the session ends, whose cause goes to ``on_end``, behind everything else."""
        feed = self._session.feed
        while True:
            self._rows_done = 0
            if self._rest:
                await anyio.lowlevel.checkpoint()
            else:
                try:
                    self.take(await feed.receive())
                except anyio.EndOfStream:
                    return
            self._work_for_a_slice()

    def finish(self) -> None:
        """Process all that has arrived, without a pause. Synchronous, idempotent."""
        while self._rest:
            self._dispatch_chunk()
        while True:
            try:
                self.take(self._session.feed.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream):
                break
            while self._rest:
                self._dispatch_chunk()

    async def caught_up(self) -> None:
        """Wait until all that has been received by now has reached its consumers, or the session has ended.

        Cancellation: safe.
        """
        received = self._items_taken + len(self._session.feed)
        while True:
            if self._session.cause is not None or self._items_taken - bool(self._rest) >= received:
                return
            await anyio.lowlevel.checkpoint()  # a turn is a slice of the work: nothing is gained by being woken

    def take(self, item: SessionItem) -> None:
        """Process one item of the session's feed, or begin with it."""
        self._items_taken += 1
        session = self._session
        if isinstance(item, OutputBatch):
            if item.weight_version is not None and item.weight_version != self.weights.get(item.engine_index):
                self._note_weights(item.engine_index, item.weight_version)
            if len(item.outputs) <= _CHUNK_ROWS:
                self._dispatch(item.outputs)
            else:
                self._rest, self._next_row = item.outputs, 0
                self._dispatch_chunk()
        elif isinstance(item, UtilityReply):
            session.connection.utilities.resolve(item.rank, item.output)
        elif isinstance(item, RankDeath):
            session.connection.requests.fail_all(item.error, item.rank, only=item.request_ids)
            session.connection.utilities.fail_all(item.error, item.rank, only=item.call_ids)
            session.on_room()
        elif isinstance(item, EngineDeadError):
            self._on_end(item)
        else:
            assert isinstance(item, FencePassed)
            session.fences.passed(item.rank, item.number)

    def _note_weights(self, rank: int, version: str) -> None:
        """From this batch on, the tokens of ``rank`` are those of other weights, unless it is the first to say so."""
        if rank in self.weights:
            for entry in self._session.connection.requests.live.values():
                if entry.rank == rank and (state := state_of(entry.consumer)) is not None:
                    state.note_weights(version)
        self.weights[rank] = version

    def _work_for_a_slice(self) -> None:
        feed = self._session.feed
        slice_end_s = time.perf_counter() + _SLICE_S
        while self._rows_done < _SLICE_ROWS and time.perf_counter() < slice_end_s:
            if self._rest:
                self._dispatch_chunk()
                continue
            try:
                self.take(feed.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream):
                break

    def _dispatch_chunk(self) -> None:
        """The next rows of what is left of a batch."""
        start, self._next_row = self._next_row, self._next_row + _CHUNK_ROWS
        rows = self._rest[start : self._next_row]
        if self._next_row >= len(self._rest):
            self._rest = ()
        self._dispatch(rows)

    def _dispatch(self, rows: Sequence[EngineCoreOutput]) -> None:
        self._rows_done += len(rows)
        session, requests = self._session, self._session.connection.requests
        self.clock.now_s, self.clock.loop_now_s = time.monotonic(), session.received_s
        for entry, exc in requests.dispatch(rows):
            self._core.abort([entry.request_id])
            if exc is None:  # a stop string ended it, of which the engine knows nothing
                continue
            state = state_of(entry.consumer)
            assert state is not None
            error = OutputProcessingError(
                f"cannot take an output of request {entry.request_id!r}: {exc!r}", request_id=state.label
            )
            error.__cause__ = exc
            entry.consumer.fail(error)
        if requests.moved:  # nothing of this concerns a token in the middle of its stream
            requests.moved = False
            session.fences.look_at_late_outputs()
            session.on_room()
