"""A state machine over the request registry and the merge buffers behind it.

The model is a dictionary of what each request was sent, and the order in which ids were aborted.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from anyengine._client.requests.state import RequestState
from anyengine._protocol import RequestRegistry, aborts
from anyengine._wire import EngineCoreOutput
from anyengine.exceptions import EngineDeadError, LocalProtocolError, RequestFailed
from counted_machine import CountedMachine

__all__ = ["RequestsMachine"]

REMEMBERED = 4  # instead of thousands, so that ids are forgotten within a few steps
RANKS = 3
PICK = st.integers(0, 31)
TOKENS = st.integers(0, 3)
FINISH = st.sampled_from([None, None, None, 0, 1, 2, 3])


class Bell:
    """The parker of a consumer: how often it was woken."""

    def __init__(self) -> None:
        self.rings = 0

    async def park(self) -> None:
        raise AssertionError("nobody parks in a state machine")

    def wake(self) -> None:
        self.rings += 1


class Request:
    """One request in the model."""

    def __init__(self, wire_id: str, rank: int) -> None:
        self.bell = Bell()
        self.state = RequestState(wire_id, wire_id, self.bell)
        self.rank = rank
        self.sent: list[int] = []
        self.taken: list[int] = []
        self.end: str | None = None


class RequestsMachine(CountedMachine):
    """``live`` is the model's registry; ``past`` are the requests that have left it."""

    @initialize()
    def begin(self) -> None:
        self._remembered, aborts._REMEMBERED = aborts._REMEMBERED, REMEMBERED
        self.registry = RequestRegistry()
        self.live: dict[str, Request] = {}
        self.past: list[Request] = []
        self.aborted: list[str] = []
        self.late = 0
        self.numbers = count()
        self.tokens = count()

    def teardown(self) -> None:
        if hasattr(self, "registry"):
            aborts._REMEMBERED = self._remembered

    # ------------------------------------------------------------------ commands

    @rule(rank=st.integers(0, RANKS - 1))
    def add(self, rank: int) -> None:
        self._open(f"r{next(self.numbers)}", rank)

    @precondition(lambda self: self.past)
    @rule(pick=PICK, rank=st.integers(0, RANKS - 1))
    def add_an_id_again(self, pick: int, rank: int) -> None:
        """An id that has finished may be used again; one that was aborted lately may not."""
        wire_id = self.past[-1 - pick % len(self.past)].state.wire_id
        if wire_id in self.live or wire_id in self.aborted[-REMEMBERED:]:
            with pytest.raises(LocalProtocolError):
                self.registry.open(wire_id, rank, RequestState(wire_id, wire_id, Bell()))
        elif wire_id not in self.aborted[-2 * REMEMBERED :]:
            self._open(wire_id, rank)

    def _open(self, wire_id: str, rank: int) -> None:
        request = self.live[wire_id] = Request(wire_id, rank)
        entry = self.registry.open(wire_id, rank, request.state)
        assert (entry.rank, entry.consumer) == (rank, request.state)

    @rule(picks=st.lists(PICK, max_size=3), aborted=st.booleans())
    def leave(self, picks: list[int], aborted: bool) -> None:
        """Closed by its client: with an abort, or since it could not be sent."""
        wire_ids = [self._any_id(pick) for pick in picks]
        groups = self.registry.by_rank(wire_ids)
        assert sorted(wire_id for group in groups.values() for wire_id in group) == sorted(self.live.keys() & wire_ids)
        for rank, group in groups.items():
            for wire_id in group:
                assert self.live[wire_id].rank == rank
                entry = self.registry.close(wire_id, aborted=aborted)
                assert entry is not None
                if aborted:
                    self.aborted.append(wire_id)
                    entry.consumer.aborted()
                self._ends(wire_id, "abort" if aborted else "never sent")
                assert self.registry.close(wire_id) is None

    @rule(rank=st.none() | st.integers(0, RANKS - 1))
    def die(self, rank: int | None) -> None:
        doomed = [wire_id for wire_id, request in self.live.items() if rank in (None, request.rank)]
        entries = self.registry.fail_all(EngineDeadError("killed", rank=rank), rank)
        assert [entry.request_id for entry in entries] == doomed
        for wire_id in doomed:
            self._ends(wire_id, "died")

    # ------------------------------------------------------------------- outputs

    @rule(outputs=st.lists(st.tuples(PICK, TOKENS, FINISH), min_size=1, max_size=4))
    def receive(self, outputs: list[tuple[int, int, int | None]]) -> None:
        """One batch: several requests, several outputs of one, and words about requests that are over."""
        batch, ends = [], []
        for pick, count_, finish in outputs:
            wire_id = self._any_id(pick)
            tokens = [next(self.tokens) for _ in range(count_)]
            batch.append(EngineCoreOutput(wire_id, list(tokens), finish_reason=finish))
            if wire_id in self.live and wire_id not in ends:
                self.live[wire_id].sent += tokens
                if finish is not None:
                    ends.append(wire_id)
                    self.live[wire_id].end = {0: "stop", 1: "length", 2: "engine", 3: "engine"}[finish]
            else:
                self.late += 1
        assert self.registry.dispatch(batch) == []
        for wire_id in ends:
            self._ends(wire_id, self.live[wire_id].end or "")

    @precondition(lambda self: self.live or self.past)
    @rule(pick=PICK)
    def take(self, pick: int) -> None:
        """A consumer takes what has been merged for it, as a stream does; also after the end."""
        requests = [*self.live.values(), *self.past[-3:]]
        request = requests[pick % len(requests)]
        ids, request.state.token_ids = request.state.token_ids or [], None
        request.taken += ids

    # ------------------------------------------------------------------ invariants

    def _any_id(self, pick: int) -> str:
        known = [*self.live, *(request.state.wire_id for request in self.past[-4:]), "nobody's"]
        return known[pick % len(known)]

    def _ends(self, wire_id: str, how: str) -> None:
        request = self.live.pop(wire_id)
        request.end = how
        state = request.state
        if how == "never sent":
            assert not state.ended
        else:
            assert request.bell.rings >= 1  # whoever sleeps is told
            assert (state.finish_reason is None) is (how in ("died", "engine"))
            assert isinstance(state.error, {"died": EngineDeadError, "engine": RequestFailed}.get(how, type(None)))
        self.past.append(request)
        del self.past[:-8]

    @invariant()
    def the_registry_holds_what_the_model_holds(self) -> None:
        assert self.registry.live.keys() == self.live.keys()
        assert self.registry.late_outputs == self.late
        assert len(self.registry.aborts) <= 2 * REMEMBERED

    @invariant()
    def nothing_is_lost_doubled_or_reordered(self) -> None:
        for request in (*self.live.values(), *self.past):
            assert request.taken + (request.state.token_ids or []) == request.sent
        assert not any(request.state.ended for request in self.live.values())
