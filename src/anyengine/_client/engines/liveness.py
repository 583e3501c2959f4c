"""Which engines are still there, whoever started them.

Owns the signs of life: the connections to both sockets, the dead sentinel, what was heard last, and a call through an
engine's main loop. A deaf engine (its input thread has ended) and a mute one (its output thread has) are so told from a
busy one, and a stuck one from both. What follows from a death is the session's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import anyio

from anyengine._protocol.suspicion import Suspicion
from anyengine._transport.abc import PeerUnreachable
from anyengine._transport.monitor import PeerMonitor
from anyengine._wire import SchedulerStats, engine_identity
from anyengine.exceptions import EngineDeadError, EngineUnresponsiveError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anyengine._client.session.session import Session

__all__ = ["PROBE", "Liveness"]

PROBE = "is_sleeping"
"""A call that every release has, that changes nothing, and that only the main loop can answer. A refusal is an answer
too."""


class Liveness:
    """See the module. Lifetime: one session, whose tasks run the methods that wait."""

    def __init__(self, session: Session, ranks: Iterable[int]) -> None:
        self._session = session
        self.suspicion: Suspicion = Suspicion(ranks)
        self.last_heard_s: dict[int, float] = dict.fromkeys(ranks, anyio.current_time())
        self.last_step_s: dict[int, float] = {}
        """When each rank sent its last batch of outputs, if it ever did."""
        self.last_statistics: dict[int, SchedulerStats] = {}
        self.last_statistics_s: dict[int, float] = {}
        self._connections_changed = anyio.Event()
        self._looking_twice = False
        self._unanswered: dict[int, int] = dict.fromkeys(ranks, 0)  # calls of ours, by rank
        self._answers: dict[int, int] = dict.fromkeys(ranks, 0)
        self._watches: dict[int, anyio.CancelScope] = {}  # the present one of each rank

    async def watch_connections(self, link: Literal["input", "output"], monitor: PeerMonitor) -> None:
        """Follow the connections of one socket, from before the first engine is started."""
        async for event in monitor:
            if event.kind == "connected":
                self.suspicion.connected(link, event.connection)
            else:
                self.suspicion.disconnected(link, event.connection)
                self.investigate()
                self._look_twice()
            self._connections_changed.set()
            self._connections_changed = anyio.Event()

    def watch(self, rank: int) -> None:
        """Ask the rank's main loop for signs of life from now on, if there is a limit. Ends the watch over the engine
        that had the rank before."""
        if (former := self._watches.pop(rank, None)) is not None:
            former.cancel()
        if (limit_s := self._session.settings.liveness_timeout_s) is not None:
            watch = self._watches[rank] = anyio.CancelScope()
            self._session.tasks.start_soon(self._session.own, self._watch, rank, limit_s, watch)

    async def _watch(self, rank: int, limit_s: float, watch: anyio.CancelScope) -> None:
        with watch:
            await self._watch_main_loop(rank, limit_s)

    async def _watch_main_loop(self, rank: int, limit_s: float) -> None:
        """Ask a rank again and again, whether it talks or not: what it says may be old, or somebody else's. It is lost
        when an answer is due for the limit; or for half of it, and nothing was heard for the whole."""
        tick_s, asked_s = limit_s / 8, anyio.current_time()
        while True:
            await anyio.sleep(max(0.0, asked_s + limit_s / 2 - anyio.current_time()))
            if not self._serves(rank):
                return
            asked_s, answers, doubted = anyio.current_time(), self._answers[rank], False
            self._ask(rank)
            while self._answers[rank] == answers:
                await anyio.sleep(tick_s)
                if not self._serves(rank):
                    return
                now_s = anyio.current_time()
                waited_s, silence_s = now_s - asked_s, now_s - self.last_heard_s[rank]
                doubtful = waited_s > 7 * tick_s or (waited_s > 3 * tick_s and silence_s > 7 * tick_s)
                # Twice: should our own loop have been held up, what has arrived meanwhile is read before the second.
                if doubtful and doubted and self._answers[rank] == answers:
                    symptom = (
                        f"its main loop has not answered for {limit_s:g} s; its last sign of life was "
                        f"{silence_s:.1f} s ago"
                    )
                    self._session.burials.bury(rank, symptom, EngineUnresponsiveError)
                    return
                doubted = doubtful

    def stepped(self, rank: int, statistics: SchedulerStats | None, now_s: float) -> None:
        """A batch of outputs has come from ``rank``, which is one of ours: its scheduler works."""
        self.last_step_s[rank] = now_s
        if statistics is not None:
            self.last_statistics[rank] = statistics
            self.last_statistics_s[rank] = now_s

    def silence_s(self, rank: int) -> float:
        """How long ago the last sign of life was."""
        return anyio.current_time() - self.last_heard_s[rank]

    def _serves(self, rank: int) -> bool:
        return self._session.cause is None and rank in self._session.connection.rota.serving

    async def outputs_settled(self) -> None:
        """Wait until nobody but the ranks that serve is connected to the output socket: what the others sent is here.

        Cancellation: safe.
        """
        while self.suspicion.surplus_outputs() > 0:
            await self._connections_changed.wait()

    async def links_settled(self) -> None:
        """The same of both sockets: those who have ended are gone from here.

        Cancellation: safe.
        """
        while self.suspicion.surplus() > 0:
            await self._connections_changed.wait()

    def returned(self, rank: int) -> None:
        """The rank has been started again, and serves."""
        self.last_heard_s[rank] = anyio.current_time()
        self.last_step_s.pop(rank, None)
        self.last_statistics.pop(rank, None)
        self.last_statistics_s.pop(rank, None)
        self.suspicion.returned(rank)
        self.watch(rank)
        self.investigate()

    def sentinel(self) -> None:
        """A dead sentinel has arrived; it does not say whose. Whoever repeats it causes no call for each: who is being
        asked is asked again when the answer comes."""
        self.suspicion.sentinel()
        self.investigate(again=False)

    def investigate(self, *, again: bool = True) -> None:
        """Find out who is gone, once the engines are ready; before that, their handshake fails. ``again``: also ask
        those who have not answered yet, since a call to one whose connection has gone is refused."""
        if not self._session.is_ready:
            return
        self._convict()
        for rank in self.suspicion.suspects:
            if again or not self._unanswered[rank]:
                self._ask(rank)

    def _look_twice(self) -> None:
        """Ask everybody, a little later, if nobody seems to be missing: anybody may connect to a port, and is counted,
        so a stranger can stand in for an engine that has gone. What is sent to that one is refused."""
        if self._session.is_ready and not self.suspicion.suspects and not self._looking_twice:
            self._looking_twice = True
            self._session.tasks.start_soon(self._session.own, self._ask_all)

    async def _ask_all(self) -> None:
        # libzmq tells of the end of a connection before it forgets the peer; of many that end, this asks once.
        await anyio.sleep(_RETRY_S)
        self._looking_twice = False
        if self._session.is_ready:  # a call that is made after the end is answered by nobody
            for rank in self._session.connection.rota.serving:
                self._ask(rank)

    def _ask(self, rank: int) -> None:
        session = self._session
        count = self.suspicion.count

        def answered() -> None:
            self._unanswered[rank] -= 1
            if isinstance(call.error, EngineDeadError):
                return
            self._answers[rank] += 1
            self.suspicion.cleared(rank, count)
            self._convict()
            if session.is_ready and rank in self.suspicion.suspects and not self._unanswered[rank]:
                self._ask(rank)  # there is newer evidence

        call, frames = session.connection.utility(PROBE, (), rank, answered)
        self._unanswered[rank] += 1
        try:
            session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable:
            self._unanswered[rank] -= 1
            session.connection.utilities.forget(call.call_id)
            session.burials.bury(rank, "its input connection is gone")

    def _convict(self) -> None:
        while (found := self.suspicion.guilty()) is not None:
            self._session.burials.bury(*found)

    async def wait_answering(self, rank: int) -> None:
        """Wait until ``rank`` answers a call: one that connects again does so at a time of its own.

        Cancellation: the call is forgotten.
        """
        session = self._session
        answered = anyio.Event()
        while not answered.is_set():
            call, frames = session.connection.utility(PROBE, (), rank, answered.set)
            try:
                session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
                await answered.wait()
            except PeerUnreachable:
                await anyio.sleep(_RETRY_S)
            finally:
                session.connection.utilities.forget(call.call_id)


_RETRY_S = 0.02
