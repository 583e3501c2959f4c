"""State machines over the ranks: which of them take requests, and which of them it must be that something speaks of.

The model of the second one is the world itself: engines with their connections, some of which fail.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from anyengine._protocol.ranks import RankRota
from anyengine._protocol.suspicion import Evidence, Suspicion
from counted_machine import CountedMachine

__all__ = ["RotaMachine", "SuspicionMachine"]

PICK = st.integers(0, 7)
LINK = st.sampled_from(["input", "output"])


class RotaMachine(CountedMachine):
    """Serving, dying, dead: in that order only."""

    @initialize(num_ranks=st.integers(1, 5))
    def begin(self, num_ranks: int) -> None:
        self.rota = RankRota(range(num_ranks))
        self.stage = dict.fromkeys(range(num_ranks), "serving")

    @rule(rank=PICK)
    def retire(self, rank: int) -> None:
        was_serving = self.stage.get(rank) == "serving"
        assert self.rota.retire(rank) is was_serving
        if was_serving:
            self.stage[rank] = "dying"

    @rule(rank=PICK)
    def bury(self, rank: int) -> None:
        self.rota.bury(rank)
        if rank in self.stage:
            self.stage[rank] = "dead"

    @rule(rank=PICK)
    def revive(self, rank: int) -> None:
        if self.stage.get(rank) == "dead":
            self.rota.revive(rank)
            self.stage[rank] = "serving"

    def _of(self, stage: str) -> list[int]:
        return [rank for rank, now in self.stage.items() if now == stage]

    @invariant()
    def the_rota_is_where_the_model_is(self) -> None:
        serving, dying = self._of("serving"), self._of("dying")
        assert list(self.rota.serving) == serving
        assert sorted(self.rota.alive) == (serving or dying)
        assert [rank in self.rota for rank in self.stage] == [rank in serving + dying for rank in self.stage]


class _Engine:
    def __init__(self) -> None:
        self.links: dict[Evidence, int | None] = {"input": None, "output": None}
        self.ending = False  # it has said that it is dead, and exits in a moment
        self.broken = False  # it has lost something, or has said that it is dead: it answers nothing any more
        self.asked: list[int] = []  # the counts at which calls were made that it has not answered


class SuspicionMachine(CountedMachine):
    """Never is a sound engine given up; and when all that are sound have answered, whoever lost a connection is."""

    @initialize(num_ranks=st.integers(1, 4))
    def begin(self, num_ranks: int) -> None:
        self.suspicion = Suspicion(range(num_ranks))
        self.engines = {rank: _Engine() for rank in range(num_ranks)}
        self.retired: dict[int, _Engine] = {}
        self.strangers: list[tuple[Evidence, int]] = []
        self.numbers = iter(range(1 << 30))
        for engine in self.engines.values():
            for link in engine.links:
                self._connect(engine, link)

    def _connect(self, engine: _Engine, link: Evidence) -> None:
        engine.links[link] = next(self.numbers)
        self.suspicion.connected(link, engine.links[link] or 0)

    @precondition(lambda self: self.engines)
    @rule(pick=PICK, link=LINK)
    def lose_a_connection(self, pick: int, link: Evidence) -> None:
        engine = self._any(pick)
        engine.broken = True
        if (connection := engine.links[link]) is not None:
            engine.links[link] = None
            self.suspicion.disconnected(link, connection)
            self._convict()

    @precondition(lambda self: self.engines)
    @rule(pick=PICK)
    def connect_again(self, pick: int) -> None:
        """As ZeroMQ does after a moment: it was no death."""
        engine = self._any(pick)
        if engine.broken and None in engine.links.values() and not engine.ending:
            for link, connection in engine.links.items():
                if connection is None:
                    self._connect(engine, link)
            engine.broken = False
            self._convict()

    @precondition(lambda self: self.engines or self.retired)
    @rule(pick=PICK, repeated=st.integers(1, 3))
    def say_so_itself(self, pick: int, repeated: int) -> None:
        """A dead sentinel, or several; it does not name its engine, and one may still come when it is given up."""
        everyone = [*self.engines.values(), *self.retired.values()]
        engine = everyone[pick % len(everyone)]
        engine.broken = engine.ending = True
        for _ in range(repeated):
            self.suspicion.sentinel()
            self._convict()

    @rule(link=LINK)
    def a_stranger_connects(self, link: Evidence) -> None:
        self.strangers.append((link, next(self.numbers)))
        self.suspicion.connected(*self.strangers[-1])

    @precondition(lambda self: self.strangers)
    @rule(pick=PICK)
    def a_stranger_leaves(self, pick: int) -> None:
        self.suspicion.disconnected(*self.strangers.pop(pick % len(self.strangers)))
        self._convict()

    @rule()
    def ask_the_suspects(self) -> None:
        """A call cannot be sent to whoever has lost its input connection, which is an answer too."""
        for rank in self.suspicion.suspects:
            if rank not in self.engines:
                continue
            if self.engines[rank].links["input"] is None:
                self._retire(rank)
            else:
                self.engines[rank].asked.append(self.suspicion.count)
        self._convict()

    @precondition(lambda self: any(engine.asked and not engine.broken for engine in self.engines.values()))
    @rule(pick=PICK)
    def answer(self, pick: int) -> None:
        sound = [rank for rank, engine in self.engines.items() if engine.asked and not engine.broken]
        rank = sound[pick % len(sound)]
        self.suspicion.cleared(rank, self.engines[rank].asked.pop(0))
        self._convict()

    @precondition(lambda self: self.retired)
    @rule(pick=PICK)
    def end(self, pick: int) -> None:
        """The process of one that was given up has ended: its connections close, and nothing of it is on its way."""
        rank = list(self.retired)[pick % len(self.retired)]
        engine = self.retired.pop(rank)
        for link, connection in engine.links.items():
            if connection is not None:
                self.suspicion.disconnected(link, connection)
                self._convict()
        self.suspicion.ended(rank)

    # ------------------------------------------------------------------ invariants

    def _any(self, pick: int) -> _Engine:
        return list(self.engines.values())[pick % len(self.engines)]

    def _convict(self) -> None:
        while (found := self.suspicion.guilty()) is not None:
            rank, _ = found
            assert self.engines[rank].broken, f"rank {rank} was sound"
            self._retire(rank)

    def _retire(self, rank: int) -> None:
        self.retired[rank] = self.engines.pop(rank)
        self.suspicion.retired(rank)

    @invariant()
    def only_who_serves_is_suspected(self) -> None:
        assert set(self.suspicion.suspects) <= self.engines.keys()

    def teardown(self) -> None:
        """Everyone that is sound answers, and whoever has said that it is dead exits: then those that have lost a
        connection are known, strangers aside."""
        if not hasattr(self, "engines"):
            return
        while self.strangers:
            self.a_stranger_leaves(0)
        for engine in [*self.engines.values()]:
            for link, connection in engine.links.items():
                if engine.ending and connection is not None:
                    engine.links[link] = None
                    self.suspicion.disconnected(link, connection)
        self._convict()
        for _ in range(2 * len(self.engines) + 2):
            while self.retired:
                self.end(0)
            self.ask_the_suspects()
            for rank, engine in [*self.engines.items()]:
                if engine.asked and not engine.broken:
                    self.suspicion.cleared(rank, engine.asked.pop())
            self._convict()
        assert not any(None in engine.links.values() for engine in self.engines.values())
