"""Many prompts in one call: a group of requests that lives and ends as one.

Owns which prompts have been sent, which answers are ready, and the one abort of all that have not ended. There is no
task and no scope: requests are sent while the group is iterated, and those that end leave word in a mailbox.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar, cast

import anyio
import anyio.lowlevel
from msgspec.structs import replace

from anyengine._client.inputs.prompts import Prompt
from anyengine._client.inputs.request_fields import RequestFields
from anyengine._client.session.wakeup import Parker, make_parker
from anyengine._rules import given, instance
from anyengine.exceptions import EngineAsleepError, EngineError, OverloadedError, QuotaExceededError
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind, SamplingParams

from .charges import Charge
from .desk import RequestDesk
from .fan_out import Completions
from .state import RequestState
from .stream import RequestStream

__all__ = ["Answer", "RequestGroup"]

Answer = TypeVar("Answer", bound=RequestOutput | EngineError, covariant=True)

_IN_A_ROW: Final = 32  # answers that are taken or given before others have their turn: a millisecond of our own work


class _Mailbox:
    """Which members have ended. Apart from the group, so that members do not keep a dropped group alive."""

    def __init__(self, parker: Parker) -> None:
        self.ended: deque[int] = deque()
        self.parker = parker

    def note(self, index: int) -> None:
        self.ended.append(index)
        self.parker.wake()


class RequestGroup(Generic[Answer]):
    """Pairs of a prompt's index and its output: an asynchronous iterator, and an asynchronous context manager. With
    ``on_error="collect"`` an error may stand in place of the output.

    Nothing happens until it is entered, or iterated for the first time. Use ``async with client.generate_many(...) as
    group`` where leaving must abort promptly whatever happens; a plain ``async for`` aborts on cancellation at once,
    and after ``break`` when the group is dropped. One task iterates at a time.
    """

    def __init__(
        self,
        desk: Callable[[], RequestDesk],
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        label: str | None,
        fields: RequestFields,
        *,
        limits_s: Mapping[str, float | None],
        ordered: bool,
        concurrency: int | None,
        on_error: Literal["raise", "collect"],
        charge: Charge | None = None,
    ) -> None:
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts must be several prompts, not one {type(prompts).__name__}: use generate()")
        if concurrency is not None and (isinstance(concurrency, bool) or concurrency < 1):
            raise ValueError(f"concurrency={concurrency!r} must be an int of at least 1, or None for no limit")
        if on_error not in ("raise", "collect"):
            raise ValueError(f"on_error={on_error!r} must be 'raise' or 'collect'")
        self._find_desk = desk
        self._todo = _paired(prompts, params)
        self._put_back: tuple[int, tuple[Prompt, SamplingParams]] | None = None
        self._all_sent = False
        self._is_over_quota = False  # until one of ours has ended, what was put back would be prepared in vain
        self._label, self._fields, self._limits_s, self._charge = label, fields, limits_s, charge
        self._ordered, self._concurrency, self._collects = ordered, concurrency, on_error == "collect"
        self._streams: dict[int, RequestStream] = {}  # in flight, or ended and not looked at
        self._sent: dict[int, Completions] = {}
        self._results: dict[int, RequestOutput | EngineError] = {}
        self._next_index = 0
        self._in_a_row = 0
        self._mailbox: _Mailbox | None = None
        self._desk: RequestDesk | None = None
        self._owned_by_block = False
        self._busy = False
        self._over = False
        self._error: EngineError | None = None

    @property
    def num_in_flight(self) -> int:
        """How many of its requests have been sent and have not ended."""
        return sum(not sent.ended for sent in self._sent.values())

    # ------------------------------------------------------------------- context

    async def __aenter__(self) -> Self:
        """Send the first requests, if that was not done.

        Raises: see :meth:`__anext__`.

        Cancellation: nothing is left in the engine.
        """
        try:
            if self._over:
                raise anyio.ClosedResourceError
            await self._send_more()
        except BaseException:
            self.close_nowait()
            raise
        self._owned_by_block = True
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close_nowait()

    async def aclose(self) -> None:
        """Leave the group: abort what has not ended, send nothing more. Idempotent.

        Cancellation: the abort is sent in any case.
        """
        self.close_nowait()
        await anyio.lowlevel.checkpoint()

    def close_nowait(self) -> None:
        """:meth:`aclose` without a checkpoint. Synchronous: it may stand in a ``finally``."""
        unfinished = _running(self._sent)
        if unfinished:
            assert self._desk is not None
            self._desk.abort(unfinished)
        self._over = True  # last: in another thread the abort is refused, and the group is what it was
        self._streams.clear()
        self._sent.clear()
        self._results.clear()

    def __del__(self) -> None:
        unfinished = _running(getattr(self, "_sent", {}))
        if unfinished:
            # A collection can run in another thread or in the middle of a send: only leave notes for the session.
            assert self._desk is not None
            for stream in self._streams.values():
                stream.disown()
            for state in unfinished:
                self._desk.dropped.put(state)
            warnings.warn(
                f"a group of requests was dropped with {len(unfinished)} in flight; they are aborted. Iterate it to "
                "its end, or use it as `async with client.generate_many(...) as group`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # ----------------------------------------------------------------- iteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Answer]:
        """The next pair. If there is one, others have their turn once in a while only.

        Raises:
            StopAsyncIteration: every prompt has been answered, or the group was closed.
            EngineError: with ``on_error="raise"``: a request failed, in the way that :class:`RequestStream` explains;
                ``prompt_index`` says which. All others are aborted. Again on every further call.
            BusyResourceError: another task is iterating.

        Cancellation: aborts all requests in one go, unless the group was entered with ``async with``, whose end then
        does. A pair leaves the group only by being returned: none is lost.
        """
        if self._over:
            if self._error is not None:
                raise self._error.for_waiter()
            raise StopAsyncIteration
        if self._busy:
            raise anyio.BusyResourceError("iterating over")
        self._busy = True
        try:
            index, result = await self._next()
        except EngineError as exc:
            self.close_nowait()
            self._error = exc
            raise
        except BaseException:
            if not self._owned_by_block or self._over:
                self.close_nowait()
            raise
        finally:
            self._busy = False
        return index, cast("Answer", result)  # no error is kept unless they are collected

    async def _next(self) -> tuple[int, RequestOutput | EngineError]:
        while not self._over:
            await self._send_more()
            mailbox = self._mailbox
            assert mailbox is not None
            while mailbox.ended:
                await self._take(mailbox.ended.popleft())
                await self._let_others_run()
            await self._let_others_run()
            index = self._next_index if self._ordered else next(iter(self._results), -1)
            if index in self._results:
                self._next_index += 1
                return index, self._results.pop(index)
            if self._all_sent and not self._streams:
                self._over = True
            else:
                await mailbox.parker.park()
        raise StopAsyncIteration

    async def _let_others_run(self) -> None:
        """Once in a while. Nothing is in hand meanwhile that a cancellation could lose."""
        self._in_a_row += 1
        if self._in_a_row >= _IN_A_ROW:
            self._in_a_row = 0
            await anyio.lowlevel.checkpoint()

    async def _take(self, index: int) -> None:
        """The result of a member that has ended: does not wait."""
        stream = self._streams.pop(index, None)
        if stream is None:
            return
        del self._sent[index]
        self._is_over_quota = False
        try:
            self._results[index] = await anext(stream)
        except EngineError as exc:
            self._fail(index, exc)

    async def _send_more(self) -> None:
        if self._mailbox is None:
            self._desk, self._mailbox = self._find_desk(), _Mailbox(make_parker())
        while not self._over and not self._all_sent and len(self._streams) < (self._concurrency or 1 << 60):
            if self._streams and (self._is_over_quota or not self._desk_open()):
                return  # the end of one of ours makes room
            task = self._put_back or next(self._todo, None)
            self._put_back = None
            if task is None:
                self._all_sent = True
                return
            if not await self._send(*task):
                return

    def _desk_open(self) -> bool:
        assert self._desk is not None
        return self._desk.admission.lets_in()

    async def _send(self, index: int, task: tuple[Prompt, SamplingParams]) -> bool:
        """Send one request; whether to go on."""
        assert self._mailbox is not None
        prompt, params = task
        stream = RequestStream(
            self._find_desk,
            prompt,
            params,
            self._label,
            self._fields,
            limits_s=self._limits_s,
            nowait=bool(self._streams),
            on_end=partial(self._mailbox.note, index),
            charge=self._charge,
        )
        try:
            self._sent[index] = await stream.start()
        except (OverloadedError, EngineAsleepError) as exc:
            if self._streams:  # it had to be let in at once; when it is the only one, it may wait, or is refused
                self._put_back = (index, task)
                self._is_over_quota = isinstance(exc, QuotaExceededError)
                return False
            self._fail(index, exc)
        except EngineError as exc:
            self._fail(index, exc)
        except BaseException:
            self._put_back = (index, task)
            raise
        else:
            self._streams[index] = stream
        return True

    def _fail(self, index: int, error: EngineError) -> None:
        error.prompt_index = index
        error.add_note(f"it was prompt {index} of those given to generate_many()")
        if not self._collects:
            raise error
        self._results[index] = error


def _running(sent: Mapping[int, Completions]) -> list[RequestState]:
    return [state for completions in sent.values() for state in completions.running()]


def _paired(
    prompts: Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[int, tuple[Prompt, SamplingParams]]]:
    """Each prompt with its index and its parameters; a group gives out whole answers.

    Raises:
        RequestRejected: they are no parameters.
        ValueError: there are not as many parameters as prompts.
    """
    untyped: Any = params  # may be anything
    if not isinstance(untyped, Sequence) or isinstance(untyped, str):
        whole = replace(given("sampling_params", untyped, SamplingParams), output_kind=OutputKind.FINAL_ONLY)
        return enumerate((prompt, whole) for prompt in prompts)
    several = [instance(f"sampling_params[{index}]", one, SamplingParams) for index, one in enumerate(untyped)]
    if isinstance(prompts, Sequence) and len(prompts) != len(several):
        raise ValueError(f"{len(several)} sampling_params for {len(prompts)} prompts: give one, or one for each")
    each = (replace(one, output_kind=OutputKind.FINAL_ONLY) for one in several)
    return enumerate(zip(prompts, each, strict=True))
