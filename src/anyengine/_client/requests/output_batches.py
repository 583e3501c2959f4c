"""Output batches: what the engines send, as the user of the low-level client gets it.

Owns the iteration, and what a request's failure and a rank's death look like in it. Requests are the client's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Self

import anyio

from anyengine._client.engines.burials import RankDeath
from anyengine._client.engines.fences import FencePassed
from anyengine._client.session.session import Session
from anyengine._protocol import UtilityReply
from anyengine._wire import EngineCoreOutput, EngineCoreOutputs, EngineRequestError, FinishReason
from anyengine.exceptions import EngineDeadError, OutputProcessingError

__all__ = ["BatchConsumer", "OutputBatches"]


class OutputBatches:
    """An asynchronous iterator over the output batches of a client. It never ends by itself; it raises what ended
    the client."""

    def __init__(self, receive: Callable[[], Awaitable[EngineCoreOutputs]]) -> None:
        self._receive = receive

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EngineCoreOutputs:
        return await self._receive()


class BatchConsumer:
    """The consumer of every request of a low-level client that has none of its own: collects what belongs to live
    requests. Lifetime: the client's."""

    def __init__(self) -> None:
        self._outputs: list[EngineCoreOutput] = []

    def push(self, output: EngineCoreOutput) -> None:
        self._outputs.append(output)

    def fail(self, error: BaseException) -> None:
        """Nothing to do: whoever iterates the batches gets the error."""

    def aborted(self) -> None:
        """Nothing to do: whoever aborts by wire id knows."""

    async def receive(self, session: Session, abort: Callable[[str], object]) -> EngineCoreOutputs:
        """See :meth:`EngineCoreClient.receive_outputs`; ``abort`` aborts a request by its wire id."""
        try:
            while isinstance(item := await session.feed.receive(), FencePassed):
                session.fences.passed(item.rank, item.number)
        except anyio.EndOfStream:
            assert session.cause is not None
            raise session.cause.for_waiter() from None
        if isinstance(item, EngineDeadError):
            raise item.for_waiter()
        if isinstance(item, RankDeath):
            return self._failed(session, item)
        assert not isinstance(item, UtilityReply)  # those are resolved as they arrive
        self._outputs = []
        for entry, exc in session.connection.requests.dispatch(item.outputs):
            abort(entry.request_id)  # a consumer of the caller's own failed (rule 5), or has had enough
            if exc is None:
                continue
            error = OutputProcessingError(f"cannot take an output of request {entry.request_id!r}: {exc!r}")
            error.__cause__ = exc
            entry.consumer.fail(error)
        session.fences.look_at_late_outputs()
        if session.send_budget.waiting:
            session.send_budget.wake()
        item.outputs = self._outputs
        return item

    def _failed(self, session: Session, death: RankDeath) -> EngineCoreOutputs:
        """The end of a rank's requests, as one more batch: each has failed; their consumers are told."""
        entries = session.connection.requests.fail_all(death.error, death.rank, only=death.request_ids)
        trouble = EngineRequestError("engine_dead", str(death.error), retryable=True)
        outputs = [
            EngineCoreOutput(entry.request_id, [], finish_reason=FinishReason.ERROR, error=trouble)
            for entry in entries
            if entry.consumer is self
        ]
        return EngineCoreOutputs(engine_index=death.rank, outputs=outputs)
