"""A state machine over the utility registry: calls, replies in any order, late, twice, never; and ids used again."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from anyengine._protocol import PendingCall, UtilityRegistry
from anyengine._wire import UtilityOutput
from anyengine.exceptions import EngineDeadError, UtilityError
from counted_machine import CountedMachine

__all__ = ["UtilitiesMachine"]

RANKS = 3
PICK = st.integers(0, 31)


class Call:
    """One call in the model."""

    def __init__(self) -> None:
        self.told = 0
        self.pending: PendingCall | None = None

    def done(self) -> None:
        assert self.pending is not None
        assert (self.pending.value is None) is not (self.pending.error is None)  # set before anybody is told
        self.told += 1


class UtilitiesMachine(CountedMachine):
    """``waiting`` is the model's registry; ``over`` are the ids of calls that nobody waits for any more."""

    @initialize(prefix=st.integers(0, (1 << 31) - 1), counter=st.sampled_from([0, 0xFFFF_FFFC]))
    def begin(self, prefix: int, counter: int) -> None:
        self.prefix = prefix
        self.registry = UtilityRegistry(prefix, _counter=counter)
        self.waiting: dict[int, Call] = {}
        self.over: list[tuple[int, Call]] = []
        self.late = 0

    @rule(rank=st.integers(0, RANKS - 1))
    def call(self, rank: int) -> None:
        call = Call()
        call.pending = self.registry.open("is_sleeping", rank, call.done)
        call_id = call.pending.call_id
        assert call_id not in self.waiting, "the id of a call that still waits"
        assert call_id >> 32 == self.prefix
        assert 0 <= call_id < 1 << 63
        self.waiting[call_id] = call

    @precondition(lambda self: self.waiting)
    @rule(back=st.integers(0, 4))
    def four_thousand_million_calls_later(self, back: int) -> None:
        """The counter comes around to where calls still wait."""
        call_id = list(self.waiting)[back % len(self.waiting)]
        self.registry._counter = (call_id - 1) & 0xFFFF_FFFF

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK, failure=st.sampled_from([None, None, "", "boom"]))
    def reply(self, pick: int, failure: str | None) -> None:
        call_id = list(self.waiting)[pick % len(self.waiting)]
        call = self.waiting.pop(call_id)
        self.registry.resolve(0, UtilityOutput(call_id, failure, None if failure is not None else call_id))
        assert call.pending is not None
        if failure is None:
            assert (call.pending.value, call.pending.error) == (call_id, None)
        else:
            assert isinstance(call.pending.error, UtilityError)
            assert call.pending.error.call_id == call_id
        self._over(call_id, call, told=1)

    @precondition(lambda self: self.over)
    @rule(pick=PICK)
    def late_reply(self, pick: int) -> None:
        """A second reply, or one to a call that was given up or has died; never to somebody else's call."""
        call_id, _ = self.over[pick % len(self.over)]
        if call_id not in self.waiting:
            self.registry.resolve(0, UtilityOutput(call_id, None, "late"))
            self.late += 1

    @rule(call_id=st.integers(0, 1 << 62))
    def reply_to_nobody(self, call_id: int) -> None:
        if call_id >> 32 != self.prefix:
            self.registry.resolve(0, UtilityOutput(call_id, None, "nobody's"))
            self.late += 1

    @rule(pick=PICK)
    def give_up(self, pick: int) -> None:
        """Cancelled; also when it is too late for that."""
        known = [*self.waiting, *(call_id for call_id, _ in self.over), -1]
        call_id = known[pick % len(known)]
        self.registry.forget(call_id)
        if (call := self.waiting.pop(call_id, None)) is not None:
            self._over(call_id, call, told=0)

    @rule(rank=st.none() | st.integers(0, RANKS - 1))
    def die(self, rank: int | None) -> None:
        cause = EngineDeadError("killed", rank=rank)
        doomed = {
            call_id: call
            for call_id, call in self.waiting.items()
            if call.pending is not None and rank in (None, call.pending.rank)
        }
        self.registry.fail_all(cause, rank)
        errors = set()
        for call_id, call in doomed.items():
            assert call.pending is not None and call.pending.error is not None
            assert call.pending.error.__cause__ is cause
            errors.add(id(call.pending.error))
            del self.waiting[call_id]
            self._over(call_id, call, told=1)
        assert len(errors) == len(doomed)  # an instance for each

    def _over(self, call_id: int, call: Call, *, told: int) -> None:
        assert call.told == told
        self.over.append((call_id, call))
        del self.over[:-8]

    @invariant()
    def the_registry_holds_what_the_model_holds(self) -> None:
        assert self.registry.pending.keys() == self.waiting.keys()
        assert self.registry.late_replies == self.late

    @invariant()
    def nobody_is_told_twice_or_early(self) -> None:
        assert not any(call.told for call in self.waiting.values())
        assert all(call.told <= 1 for _, call in self.over)
