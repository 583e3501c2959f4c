"""How the ranks of a session die: one by one, each with its own cause, and everything it still said comes first.

Owns which ranks are dying or dead, and of what. Who is to be buried is found out elsewhere (:mod:`.liveness`, the
supervisors of the processes); what the last death means for the session is the session's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from anyengine._process.attached import AttachedRank
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol.suspicion import SENTINEL
from anyengine.exceptions import EngineDeadError, EngineUnresponsiveError

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["Burials", "RankDeath"]

_logger = logging.getLogger("anyengine.client")

_LAST_WORDS_S = 1.0  # how long it may take until everything is here that an ended engine has sent
_LOST_LINK_S = 0.4  # for one that has lost a connection to end: a killed one does with it, a deaf or mute one never
_SENTINEL_S = 0.025
"""For one that has sent ENGINE_CORE_DEAD, its last message, to end, so that the error can say how. Some take long, or
live on, and whoever waits is not to wait for that: see :meth:`Burials._see_out`."""


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A rank has died, and the session goes on: without it, or until it is started again. It takes with it what it had
    then: whoever hears of it late must not take from it what its successor has."""

    rank: int
    error: EngineDeadError
    request_ids: frozenset[str]
    call_ids: frozenset[int]


class Burials:
    """See the module. Lifetime: one session, in whose tasks the burials run, one after the other.

    Invariants: a rank is buried once for each time it is started; its death is told behind everything that it sent.
    """

    def __init__(self, session: Session, ranks: Iterable[int]) -> None:
        self._session = session
        self.deaths: dict[int, EngineDeadError] = {}
        """What each rank died of, once that is told."""
        self.ended: dict[int, anyio.Event] = {rank: anyio.Event() for rank in ranks}
        """Set when the rank's death is told, or when the session has ended."""
        self._dying: dict[int, tuple[str | None, type[EngineDeadError]]] = {}
        self._one_by_one = anyio.Lock()

    @property
    def untold(self) -> list[int]:
        """The ranks that are dying, in the order in which that was noticed."""
        return [rank for rank in self._dying if rank not in self.deaths]

    def bury(self, rank: int, symptom: str | None = None, kind: type[EngineDeadError] = EngineDeadError) -> None:
        """The rank is dying, dead or of no use any more: it gets no more work from now on, and its death is told when
        everything that it still sent has been. Synchronous, idempotent."""
        session = self._session
        if session.cause is None and session.connection.rota.retire(rank):
            session.liveness.suspicion.retired(rank)
            session.send_budget.wake()
            self._dying[rank] = symptom, kind
            session.tasks.start_soon(session.own, self._bury, rank)

    def death(self, rank: int, symptom: str | None = None) -> EngineDeadError:
        """Why ``rank`` is of no use: the error it died of, or, should it still be dying, what is known by now."""
        if rank in self.deaths:
            return self.deaths[rank].for_waiter()
        noted, kind = self._dying.get(rank, (None, EngineDeadError))
        return self.describe(rank, noted or symptom, kind)

    def describe(self, rank: int, symptom: str | None, kind: type[EngineDeadError]) -> EngineDeadError:
        """The death of ``rank``, of this kind, with everything that is known of it."""
        error = self._session.engines[rank].death(symptom, kind)
        if isinstance(error, EngineUnresponsiveError):
            error.silent_s = self._session.liveness.silence_s(rank)
        return error

    def all_end(self, cause: EngineDeadError) -> None:
        """The session has ended, and all ranks with it, of what they died of or of ``cause``. Synchronous."""
        for rank, ended in self.ended.items():
            self.deaths.setdefault(rank, cause)
            ended.set()

    async def _bury(self, rank: int) -> None:
        """Learn how the rank ended and take what it still sent, then tell of its death."""
        session = self._session
        symptom, kind = self._dying[rank]
        engine = session.engines[rank]
        if kind is EngineDeadError:  # a stuck one does not end
            limit_s = _LAST_WORDS_S if symptom is None else _SENTINEL_S if symptom == SENTINEL else _LOST_LINK_S
            with anyio.move_on_after(limit_s):
                await engine.wait_ended()
                await session.liveness.outputs_settled()
        async with self._one_by_one:
            if session.cause is not None:
                return
            await self._read_rest()
            if session.is_left:
                return
            suspicion = session.liveness.suspicion
            if isinstance(engine, SupervisedEngine):
                ended = engine.child.exited.is_set()
            else:  # nobody tells of its end but its connections
                ended = suspicion.surplus_outputs() <= 0
            if ended:
                suspicion.ended(rank)
            else:
                session.tasks.start_soon(session.own, self._see_out, rank, engine)
            if self._lose(rank, self.describe(rank, symptom, kind)):
                session.resume_drain()
            else:
                session.endpoints.outputs.close()  # nobody listens any more: what still comes must not fill our memory
        if symptom is not None and symptom != SENTINEL and isinstance(engine, SupervisedEngine):
            engine.child.terminate()  # of no use any more, and it would never end by itself

    async def _see_out(self, rank: int, engine: SupervisedEngine | AttachedRank) -> None:
        """Say how an engine has ended whose death was told before, and take note that it says nothing any more."""
        session = self._session
        await engine.wait_ended()
        if isinstance(engine, SupervisedEngine) and not session.is_left:
            _logger.warning("%s; its death was told before", engine.death().args[0])
        if session.ended.is_set():
            return  # nobody asks who else may have said so
        await session.liveness.outputs_settled()
        async with self._one_by_one:
            if not session.ended.is_set() and session.engines[rank] is engine:
                await self._read_rest()
                session.liveness.suspicion.ended(rank)
                if not session.ended.is_set():
                    session.resume_drain()

    async def read_to_the_end(self) -> None:
        """Take everything that has come over the output socket.

        Cancellation: loses nothing; whoever ends the session reads on.
        """
        async with self._one_by_one:
            await self._read_rest()
            if self._session.cause is None:
                self._session.resume_drain()

    async def _read_rest(self) -> None:
        session = self._session
        await session.stop_drain()
        with anyio.move_on_after(_LAST_WORDS_S):  # a broken one lives on, and may send without end
            while not session.is_left and (messages := session.endpoints.outputs.drain_nowait()):
                session.receive(messages)
                await anyio.lowlevel.checkpoint()

    def _lose(self, rank: int, death: EngineDeadError) -> bool:
        """Tell of a rank's death; whether the session goes on, with the others or until it is started again."""
        session = self._session
        rota = session.connection.rota
        rota.bury(rank)
        self.deaths[rank] = death
        if not session.restarts.grant(rank, death):
            self.give_up(rank, death := session.restarts.final(rank, death))
        if session.cause is not None:
            return False
        connection = session.connection
        told = RankDeath(rank, death, connection.requests.of_rank(rank), connection.utilities.of_rank(rank))
        if not session.in_order:
            connection.utilities.fail_all(death, rank, only=told.call_ids)
        session.feed.send_nowait(told)
        return True

    def give_up(self, rank: int, death: EngineDeadError) -> None:
        """The rank is lost for good; with the last one, the session ends."""
        session = self._session
        serving = session.connection.rota.serving
        self.deaths[rank] = death
        session.life.lost(rank, death)
        if not session.connection.rota.alive and not session.restarts.pending:
            session.end(death)
        else:
            _logger.error("engine %d is lost, %d of %d go on: %s", rank, len(serving), len(session.ranks), death)
            self.ended[rank].set()
            session.send_budget.wake()
            session.restarts.look()

    def exhume(self, rank: int) -> None:
        """The rank has been started again, and is as good as new."""
        self.deaths.pop(rank, None)
        self._dying.pop(rank, None)
        self._session.faults.forget(rank)
