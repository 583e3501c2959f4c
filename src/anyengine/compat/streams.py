"""What ``AsyncLLM.generate`` returns: an asynchronous iterator in the caller's loop over a stream in the client's.

Owns the crossing of loops. Items cross as they come, unlike those of :mod:`anyengine.sync`: so a call that returns is a
fence here, too, and what came before it has been handed over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Self

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from anyengine import outputs, params
from anyengine._client.inputs.prompts import Prompt
from anyengine._client.inputs.request_fields import GenerateOptions
from anyengine._client.session.wakeup import make_bell, make_parker
from anyengine.params import OutputKind
from anyengine.sync.client_thread import ClientThread

from .outputs import Accumulator, PoolingRequestOutput, RequestOutput

__all__ = ["OutputStream", "PoolingStream"]


class _Arrivals:
    """What has come of one request, on its way between the loops: filled in the client's, emptied in the caller's.

    It is one item, which grows until it is taken: a slow consumer costs no more than what it gets. The caller sets
    ``bell`` before it looks whether there is something, and the client puts it there before it looks at ``bell``: one
    of them sees the other.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._lock = Lock()  # for what neither waits nor calls anybody
        self.bell: Callable[[], None] | None = None

    def any(self) -> bool:
        return self._accumulator.has_new

    def put(self, output: outputs.RequestOutput) -> None:
        with self._lock:
            self._accumulator.add(output)
        self.ring()

    def take(self) -> RequestOutput:
        with self._lock:
            return self._accumulator.take()

    def ring(self, _: Any = None) -> None:
        if (bell := self.bell) is not None:
            bell()


class OutputStream:
    """The items of one request. Inert until it is iterated for the first time; one task iterates. While it is not over
    it keeps ``owner``, whose end is the engine's; the client's side of it does not.

    Leaving it aborts the request: :meth:`aclose`, cancellation of the iteration, or the last reference to it (after
    ``break``, say).
    """

    _task: Future[None] | None = None

    def __init__(
        self,
        thread: ClientThread,
        prompt: Prompt,
        prompt_text: str | None,
        sampling_params: params.SamplingParams,
        options: GenerateOptions,
        *,
        owner: object = None,
    ) -> None:
        kind = sampling_params.output_kind
        if kind is OutputKind.CUMULATIVE:
            sampling_params = replace(sampling_params, output_kind=OutputKind.DELTA)
        self._thread = thread
        self._owner: object = owner
        self._arrivals = arrivals = _Arrivals(Accumulator(kind, prompt_text))
        self._serve = lambda: _serve(thread, arrivals, prompt, sampling_params, options)
        self._over = False
        self._busy = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next item, with everything that has arrived since the last one.

        Raises: see :meth:`RequestStream.__anext__`.

        Cancellation: aborts the request.
        """
        if self._over:
            raise StopAsyncIteration
        if self._busy:
            raise anyio.BusyResourceError("iterating over")
        self._busy = True
        try:
            item = await self._next()
        except BaseException:
            self._leave()
            raise
        finally:
            self._busy = False
        if item.finished:
            self._over, self._owner = True, None
        return item

    async def _next(self) -> RequestOutput:
        arrivals, task = self._arrivals, self._task
        if task is None:
            self._thread.check_place()
            task = self._task = self._thread.submit(self._serve)
            task.add_done_callback(arrivals.ring)
        if not arrivals.any():
            parker = make_parker()
            arrivals.bell = make_bell(parker)
            try:
                while not arrivals.any() and not task.done():
                    await parker.park()
            finally:
                arrivals.bell = None
        else:
            await anyio.lowlevel.checkpoint_if_cancelled()
        if arrivals.any():
            return arrivals.take()
        if not task.cancelled():
            task.result()  # raises what has ended it
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Leave the stream: abort the request if it is still running. Idempotent.

        Cancellation: the abort is sent in any case.
        """
        self._leave()
        await anyio.lowlevel.checkpoint()

    def _leave(self) -> None:
        self._over, self._owner = True, None
        if self._task is not None:
            self._task.cancel()  # without effect on one that has ended

    def __del__(self) -> None:
        if self._task is not None:
            self._task.cancel()


class PoolingStream:
    """The one item of a pooling request. Inert until it is iterated."""

    def __init__(self, thread: ClientThread, compute: Callable[[], Awaitable[PoolingRequestOutput]]) -> None:
        self._thread = thread
        self._compute: Callable[[], Awaitable[PoolingRequestOutput]] | None = compute

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PoolingRequestOutput:
        """The item.

        Raises: see :meth:`EngineClient.encode`; ``StopAsyncIteration``: it was given.

        Cancellation: aborts the request.
        """
        compute, self._compute = self._compute, None
        if compute is None:
            raise StopAsyncIteration
        return await self._thread.call_async(compute)


async def _serve(
    thread: ClientThread,
    arrivals: _Arrivals,
    prompt: Prompt,
    sampling_params: params.SamplingParams,
    options: GenerateOptions,
) -> None:
    """The request, in the client's loop. Leaving it, by cancellation too, aborts it."""
    async with thread.client.generate(prompt, sampling_params, **options) as stream:
        async for output in stream:
            arrivals.put(output)
