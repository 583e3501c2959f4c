"""What a client does with requests as a whole: many prompts at once, aborts, drains, admission.

Owns the public methods for it. How a single request lives is :mod:`.requests.stream`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, Unpack, overload

from anyengine._rules import a_type, instance
from anyengine.exceptions import EngineAsleepError, EngineError, RequestRejected
from anyengine.outputs import RequestOutput
from anyengine.params import BeamSearchParams, SamplingParams

from .beam_search import search_beams
from .core_client import EngineCoreClient
from .engines.fences import Patience
from .inputs.prompts import Prompt
from .inputs.request_fields import GroupOptions, RequestFields, check_field_names
from .requests.deadlines import time_limits
from .requests.desk import RequestDesk
from .requests.many import RequestGroup
from .requests.state import RequestState
from .requests.stream import RequestStream

__all__ = ["RequestControl"]

RequestName: TypeAlias = str | RequestStream
"""A request's label (which several may share), its wire id, or its stream."""


class RequestControl:
    """Part of :class:`EngineClient`. Lifetime: the client's."""

    _core: EngineCoreClient

    def _entered_desk(self) -> RequestDesk:
        raise NotImplementedError

    @overload
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[GroupOptions],
    ) -> RequestGroup[RequestOutput]: ...
    @overload
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["raise", "collect"],
        **options: Unpack[GroupOptions],
    ) -> RequestGroup[RequestOutput | EngineError]: ...
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        ordered: bool = False,
        concurrency: int | None = None,
        on_error: Literal["raise", "collect"] = "raise",
        request_id: str | None = None,
        timeout_s: float | None = None,
        first_token_timeout_s: float | None = None,
        inter_token_timeout_s: float | None = None,
        **fields: Unpack[RequestFields],
    ) -> RequestGroup[Any]:
        """One answer for each of ``prompts``: iterate over pairs of the prompt's index and its whole output. Inert, as
        :meth:`generate` is.

        Outputs come as they are complete, or in the order of the prompts (``ordered``). At most ``concurrency``
        requests are in flight (``None``: as many as admission lets in); the next ones are sent while the group is
        iterated. ``sampling_params`` are those of all prompts, or one for each. ``on_error="raise"``: the first failure
        aborts all others and is raised, with its ``prompt_index``; ``"collect"``: an error takes the place of the
        output. What else there is holds
        for each request, and is explained at :meth:`generate`.
        """
        check_field_names("generate_many", fields)
        limits_s = time_limits(timeout_s, first_token_timeout_s, inter_token_timeout_s)
        return RequestGroup(
            self._entered_desk,
            prompts,
            sampling_params,
            request_id,
            fields,
            limits_s=limits_s,
            ordered=ordered,
            concurrency=concurrency,
            on_error=on_error,
        )

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> RequestOutput:
        """The ``beam_width`` best answers to ``prompt``, in ``outputs``, best first: each step is a request of one
        token for each beam, so a prefix cache makes it cheap. The engine must allow ``logprobs`` of twice the width.

        Raises:
            RequestRejected: bad input; nothing was sent.
            QuotaExceededError: the limiter refuses the search as a whole; nothing was sent.
            OverloadedError, EngineAsleepError, RequestFailed, EngineDeadError: see :meth:`generate_many`.

        Cancellation: aborts what is in flight.
        """
        check_field_names("beam_search", fields)
        instance("params", params, BeamSearchParams)
        return await search_beams(self._entered_desk, prompt, params, request_id, fields)

    async def abort(
        self, request: RequestName | Iterable[RequestName], *, timeout_s: float | None = None
    ) -> tuple[str, ...]:
        """Abort requests by label, wire id or stream, or several of these; the wire ids of those that were in flight.

        Their streams yield their last item, with ``finish_reason="abort"`` and everything that has arrived, at once.
        This call returns when the engines have confirmed that they hold none of them (a utility call behind the aborts
        is the fence). Requests that are not sent yet are never sent. What is not alive is left alone: a second abort
        does nothing.

        Raises:
            RequestRejected: what names no request; nothing has been aborted.
            DrainTimeout: an engine has not confirmed within ``timeout_s``; it names the ranks.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: the aborts have been sent; only the confirmation is not awaited.
        """
        names = _names(request)
        labels = {name for name in names if isinstance(name, str)}
        streams = {name for name in names if isinstance(name, RequestStream)}
        self._core.usable_session()
        desk = self._entered_desk()
        for stream in streams:
            if not stream.wire_ids:
                stream.abort()
        for ticket in list(desk.admission.tickets):
            if ticket.label in labels:
                ticket.abort()
        labels.update(wire_id for stream in streams for wire_id in stream.wire_ids)
        return await self._abort(
            [state for state in desk.live() if state.label in labels or state.wire_id in labels], timeout_s
        )

    async def abort_all(self, *, timeout_s: float | None = None) -> tuple[str, ...]:
        """:meth:`abort` for every request of this client."""
        self._core.usable_session()
        desk = self._entered_desk()
        for ticket in list(desk.admission.tickets):
            ticket.abort()
        return await self._abort(desk.live(), timeout_s)

    async def drain(self, *, timeout_s: float | None = None) -> None:
        """Wait until every request that is in flight now has ended, and every engine has confirmed that it holds none
        of them. Requests that are sent meanwhile are not waited for.

        Raises:
            DrainTimeout: requests have not ended, or an engine has not confirmed, within ``timeout_s``; it names the
                ranks. Nothing is aborted.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: safe.
        """
        session = self._core.usable_session()
        desk = self._entered_desk()
        patience = Patience(timeout_s)
        await desk.wait_ended(desk.live(), patience)
        await session.fences.wait(session.connection.rota.serving, patience)
        self._core.usable_session()

    def check_admission(self, n: int = 1) -> None:
        """Whether a request of ``n`` sequences would be taken now: for a server that has not read the prompt yet.

        Raises:
            OverloadedError: a limit is reached.
            EngineAsleepError: the engine is paused or asleep.
            EngineDeadError: the engine died, or the client is closed.
        """
        self._core.usable_session()
        self._entered_desk().admission.check(n)

    def _close_admission(self, engine_is: str, *, ends_requests: bool) -> bool:
        """See :class:`EngineOperations`."""
        session, desk = self._core.usable_session(), self._entered_desk()
        was_open = desk.admission.is_open
        ranks = session.connection.rota.serving or session.restarts.pending  # the call goes to the first that is back
        desk.admission.close(partial(_asleep, engine_is), ranks=ranks)
        if ends_requests:
            desk.expect_aborts()
        return was_open

    def _open_admission(self) -> bool:
        """See :class:`EngineOperations`."""
        admission = self._entered_desk().admission
        was_closed = not admission.is_open
        admission.open()
        return was_closed

    async def _abort(self, states: Sequence[RequestState], timeout_s: float | None) -> tuple[str, ...]:
        desk, session, patience = self._entered_desk(), self._core.usable_session(), Patience(timeout_s)
        aborted = desk.abort(states)
        if aborted:
            ranks = {state.rank for state in states}
            await session.fences.wait(ranks.intersection(session.connection.rota.serving), patience)
            self._core.usable_session()
        return aborted


def _names(request: RequestName | Iterable[RequestName]) -> list[RequestName]:
    names = [request] if isinstance(request, str | RequestStream) or not isinstance(request, Iterable) else [*request]
    for name in names:
        if not isinstance(name, str | RequestStream):
            raise RequestRejected(
                f"request={name!r} is {a_type(name)}, which names no request",
                parameter="request",
                value=name,
                remedy="give a label, a wire id or a stream, or several of these",
            )
    return names


def _asleep(engine_is: str) -> EngineAsleepError:
    remedy = "wake_up()" if engine_is == "asleep" else "resume_generation()"
    return EngineAsleepError(
        f"the engine is {engine_is}, or is about to be, since this client asked for it: {remedy} lets requests in "
        "again; nothing was sent"
    )
