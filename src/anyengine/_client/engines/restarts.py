"""Engines that died are started again, each rank for itself, for as long as the policy grants it.

Owns the way from a death to a rank that serves again: the old process is cleared away, both sockets have seen it
disconnect and are empty, and only then is the new one started (docs/design.md, Incarnations). Whether and when is the
policy's account (:class:`~anyengine._protocol.RestartBudget`); what a death means for requests is others'.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import msgspec

from anyengine._client.session.startup import refuse_waves, settle_dialects, start_engine
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import Restart, RestartBudget, merge_registrations
from anyengine.exceptions import EngineDeadError, EngineError, EngineStartupError, RemoteProtocolError

from .engine_limits import learn_limits
from .reception import Reception

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["Restarts"]

_logger = logging.getLogger("anyengine.client")

_SETTLE_S = 5.0  # for the kernel to end a killed process; and for libzmq to notice that it is gone


class Restarts:
    """See the module. Lifetime: one session, in whose group each rank's restart is a task.

    Invariant: a rank that is in ``pending`` is not in the rota, and has a task that brings it back or gives it up.
    """

    def __init__(self, session: Session, *, chance: Callable[[], float] | None = None) -> None:
        self._session = session
        self.chance: Callable[[], float] = _chance if chance is None else chance
        self._changed = anyio.Event()
        self._policy = session.settings.restart
        self._budgets: dict[int, RestartBudget] = {}
        self._scopes: dict[int, anyio.CancelScope] = {}
        self._idle = anyio.Event()
        self._idle.set()
        self._reception = Reception(session)
        self.count: int = 0
        """How many restarts have succeeded."""

    @property
    def pending(self) -> tuple[int, ...]:
        """The ranks that are being started again."""
        return tuple(self._scopes)

    @property
    def are_awaited(self) -> bool:
        """Whether a request that no rank can take now shall wait for one to come back."""
        return self._policy is not None and self._policy.while_down == "wait" and self.are_hoped_for

    @property
    def are_hoped_for(self) -> bool:
        """Whether some rank may serve again: one that is dying may be granted a restart."""
        return self._policy is not None and bool(self._scopes or self._session.connection.rota.alive)

    def grant(self, rank: int, death: EngineDeadError) -> bool:
        """Whether the rank, which is dead, is started again: then that has begun. Synchronous."""
        if self._policy is None or self._session.cause is not None:
            return False
        restart = self._next(rank, death)
        if restart is None:
            return False
        scope = self._scopes[rank] = anyio.CancelScope()
        if self._idle.is_set():
            self._idle = anyio.Event()
        self._session.tasks.start_soon(self._session.own, self._bring_back, rank, restart, scope)
        return True

    def look(self) -> None:
        """A rank is back or lost, or the session has ended: whoever waits for a rank looks again. Synchronous."""
        self._changed.set()
        self._changed = anyio.Event()

    async def wait_change(self) -> None:
        """Wait until :meth:`look` is called.

        Cancellation: safe.
        """
        await self._changed.wait()

    async def stop(self) -> None:
        """Leave every restart where it is, since the session ends: whatever it has started is the session's.

        Cancellation: safe.
        """
        for scope in self._scopes.values():
            scope.cancel()
        await self._idle.wait()

    def final(self, rank: int, failure: EngineError) -> EngineDeadError:
        """The death that is final, by the last failure: with the history of those before it."""
        history = self._budgets[rank].history if rank in self._budgets else ()
        if isinstance(failure, EngineDeadError):
            death = copy.copy(failure)
        else:
            death = EngineDeadError(str(failure), rank=rank, pid=getattr(failure, "pid", None))
            death.__cause__ = failure
        if history:
            assert self._policy is not None
            times = f"it was started again {len(history)} times in {self._policy.window_s:g} s, after:"
            lines = [f"  {type(one).__name__}: {one.args[0]}" for one in history]
            death.args = ("\n".join([f"{death.args[0]}; {times}", *lines]),)
            death.history = history
        return death

    # ------------------------------------------------------------------ internals

    def _next(self, rank: int, failure: EngineError) -> Restart | None:
        assert self._policy is not None
        budget = self._budgets.setdefault(rank, RestartBudget(self._policy))
        restart = budget.failed(failure, anyio.current_time(), self.chance())
        if restart is not None:
            _logger.warning(
                "engine %d is started again in %.1f s (%d of %d times in %g s): %s",
                rank,
                restart.delay_s,
                restart.attempt,
                self._policy.max_restarts,
                self._policy.window_s,
                failure,
            )
            self._session.life.restarting(rank, failure, restart.attempt, restart.delay_s)
        return restart

    async def _bring_back(self, rank: int, restart: Restart, scope: anyio.CancelScope) -> None:
        session = self._session
        failure: EngineError | None = None
        try:
            with scope:
                while True:
                    try:
                        await self._attempt(rank, restart.delay_s)
                        break
                    except EngineError as exc:
                        failure = exc
                    if session.cause is not None:
                        return
                    following = self._next(rank, failure)
                    if following is None:
                        break
                    restart, failure = following, None
        finally:
            del self._scopes[rank]
            if not self._scopes:
                self._idle.set()
        if scope.cancelled_caught or session.cause is not None:
            return
        if failure is not None:
            session.burials.give_up(rank, self.final(rank, failure))
        else:
            self._back(rank)

    async def _attempt(self, rank: int, delay_s: float) -> None:
        """Have the rank ready to serve.

        Raises:
            EngineError: it is not, and not cleared away either.
        """
        session = self._session
        resume_s = anyio.current_time() + delay_s
        await self._clear_away(rank)
        await anyio.sleep(max(0.0, resume_s - anyio.current_time()))
        if session.cause is not None:
            return
        session.liveness.suspicion.returning(rank)
        try:
            await self._start(rank)
        except BaseException:
            session.liveness.suspicion.gave_up(rank)
            raise

    async def _clear_away(self, rank: int) -> None:
        """The process is reaped, with all that it started, and nothing of what it sent is left."""
        session = self._session
        engine = session.engines[rank]
        assert isinstance(engine, SupervisedEngine)
        engine.child.terminate()
        with anyio.move_on_after(session.settings.shutdown_grace_s):
            await session.wait_unwatched(engine)
        engine.child.kill()
        with anyio.move_on_after(_SETTLE_S) as limit:
            await session.wait_unwatched(engine)
        if limit.cancelled_caught:
            raise _not_cleared(rank, "its process was killed, and does not end")
        await engine.see_off()
        engine.child.reap()
        with anyio.move_on_after(_SETTLE_S) as limit:
            await session.liveness.links_settled()
        if limit.cancelled_caught:
            raise _not_cleared(rank, "its process has ended, and somebody holds its connections")
        await session.burials.read_to_the_end()
        await self._reception.clear()

    async def _start(self, rank: int) -> None:
        """Start the engine, and learn of it what is learnt at a start."""
        session = self._session
        ready = False
        failure: EngineError | None = None
        start_engine(session, rank)
        engine = session.engines[rank]
        assert isinstance(engine, SupervisedEngine)

        async def await_exit() -> None:
            nonlocal failure
            await session.wait_unwatched(engine)
            failure = engine.startup_error()
            race.cancel_scope.cancel()

        with anyio.move_on_after(session.settings.startup_timeout_s) as deadline:
            async with anyio.create_task_group() as race:
                race.start_soon(await_exit)
                try:
                    await self._greet(rank)
                    ready = True
                except RemoteProtocolError as exc:
                    failure = engine.handshake_error(exc)
                except EngineError as exc:
                    failure = exc
                race.cancel_scope.cancel()
        if deadline.cancelled_caught and not ready:
            failure = engine.startup_timeout(session.settings.startup_timeout_s)
        if failure is not None:
            raise failure

    async def _greet(self, rank: int) -> None:
        session, connection = self._session, self._session.connection
        handshake = await self._reception.admit(rank)
        session.registrations.update(handshake.registrations)
        refuse_waves(session)
        connection.replace(rank, handshake.dialects[rank])
        former = connection.limits.get(rank)
        await settle_dialects(session, [rank])
        await learn_limits(session, [rank])
        if former is not None and connection.limits[rank].tasks is None:  # it was asked before, and is the same
            connection.limits[rank] = msgspec.structs.replace(connection.limits[rank], tasks=former.tasks)
        session.merged_registration, _ = merge_registrations(session.registrations.values())

    def _back(self, rank: int) -> None:
        """The rank serves again. Synchronous: whoever waits finds everything in place."""
        session = self._session
        self.count += 1
        session.burials.exhume(rank)
        session.connection.rota.revive(rank)
        session.send_budget.forget(rank)
        session.life.back(rank)
        session.liveness.returned(rank)
        session.send_budget.wake()
        self.look()
        _logger.warning("engine %d serves again", rank)
        engine = session.engines[rank]
        if isinstance(engine, SupervisedEngine) and engine.child.exited.is_set():
            session.burials.bury(rank)  # it died a moment ago, when nobody took that for a death


def _not_cleared(rank: int, why: str) -> EngineStartupError:
    return EngineStartupError(f"engine {rank} cannot be started again: {why}", rank=rank, stage="clearing")


def _chance() -> float:
    """A random number from 0 to 1. (The module random would load hashlib and OpenSSL with it.)"""
    return int.from_bytes(os.urandom(4)) / 0xFFFF_FFFF
