"""A state machine drives a client's life in any order, sensible or not, and compares it with a naive derivation."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anyengine._protocol import ClientEvent, ClientState, CurrentState, Life, RankChanged, RankState, StateChanged
from anyengine.exceptions import EngineDeadError

RANKS = st.integers(0, 3)  # 3 is never there
ENDING = {ClientState.DEAD, ClientState.CLOSING, ClientState.CLOSED, ClientState.CREATED}
MODES = [RankState.READY, RankState.PAUSED, RankState.ASLEEP]


def naive_state(ranks: dict[int, RankState]) -> ClientState | None:
    """What a client with these ranks is in; ``None``: its death is about to be told."""
    living = [state for state in ranks.values() if state in MODES]
    if any(state is RankState.STARTING for state in ranks.values()):
        return ClientState.STARTING
    if any(state is RankState.READY for state in living):
        return ClientState.READY
    if living:
        return ClientState.PAUSED if RankState.PAUSED in living else ClientState.ASLEEP
    return ClientState.RESTARTING if RankState.RESTARTING in ranks.values() else None


class LifeMachine(RuleBasedStateMachine):
    """``seen`` and ``seen_ranks`` are what a reader of the events knows, who read every one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[ClientEvent] = []
        self.life = Life(self.events.append)
        self.seen = ClientState.CREATED
        self.seen_ranks: dict[int, RankState] = {}
        self.died: set[int] = set()

    @precondition(lambda self: self.seen in (ClientState.CREATED, ClientState.CLOSED))
    @rule(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        self.died.clear()
        self.seen_ranks = dict.fromkeys(range(count), RankState.STARTING)
        self.life.begin(range(count))

    @rule()
    def started(self) -> None:
        self.life.started()

    @rule(rank=RANKS, mode=st.sampled_from(MODES))
    def confirmed(self, rank: int, mode: RankState) -> None:
        self.life.confirmed(rank, mode)

    @rule(rank=RANKS, attempt=st.integers(1, 5))
    def restarting(self, rank: int, attempt: int) -> None:
        self.life.restarting(rank, EngineDeadError("gone"), attempt, 0.5)

    @rule(rank=RANKS)
    def back(self, rank: int) -> None:
        self.life.back(rank)

    @rule(rank=RANKS)
    def lost(self, rank: int) -> None:
        self.life.lost(rank, EngineDeadError("gone"))

    @rule()
    def died_altogether(self) -> None:
        self.life.died(EngineDeadError("gone"))

    @rule()
    def closing(self) -> None:
        self.life.closing()

    @rule(failed=st.booleans())
    def closed(self, failed: bool) -> None:
        self.life.closed(EngineDeadError("it did not start") if failed else None)

    @invariant()
    def a_reader_of_every_event_knows_everything(self) -> None:
        for event in self.events:
            if isinstance(event, RankChanged):
                assert self.seen not in ENDING, "nobody cares any more"
                assert event.former is self.seen_ranks[event.rank]
                assert event.rank not in self.died, "a dead rank stays dead"
                assert event.former is not event.rank_state or event.attempt is not None, "nothing has changed"
                self.seen_ranks[event.rank] = event.rank_state
                if event.rank_state is RankState.DEAD:
                    self.died.add(event.rank)
                assert dict(event.ranks) == self.seen_ranks
            else:
                assert isinstance(event, StateChanged) and event.former is self.seen is not event.state
                self.seen = event.state
        self.events.clear()
        assert self.life.state is self.seen
        assert dict(self.life.ranks) == self.seen_ranks
        assert self.life.current() == CurrentState(
            state=self.seen, ranks=self.seen_ranks, cause=self.life.cause, missed=0
        )

    @invariant()
    def the_state_is_that_of_the_ranks(self) -> None:
        if self.seen not in ENDING and (naive := naive_state(self.seen_ranks)) is not None:
            assert self.seen in (naive, ClientState.STARTING)
            assert self.life.is_running == (self.seen is not ClientState.STARTING)

    @invariant()
    def a_cause_is_kept(self) -> None:
        if self.seen is ClientState.DEAD:
            assert isinstance(self.life.cause, EngineDeadError)


TestLife = LifeMachine.TestCase
