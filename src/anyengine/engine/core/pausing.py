"""Whether an engine runs, lets in, or refuses: the state behind pause and resume.

Owns the flags and the answers that are still owed. Which requests are aborted is the core's business.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Literal

__all__ = ["PauseGate", "PauseMode"]

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the running requests: ended with ABORT, run to their end, or frozen where they are."""


class PauseGate:
    """Open, until :meth:`pause`; open again after :meth:`resume`.

    Invariant: a Future given out by :meth:`pause` is completed by :meth:`settle` or by :meth:`resume`, whichever is
    first.
    """

    def __init__(self) -> None:
        self.paused: bool = False
        """No waiting request joins the batch."""
        self.frozen: bool = False
        """No step is run."""
        self.refuses_new: bool = False
        """New requests fail at once, instead of waiting for the end of the pause."""
        self._owed: list[Future[None]] = []

    @property
    def owes_answers(self) -> bool:
        return bool(self._owed)

    def pause(self, mode: PauseMode, *, refuse_new: bool) -> Future[None]:
        """Close the gate. The Future completes when nothing runs any more; for ``"keep"`` it is complete already."""
        self.paused, self.frozen, self.refuses_new = True, mode == "keep", refuse_new
        answer: Future[None] = Future()
        if self.frozen:
            answer.set_result(None)  # we are between two steps
        else:
            self._owed.append(answer)
        return answer

    def settle(self) -> None:
        """Nothing runs: the pauses asked for are complete."""
        for answer in self._owed:
            answer.set_result(None)
        self._owed.clear()

    def resume(self) -> None:
        """Open the gate. A pause that was not complete fails."""
        self.paused = self.frozen = self.refuses_new = False
        for answer in self._owed:
            answer.set_exception(RuntimeError("resumed before the engine was idle"))
        self._owed.clear()
