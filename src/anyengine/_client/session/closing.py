"""How a session ends: what is in flight may finish, then everyone is told, then the engines are stopped.

Owns the order and the time limits of an end, and the report of it. It is asked for when the block is left, or before
(:meth:`Closing.stop` inside the block); it happens once. What follows it (reaping, sockets, files) is
:mod:`.lifecycle`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec

from anyengine._client.engines.liveness import PROBE
from anyengine._process.supervisor import SupervisedEngine
from anyengine._setting_rules import check_seconds
from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import engine_identity

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Closing", "EngineExit", "KilledProcess", "ShutdownReport"]

_logger = logging.getLogger("anyengine.client")

_STARTUP_GRACE_S = 0.5  # an engine that is still loading has nothing to finish
_KILLED_LIMIT_S = 10.0  # what has been killed goes in a moment, unless the kernel holds it
_ORPHANS_GRACE_S = 0.5  # at least, for what a killed engine has left behind


class KilledProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that did not end by itself. ``pid`` is ``None`` for an engine in this process."""

    pid: int | None
    rank: int
    why: str


class EngineExit(msgspec.Struct, frozen=True, kw_only=True):
    """How the last process of a rank ended: an exit code or the name of a signal, or neither, if nobody knows."""

    rank: int
    pid: int | None
    exit_code: int | None
    signal: str | None


class ShutdownReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a client's block ended: what was cut short, how long it took, and what had to be killed."""

    in_flight_requests: int
    """How many requests were in flight when no new ones were taken any more."""
    aborted_requests: int
    """How many of them were aborted, since they had not finished by the end of ``drain_timeout_s``."""
    drain_s: float
    """How long they were waited for."""
    stop_s: float
    """How long it took to stop the engines."""
    killed: tuple[KilledProcess, ...]
    exits: tuple[EngineExit, ...]
    """How the engines ended, those too whose death was told before they had."""


