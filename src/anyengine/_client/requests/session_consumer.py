"""A request whose prompt comes in parts, as the engine answers it: one answer for each part, one id for all.

Owns which part an output belongs to, and when the engine has forgotten the request. Mirrors vLLM 0.32.0
``v1/core/sched/scheduler.py`` (``_handle_stopped_request``): each part ends with a finish reason although the request
lives on; the word that no part follows has no answer of its own. An abort ends the request, parts that wait included,
and one that waits for a part as well (``finish_requests``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from anyengine._client.session.wakeup import Parker
from anyengine._wire import EngineCoreOutput, FinishReason
from anyengine.exceptions import EngineError

from .state import RequestState, aborted_by_others

__all__ = ["SessionConsumer"]


class SessionConsumer:
    """The registry's consumer of such a request.

    Invariants: ``parts`` are those sent and not ended, in order. ``keep_open(False)`` is called once the next finish
    reason is the last one, and ``forget`` once none follows.
    """

    __slots__ = ("_aborts_expected", "_forget", "_keep_open", "_latest", "closing", "error", "over", "parker", "parts")

    def __init__(self, parker: Parker, keep_open: Callable[[bool], None], forget: Callable[[], object]) -> None:
        self._keep_open = keep_open
        self._forget = forget
        self._latest: RequestState | None = None
        self._aborts_expected = False
        self.parker = parker
        self.parts: deque[RequestState] = deque()
        self.closing: bool = False
        """The engine has been told that no part follows."""
        self.over: bool = False
        """Nothing will come any more."""
        self.error: EngineError | None = None
        """What ended it between two parts."""

    @property
    def state(self) -> RequestState | None:
        """That of the part which is being answered, or was last."""
        return self.parts[0] if self.parts else self._latest

    def expect_abort(self) -> None:
        """This client has asked the engine to end all requests: then an abort is a normal end."""
        self._aborts_expected = True
        for part in self.parts:
            part.abort_expected = True

    def add(self, part: RequestState) -> None:
        """A part has been sent."""
        self.parts.append(part)

    def close(self) -> None:
        """The engine has been told that no part follows."""
        self.closing = True
        self._settle()
        self.parker.wake()

    def push(self, output: EngineCoreOutput) -> bool:
        """Take one output from the engine; whether the request ends here, although the engine would go on.

        Raises:
            ValueError: every part has been answered.
        """
        if not self.parts:
            if output.finish_reason != FinishReason.ABORT:
                raise ValueError("the engine sent an output behind the answer to the last part of the prompt")
            if self._aborts_expected:
                self.aborted()
            else:
                assert self._latest is not None
                self.fail(aborted_by_others(self._latest.label))
            return True
        part = self.parts[0]
        part.push(output)
        if not part.ended:
            return False
        self._latest = self.parts.popleft()
        if part.error is not None:  # what follows would be the answer to another prompt
            self.fail(part.error)
            return True
        if part.finish_reason == "abort":  # a part that was on its way would be another request to the engine
            self.aborted()
            return True
        self._settle()
        return False

    def fail(self, error: BaseException) -> None:
        """No further output will come; ``error`` is why."""
        assert isinstance(error, EngineError)
        if not self.parts:
            self.error = self.error or error
        for part in self._drop():
            part.fail(error)

    def aborted(self) -> None:
        """Aborted through this client: no further output will come."""
        for part in self._drop():
            part.aborted()

    def _drop(self) -> list[RequestState]:
        parts = [*self.parts]
        self._latest = parts[-1] if parts else self._latest
        self.parts.clear()
        self.over = True
        self.parker.wake()
        return parts

    def _settle(self) -> None:
        if not self.closing:
            return
        if len(self.parts) == 1:
            self._keep_open(False)
        elif not self.parts:
            self.over = True
            self._forget()
