"""The life of a client as a state machine: what has happened goes in, events come out.

Owns which state follows from what, for the client and for each rank. The state of the client is derived from those of
its ranks, between its start and its end. Holds no task and no clock: whoever notices something says so here, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Final

from anyengine.exceptions import EngineError, LocalProtocolError

from .life_events import ClientEvent, ClientState, CurrentState, RankChanged, RankState, StateChanged

__all__ = ["Life"]

_CONFIRMED: Final = (RankState.READY, RankState.PAUSED, RankState.ASLEEP)
_OVER: Final = (ClientState.CREATED, ClientState.CLOSED)
_ENDING: Final = (ClientState.DEAD, ClientState.CLOSING, *_OVER)


class Life:
    """See the module. Lifetime: the client's, block after block.

    Invariants: what changes nothing is no event; a rank that is dead stays so until the next block; once the client is
    dead or closing, only its own way to the end is told.
    """

    def __init__(self, publish: Callable[[ClientEvent], None]) -> None:
        self._publish = publish
        self._started = False
        self._is_held = False
        self._confirmed: dict[int, RankState] = {}  # what a rank said before all were ready
        self.state: ClientState = ClientState.CREATED
        self.ranks: MappingProxyType[int, RankState] = MappingProxyType({})
        self.cause: EngineError | None = None
        """What the client died of, or why its start failed."""

    @property
    def is_running(self) -> bool:
        """Whether the engines were ready, and nothing has ended the client since."""
        return self._started and self.state not in _ENDING

    def current(self, missed: int = 0) -> CurrentState:
        """How things stand, as an event."""
        return CurrentState(state=self.state, ranks=self.ranks, cause=self.cause, missed=missed)

    # ----------------------------------------------------------------- the client

    def hold(self) -> None:
        """Let the next block be starting until :meth:`opened`, although its ranks are ready: it takes no requests."""
        self._is_held = True

    def opened(self) -> None:
        """Requests are taken: what was held back is told."""
        self._is_held = False
        if self._started and self.state is ClientState.STARTING and (derived := self._derived()) is not self.state:
            self._enter(derived)

    def begin(self, ranks: Iterable[int]) -> None:
        """A block is entered, with these ranks.

        Raises:
            LocalProtocolError: the client is in one already.
        """
        if self.state not in _OVER:
            raise LocalProtocolError(f"a client that is {self.state.value} cannot begin")
        self._started, self._confirmed, self.cause = False, {}, None
        self.ranks = MappingProxyType(dict.fromkeys(ranks, RankState.STARTING))
        self._enter(ClientState.STARTING)

    def started(self) -> None:
        """All ranks are ready."""
        if self._started or self.state is not ClientState.STARTING:
            return
        self._started = True
        for rank, state in self.ranks.items():
            if state is RankState.STARTING:
                self._move(rank, self._confirmed.get(rank, RankState.READY))
        if (derived := self._derived()) is not self.state:
            self._enter(derived)  # no rank has moved: all that were to start are being started again by now

    def died(self, cause: EngineError) -> None:
        """Nothing serves any more, or a task of the client's own has failed."""
        if self.state not in _ENDING:
            self.cause = cause
            self._enter(ClientState.DEAD, cause)

    def closing(self) -> None:
        """The block is being left."""
        if self.state not in (ClientState.CLOSING, *_OVER):
            self._enter(ClientState.CLOSING)

    def closed(self, cause: EngineError | None = None) -> None:
        """The block is left; ``cause``: why it could not be entered."""
        if self.state not in _OVER:
            self.cause = self.cause or cause
            self._enter(ClientState.CLOSED, cause)

    # ------------------------------------------------------------------ its ranks

    def confirmed(self, rank: int, state: RankState) -> None:
        """The engine has said that it is ready, paused or asleep."""
        assert state in _CONFIRMED
        if self.ranks.get(rank) is RankState.STARTING and not self._started:
            self._confirmed[rank] = state
        elif self.ranks.get(rank) in _CONFIRMED:
            self._move(rank, state)

    def restarting(self, rank: int, cause: EngineError, attempt: int, delay_s: float) -> None:
        """The rank is lost, for now: it will be started again."""
        if self.ranks.get(rank) is not RankState.DEAD:
            self._move(rank, RankState.RESTARTING, cause=cause, attempt=attempt, delay_s=delay_s)

    def back(self, rank: int) -> None:
        """The rank that was started again is ready."""
        if self.ranks.get(rank) is RankState.RESTARTING:
            self._move(rank, RankState.READY)

    def lost(self, rank: int, cause: EngineError) -> None:
        """The rank is lost for good."""
        if self.ranks.get(rank) is not RankState.DEAD:
            self._move(rank, RankState.DEAD, cause=cause)

    # ------------------------------------------------------------------ internals

    def _move(
        self,
        rank: int,
        state: RankState,
        *,
        cause: EngineError | None = None,
        attempt: int | None = None,
        delay_s: float | None = None,
    ) -> None:
        former = self.ranks.get(rank)
        if former is None or self.state in _ENDING or (former is state and state is not RankState.RESTARTING):
            return
        self.ranks = MappingProxyType({**self.ranks, rank: state})
        before, self.state = self.state, self._derived()
        event = RankChanged(
            state=self.state,
            ranks=self.ranks,
            rank=rank,
            former=former,
            rank_state=state,
            cause=cause,
            attempt=attempt,
            delay_s=delay_s,
        )
        self._publish(event)
        if self.state is not before:
            self._publish(StateChanged(state=self.state, ranks=self.ranks, former=before, cause=cause))

    def _derived(self) -> ClientState:
        """What the client is in, by its ranks."""
        states = set(self.ranks.values())
        if not self._started or self._is_held or RankState.STARTING in states:
            return ClientState.STARTING
        living = states.intersection(_CONFIRMED)
        if not living:  # with nothing to hope for, its death is about to be told
            return ClientState.RESTARTING if RankState.RESTARTING in states else self.state
        if RankState.READY in living:
            return ClientState.READY
        return ClientState.PAUSED if RankState.PAUSED in living else ClientState.ASLEEP

    def _enter(self, state: ClientState, cause: EngineError | None = None) -> None:
        former, self.state = self.state, state
        self._publish(StateChanged(state=state, ranks=self.ranks, former=former, cause=cause))
