"""Utility calls: named methods of the engines, on one rank or on several.

Owns how a call travels and how replies of several ranks come together. Knows no method but the one that changes
nothing: names, arguments and results are :mod:`anyengine._client.operations`'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio

from anyengine._client.session.session import Session
from anyengine._protocol import PendingCall
from anyengine._setting_rules import check_seconds
from anyengine.exceptions import EngineDeadError, EngineUnresponsiveError, UtilityError, UtilityTimeout

from .liveness import PROBE

__all__ = ["EngineCalls", "call_ranks"]


class EngineCalls:
    """The calls of a client. Lifetime: the client's; every call belongs to the task that makes it."""

    @property
    def session(self) -> Session:
        raise NotImplementedError

    def usable_session(self) -> Session:
        """:attr:`session`, if new calls can be made on it."""
        raise NotImplementedError

    async def utility(
        self,
        method: str,
        *args: Any,
        rank: int | None = None,
        unchecked: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Call a named method of one engine, between two steps of its main loop, and return its result as plain data.

        The engine is that of ``rank``, or the first one that lives. The reply is a fence: the engine has taken every
        request and abort sent to it before, in order. Methods that would end the engine, or silence it, are refused,
        and so are those that its release does not have. ``unchecked`` sends any call: for engines with methods of their
        own, and for those who know what it does.

        Raises:
            UtilityRejected: the engine has no such method, or would not survive the call; nothing was sent.
            UtilityError: the engine refused, or the method failed.
            UtilityTimeout: it has not answered within ``timeout_s``; as when cancelled, it may still carry it out.
            EncodeError: an argument cannot be encoded; nothing was sent.
            RequestRejected: there is no such rank.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: the call is forgotten and its late reply dropped; the engine may still carry it out.
        """
        session = self.usable_session() if rank is not None else await self._session_with_ranks()
        chosen = session.connection.rota.alive[0] if rank is None else session.check_rank(rank)
        return (await _call_in_time(session, method, args, [chosen], timeout_s, unchecked=unchecked))[chosen]

    async def utility_on(
        self,
        ranks: Iterable[int] | None,
        method: str,
        *args: Any,
        unchecked: bool = False,
        timeout_s: float | None = None,
    ) -> dict[int, Any]:
        """:meth:`utility` on several ranks, by default on all that live; their results by rank.

        Sent to all before any reply is awaited: some calls end on one rank only when the others have them too. Waits
        for every reply; if one is a failure, or a rank dies meanwhile, the error of the first such rank is raised then;
        its ``outcomes`` has the result of each rank, or its error.

        Raises:
            UtilityError, EncodeError, RequestRejected, EngineDeadError: see :meth:`utility`.
            UtilityTimeout: some have not answered within ``timeout_s``.

        Cancellation: the calls are forgotten; the engines may still carry them out.
        """
        session = self.usable_session() if ranks is not None else await self._session_with_ranks()
        alive = session.connection.rota.alive
        chosen = alive if ranks is None else tuple(map(session.check_rank, dict.fromkeys(ranks)))
        return await _call_in_time(session, method, args, chosen, timeout_s, unchecked=unchecked)

    async def utility_on_all(self, method: str, *args: Any) -> dict[int, Any]:
        """:meth:`utility` on all ranks that live, for what must hold of every one: asked again without those that die
        meanwhile. Their results by rank.

        Raises:
            UtilityError, EncodeError, EngineDeadError: see :meth:`utility`; no death but the last one's.

        Cancellation: the calls are forgotten; the engines may still carry them out.
        """
        while True:
            try:
                return await self.utility_on(None, method, *args)
            except EngineDeadError:
                if not self.usable_session().connection.rota.serving:
                    raise

    async def ping(self, timeout_s: float = 10.0, *, rank: int | None = None) -> float:
        """Ask an engine's main loop (by default: every engine's) for a sign of life; seconds until all had answered.

        A failure is no death: a stopped engine may go on, and its requests with it. (``liveness_timeout_s`` is when the
        client itself gives up on it.)

        Raises:
            EngineUnresponsiveError: one has not answered within ``timeout_s``; it may be in a long step.
            ValueError: ``timeout_s`` is no number of seconds.
            RequestRejected, EngineDeadError: see :meth:`utility`.

        Cancellation: safe.
        """
        check_seconds("timeout_s", timeout_s)
        session = self.usable_session()
        if not session.connection.rota.alive:
            raise session.down()
        ranks = session.connection.rota.alive if rank is None else [session.check_rank(rank)]
        started_s = anyio.current_time()
        unanswered: set[int] = set()
        with anyio.move_on_after(timeout_s) as limit, suppress(UtilityError):
            await call_ranks(session, PROBE, (), ranks, unanswered=unanswered)
        if limit.cancelled_caught:
            symptom = f"its main loop has not answered within {timeout_s:g} s"
            raise session.burials.describe(min(unanswered), symptom, EngineUnresponsiveError)
        return anyio.current_time() - started_s

    async def _session_with_ranks(self) -> Session:
        """:attr:`session`, with a rank that lives: one that is started again is waited for, if the policy says so.

        Raises:
            EngineDeadError: the engine died, or the client is closed.
        """
        session = self.usable_session()
        if not session.connection.rota.alive:
            await session.send_budget.wait_room()
            session = self.usable_session()
        if not session.connection.rota.alive:
            raise session.down()
        return session

    def utility_arity(self, method: str) -> int | None:
        """How many arguments ``method`` takes at most in the release of every engine that lives; ``None`` if one does
        not know it."""
        connection = self.session.connection
        arities = [connection.utility_arity(method, rank) for rank in connection.rota.alive or connection.ranks]
        known = [arity for arity in arities if arity is not None]
        return min(known) if len(known) == len(arities) else None


async def _call_in_time(
    session: Session,
    method: str,
    args: Sequence[Any],
    ranks: Sequence[int],
    timeout_s: float | None,
    *,
    unchecked: bool,
) -> dict[int, Any]:
    if timeout_s is None:
        return await call_ranks(session, method, args, ranks, unchecked=unchecked)
    unanswered: set[int] = set()
    with anyio.move_on_after(timeout_s):
        return await call_ranks(session, method, args, ranks, unchecked=unchecked, unanswered=unanswered)
    silent = sorted(unanswered)
    who = f"engine {silent[0]} has" if len(silent) == 1 else f"engines {', '.join(map(str, silent))} have"
    raise UtilityTimeout(
        f"{who} not answered the utility call {method!r} within {timeout_s:g} s; a late answer is dropped",
        method=method,
        rank=silent[0] if silent else None,
    )


async def call_ranks(
    session: Session,
    method: str,
    args: Sequence[Any],
    ranks: Sequence[int],
    *,
    unchecked: bool = False,
    unanswered: set[int] | None = None,
) -> dict[int, Any]:
    """Call ``method`` on ``ranks`` that exist; see :meth:`EngineCalls.utility_on`.

    ``unanswered`` is kept up to date for whoever gives up waiting: the ranks that have not answered yet.
    """
    unanswered = set() if unanswered is None else unanswered
    unanswered.update(ranks)
    calls: dict[int, PendingCall] = {}
    done = anyio.Event()

    def answered(rank: int) -> None:
        unanswered.remove(rank)
        if not unanswered:
            done.set()

    try:
        messages = {}
        for rank in ranks:  # everything is encoded before anything is sent
            on_done = partial(answered, rank)
            calls[rank], messages[rank] = session.connection.utility(method, args, rank, on_done, unchecked=unchecked)
        for rank, frames in messages.items():
            try:
                session.send(rank, frames)
            except EngineDeadError as exc:
                session.connection.utilities.forget(calls[rank].call_id)  # its death must not count twice
                calls[rank].error = exc
                answered(rank)
        if unanswered:
            await done.wait()
    finally:
        for call in calls.values():
            session.connection.utilities.forget(call.call_id)
    outcomes = {rank: call.value if call.error is None else call.error for rank, call in calls.items()}
    for call in calls.values():
        if call.error is not None:
            call.error.outcomes = outcomes
            raise call.error
    return outcomes