class Closing:
    """See the module. Lifetime: one session. Any task of the client's loop may call it; the first one does the work,
    and later ones wait for it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stopped: anyio.Event | None = None
        self._limit_s = session.settings.shutdown_grace_s + 2 * _KILLED_LIMIT_S + 2.0  # the engines, and what they left
        self._was_ready = False
        self._in_flight: int | None = None
        self._aborted = 0
        self._drain_s = self._stop_s = 0.0
        self._needed_kill: list[KilledProcess] = []
        self.is_draining: bool = False
        """What is in flight may finish; nothing new is taken."""

    @property
    def report(self) -> ShutdownReport:
        """What there is to say of the end."""
        left_behind = [
            KilledProcess(pid=pid, rank=engine.rank, why=f"engine {engine.rank} left it behind")
            for engine in self._session.children
            for pid in engine.child.killed_orphans
        ]
        return ShutdownReport(
            in_flight_requests=self._in_flight or 0,
            aborted_requests=self._aborted,
            drain_s=self._drain_s,
            stop_s=self._stop_s,
            killed=(*self._needed_kill, *left_behind),
            exits=tuple(
                EngineExit(rank=engine.rank, pid=engine.child.pid, exit_code=ended.exit_code, signal=ended.signal)
                for engine in self._session.children
                if (ended := engine.child.poll()) is not None
            ),
        )

    async def close(self, drain_timeout_s: float | None, tell: Callable[[], None]) -> None:
        """All of it, before the block is left: :meth:`drain`, ``tell`` everyone, :meth:`stop`.

        Raises:
            WrongLoopError: called from another thread than the one that entered the client.

        Cancellation: ends the drain, and nothing else.
        """
        check_seconds("drain_timeout_s", drain_timeout_s, none="for what the client was told")
        self._session.check_thread()
        if self._session.is_released:
            return
        try:
            await self.drain(drain_timeout_s)
        finally:
            tell()
            await self.stop()  # noqa: ASYNC102 - shielded and bounded inside

    async def drain(self, timeout_s: float | None = None) -> None:
        """Take no new requests, and wait until those in flight have ended, for ``timeout_s`` at most (by default: what
        the client was told). Whoever leaves the block meanwhile ends the wait.

        Cancellation: ends the wait; what is in flight stays so until the session is closed.
        """
        session = self._session
        self._admit_no_more()
        if not self._is_busy():
            return
        started_s = anyio.current_time()
        try:
            limit_s = session.settings.drain_timeout_s if timeout_s is None else timeout_s
            with anyio.move_on_after(limit_s):
                while self._is_busy():
                    await session.wait_idle()
        finally:
            self._drain_s += anyio.current_time() - started_s
            if left := self._num_in_flight():
                _logger.info("%d requests have not finished, and are aborted", left)

    def _is_busy(self) -> bool:
        session = self._session
        return session.cause is None and self._num_in_flight() > 0

    def _num_in_flight(self) -> int:
        session = self._session
        return len(session.connection.requests) + session.sent_again if session.is_connected else 0

    def note_closed(self) -> None:
        """The session is about to be closed: what is still in flight now is aborted. Synchronous, idempotent."""
        session = self._session
        if session.cause is None:
            self._admit_no_more()
            self._aborted = self._num_in_flight()
        self.is_draining = False

    def _admit_no_more(self) -> None:
        session = self._session
        if self._in_flight is None:
            self._was_ready = session.life.is_running
            self._in_flight = self._num_in_flight()
            self.is_draining = self._was_ready
            session.send_budget.wake()  # whoever waits to send is refused
        session.life.closing()

    async def stop(self) -> None:
        """Tell everyone that the client is closed and stop the engines: SIGTERM, grace, SIGKILL; then see off what they
        started. Takes at most ``shutdown_grace_s`` and 4 s, and as long as the kernel needs to end what was killed (a
        moment, as a rule; it is given 10 s for the engines, and 10 s for what they had started).

        Cancellation: shielded, and bounded.
        """
        if self._stopped is not None:
            with anyio.move_on_after(self._limit_s, shield=True):
                await self._stopped.wait()
            return
        # Nothing is awaited before the part that ends the processes whatever happens: native cancellation goes through
        # shields.
        self._stopped, started_s = anyio.Event(), anyio.current_time()
        try:
            await self._stop()
        finally:
            self._stop_s = anyio.current_time() - started_s
            self._stopped.set()

    async def _stop(self) -> None:
        session = self._session
        self.note_closed()
        session.abort_live()  # an engine that is not ours lives on, and must not go on with them
        session.close()
        session.life.closing()
        grace_s = session.settings.shutdown_grace_s if self._was_ready else _STARTUP_GRACE_S
        engines = session.children
        deadline_s = anyio.current_time() + grace_s
        try:
            # A cancelled block still ends its processes in order.
            with anyio.move_on_after(grace_s, shield=True):
                await session.restarts.stop()
                engines = session.children
                if self._was_ready and not engines:
                    await _settle_aborts(session)
                for engine in engines:
                    engine.child.terminate()
                for engine in engines:
                    await session.wait_unwatched(engine)
                    if not engine.child.exited.is_set():
                        # Its task was cancelled natively (asyncio.run does it to all tasks at its end), which also goes
                        # through shields.
                        await engine.supervise()
        finally:
            for engine in engines:  # native cancellation goes through shields, so this does not await
                self._kill(engine, grace_s)
        with anyio.move_on_after(self._limit_s, shield=True):
            async with anyio.create_task_group() as farewells:
                for engine in engines:
                    farewells.start_soon(_see_off, session, engine, deadline_s)

    def _kill(self, engine: SupervisedEngine, grace_s: float) -> None:
        if engine.child.poll() is None:
            why = f"it did not end within {grace_s:g} s of being told to"
            self._needed_kill.append(KilledProcess(pid=engine.child.pid, rank=engine.rank, why=why))
            # One that is still loading cannot listen; one that was ready ought to.
            level = logging.WARNING if self._was_ready else logging.INFO
            _logger.log(level, "engine %d (%s) is killed: %s", engine.rank, engine.child.name, why)
        engine.child.kill()


async def _see_off(session: Session, engine: SupervisedEngine, deadline_s: float) -> None:
    with anyio.move_on_after(_KILLED_LIMIT_S) as limit:
        await session.wait_unwatched(engine)  # the watch reads the same pipe
    if limit.cancelled_caught:
        engine.abandon()
        return
    await engine.see_off(max(_ORPHANS_GRACE_S, deadline_s - anyio.current_time()))


async def _settle_aborts(session: Session) -> None:
    """Wait until engines that live on have taken our aborts: closing the sockets drops what is still under way."""
    await session.stop_drain()  # it may have been cancelled already: from here on we read
    unsettled, call_ids = set(session.connection.rota.serving), list[int]()
    try:
        for rank in tuple(unsettled):
            call, frames = session.connection.utility(PROBE, (), rank, partial(unsettled.discard, rank))
            call_ids.append(call.call_id)
            try:
                session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
            except PeerUnreachable:
                unsettled.discard(rank)
        while unsettled:
            session.receive(await session.endpoints.outputs.drain())
    finally:
        for call_id in call_ids:
            session.connection.utilities.forget(call_id)
