"""One request, several completions: ``n > 1``.

Owns how a request becomes children, which of them has something for the consumer, and what they are together. To the
engine each child is a request of its own, with one completion. Ids, seeds and what is delivered when are those of vLLM
0.32.0 (``v1/engine/parallel_sampling.py``). Sends nothing and waits for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from anyengine._client.session.wakeup import Parker
from anyengine._wire import EngineCoreRequest
from anyengine.exceptions import EngineError
from anyengine.outputs import RequestOutput

from .completion import Completion
from .state import RequestState

__all__ = ["ChildParker", "Completions", "children_of"]


def children_of(request: EngineCoreRequest, n: int) -> list[EngineCoreRequest]:
    """The requests that are sent for ``n`` completions of ``request``: itself for one, or as many with seeds that count
    up."""
    params = request.sampling_params
    if params is None or n == 1:
        return [request]
    return [
        replace(
            request,
            request_id=f"{index}_{request.request_id}",
            sampling_params=params if params.seed is None else replace(params, seed=params.seed + index),
        )
        for index in range(n)
    ]


class ChildParker:
    """What stands for the parker in the state of a child: notes who woke."""

    __slots__ = ("_index", "_parker", "_woken")

    def __init__(self, index: int, parker: Parker, woken: deque[int]) -> None:
        self._index = index
        self._parker = parker
        self._woken = woken

    async def park(self) -> None:
        await self._parker.park()

    def wake(self) -> None:
        self._woken.append(self._index)
        self._parker.wake()


class Completions:
    """The completions of one stream, at least one. Owned by the task that iterates it.

    Invariant: the index of a child that has something to read, or has ended and was not taken, is in ``woken``.
    """

    __slots__ = ("_all", "_failed", "_num_open", "_woken", "only", "parker")

    def __init__(self, completions: Sequence[Completion], parker: Parker, woken: deque[int]) -> None:
        self._all = completions
        self.only: Completion | None = completions[0] if len(completions) == 1 else None
        self._num_open = len(completions)
        self._failed: EngineError | None = None
        self._woken = woken
        self.parker = parker

    @property
    def states(self) -> list[RequestState]:
        """Where their outputs arrive."""
        return [one.state for one in self._all]

    @property
    def ended(self) -> bool:
        """Whether all have ended, or one of them with an error, which then ends the others."""
        return all(one.state.ended for one in self._all) or any(one.state.error for one in self._all)

    @property
    def all_taken(self) -> bool:
        """Whether the last item of each has been taken."""
        return all(one.over for one in self._all)

    @property
    def lag(self) -> int:
        """How many tokens have arrived and have not been taken."""
        return sum(len(one.state.token_ids or ()) for one in self._all)

    def running(self) -> list[RequestState]:
        """Those that have not ended."""
        return [one.state for one in self._all if not one.state.ended]

    def ready(self, *, gather: bool) -> bool:
        """Whether there is something to take, or an error to raise; with ``gather``, only when all have ended."""
        if self.only is not None:
            state = self.only.state
            return state.ended or (state.readable and not gather)
        if gather:
            return self.ended
        return self._next() is not None or self._failed is not None

    def failure(self, *, gather: bool) -> EngineError | None:
        """The error that ends the request as a whole, once there is nothing to take before it."""
        if gather:
            return next((one.state.error for one in self._all if one.state.error is not None), None)
        if self.only is not None:  # the hot loop: one look, and no call
            state = self.only.state
            return None if state.error is None or state.token_ids else state.error
        return self._failed if self._next() is None else None

    def take(self, *, gather: bool) -> RequestOutput:
        """The next item: of the completion that has had something for longest; with ``gather``, all of all."""
        if gather:
            return self._take_all()
        one = self.only or self._next()
        assert one is not None
        if self._woken:
            self._woken.popleft()
        output = one.take(self._num_open - 1)
        self._num_open -= one.over
        self._failed = self._failed or one.state.error
        return output

    def snapshot(self) -> RequestOutput:
        """Everything that has arrived, of all of them."""
        return self._together([one.snapshot() for one in self._all])

    # ----------------------------------------------------------------- the parts

    def _next(self) -> Completion | None:
        """Of several, the completion whose turn it is; one that has failed, and has nothing from before, is noted."""
        woken = self._woken
        while woken:
            one = self._all[woken[0]]
            if self._has_something(one):
                return one
            woken.popleft()
        return None

    def _has_something(self, one: Completion) -> bool:
        state = one.state
        if state.error is not None and not state.token_ids:
            self._failed = self._failed or state.error
            return False
        return state.readable and not one.over

    def _take_all(self) -> RequestOutput:
        self._num_open = 0
        return self._together([one.take(everything=True) for one in self._all])

    @staticmethod
    def _together(outputs: Sequence[RequestOutput]) -> RequestOutput:
        return outputs[0] if len(outputs) == 1 else replace(outputs[0], others=tuple(outputs[1:]))
