"""Requests that are not ready to be scheduled: something of theirs, such as a grammar, is compiled in another thread.

Owns who waits for what. What is prepared, and where, is the model runner's business.
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for

from anyengine.engine.interfaces import SequenceState

__all__ = ["Preparations"]

_WAIT_S = 0.02
"""How long an idle engine waits at once: a command that arrives meanwhile is delayed by no more than that."""


class Preparations:
    """Sequences with the Future of each. Owned by the busy loop's thread; other threads complete the Futures."""

    def __init__(self) -> None:
        self._pending: dict[str, tuple[SequenceState, Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, seq: SequenceState, preparation: Future[None]) -> None:
        self._pending[seq.request_id] = (seq, preparation)

    def discard(self, request_id: str) -> None:
        """Nobody wants it any more. Unknown ids are ignored."""
        seq_and_preparation = self._pending.pop(request_id, None)
        if seq_and_preparation is not None:
            seq_and_preparation[1].cancel()

    def take_done(self) -> list[tuple[SequenceState, BaseException | None]]:
        """Those that are ready, or have failed, since the last call; in the order of arrival."""
        done = [(seq, future) for seq, future in self._pending.values() if future.done()]
        for seq, _ in done:
            del self._pending[seq.request_id]
        return [(seq, future.exception()) for seq, future in done]

    def wait(self) -> None:
        """Let a moment pass in which one of them may become ready."""
        if self._pending:
            wait_for([future for _, future in self._pending.values()], _WAIT_S, FIRST_COMPLETED)
