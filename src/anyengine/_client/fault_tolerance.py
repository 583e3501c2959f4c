"""Faults of engines that wait to be told what to do about them, instead of dying (vLLM's fault tolerance).

Owns the call, its checks, and what the client makes of the answer. What is known of each rank is
:mod:`anyengine._protocol.faults`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from anyengine._protocol import FaultToleranceStatus, RankState
from anyengine._wire import HANDLE_FAULT, INSTRUCTIONS, FaultToleranceRequest, FaultToleranceResult
from anyengine.exceptions import UtilityError

from .core_client import EngineCoreClient
from .operations import refuse, refuse_unless

__all__ = ["FaultHandling"]

_GONE = (RankState.DEAD, RankState.RESTARTING)


class FaultHandling:
    """Part of :class:`EngineClient`. Lifetime: the client's."""

    _core: EngineCoreClient

    async def handle_fault(
        self,
        fault_tolerance_request: FaultToleranceRequest,
        *,
        rank: int | None = None,
        unchecked: bool = False,
        timeout_s: float | None = None,
    ) -> FaultToleranceResult:
        """Tell an engine that waits after a fault what to do: ``FaultToleranceRequest("retry")``.

        For engines that were started with ``enable_fault_tolerance`` (vLLM 0.27 and later): at a fault they abort every
        request, tell of it (:meth:`get_status`, ``on_notification``), and wait, 120 s as a rule. ``rank`` is who is
        told; by default every rank that is known to be unhealthy, or all that live if none is: their results are one,
        a success if each is one. A result without success is no error: it says why, and so does :meth:`get_status`.
        ``unchecked`` sends the request to an engine that is not known to have fault tolerance, which it leaves deaf if
        it has not, and with any instruction.

        Raises:
            UtilityRejected: bad input, or an engine without fault tolerance; nothing was sent.
            UtilityError: an engine refused, or its answer makes no sense.
            UtilityTimeout: it has not answered within ``timeout_s``; it may still carry it out.
            RequestRejected: there is no such rank.
            EngineDeadError: an engine died, or the client is closed.

        Cancellation: the call is forgotten; the engine may still carry it out.
        """
        request = _checked(fault_tolerance_request, unchecked=unchecked)
        session = self._core.usable_session()
        unhealthy = [one.rank for one in (await self.get_status()).values() if one.status == "unhealthy"]
        answers = await self._core.utility_on(
            (unhealthy or None) if rank is None else [rank],
            HANDLE_FAULT,
            request,
            unchecked=unchecked,
            timeout_s=timeout_s,
        )
        results = {told: _result(told, answer) for told, answer in answers.items()}
        for told, result in results.items():
            session.faults.answered(told, result)
        if len(results) == 1:
            return next(iter(results.values()))
        failures = [f"engine {told}: {result.reason}" for told, result in results.items() if not result.success]
        return FaultToleranceResult(request.request_id, not failures, "; ".join(failures) or None)

    async def get_status(self) -> dict[int, FaultToleranceStatus]:
        """What each rank was last heard to be: healthy, unhealthy (it waits for :meth:`handle_fault`), or dead. Asks no
        engine; :meth:`health` does.

        Raises:
            ClientClosedError: the client has not been entered.
        """
        session = self._core.session
        known = {rank: session.faults.status(rank) for rank in session.ranks}
        gone = {rank: msgspec.structs.replace(one, status="dead") for rank, one in known.items() if rank in self._gone}
        return known | gone

    @property
    def _gone(self) -> list[int]:
        return [rank for rank, state in self._core.life.ranks.items() if state in _GONE]


def _checked(request: FaultToleranceRequest, *, unchecked: bool) -> FaultToleranceRequest:
    method = "handle_fault"
    refuse_unless(FaultToleranceRequest, method, "fault_tolerance_request", request, "use FaultToleranceRequest(...)")
    refuse_unless(str, method, "request_id", request.request_id, "use a str")
    refuse_unless(Mapping, method, "params", request.params, "use a dict")
    refuse_unless(str, method, "instruction", request.instruction, "use 'retry'")
    if request.instruction not in INSTRUCTIONS and not unchecked:
        known = f"use one of {', '.join(map(repr, INSTRUCTIONS))}"
        refuse(method, "instruction", request.instruction, "is no instruction of vLLM's engines", known)
    return request


def _result(rank: int, answer: Any) -> FaultToleranceResult:
    try:
        return msgspec.convert(answer, FaultToleranceResult)
    except msgspec.ValidationError as exc:
        message = f"{HANDLE_FAULT!r} returned {answer!r:.80} from engine {rank}: {exc}"
        raise UtilityError(message, method=HANDLE_FAULT, rank=rank) from exc
