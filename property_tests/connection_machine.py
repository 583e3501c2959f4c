"""A state machine drives one connection and the engines behind it, and compares it with a model of a few dictionaries.

The engines are played here, behind the dialect's engine role: they decode what the connection sends and answer in any
order, merged or apart, too late, twice, or about requests that they never had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from anyengine._protocol import Connection, EEPNotification, Frames, MalformedMessage, PendingCall, UtilityReply
from anyengine._wire import (
    DIALECTS,
    AbortRequests,
    Dialect,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    OutputBatch,
    UtilityCall,
    UtilityOutput,
    WireSamplingParams,
)
from anyengine.exceptions import EngineDeadError, EngineError, LocalProtocolError, UtilityError
from counted_machine import CountedMachine

__all__ = ["ConnectionMachine"]

GARBAGE = [b"\xc1", b"", b"\x90\x90", b"ENGINE_CORE_ALIVE"]
TOKENS = st.lists(st.integers(0, 2), max_size=3)  # some consumers cannot take a 2


@dataclass(eq=False)
class Expected:
    """One request as the model sees it. It is also the connection's consumer of it."""

    request_id: str
    rank: int
    fragile: bool
    sent: list[int] = field(default_factory=list)  # what its engine sent it before its end
    seen: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)  # every terminal: one at most
    aborts: int = 0  # ABORT frames that named it while it lived in its engine

    def push(self, output: EngineCoreOutput) -> None:
        assert not self.ends, f"{self.request_id} got an output after its end"
        if self.fragile and 2 in output.new_token_ids:
            raise ArithmeticError("it cannot take a 2")
        self.seen += output.new_token_ids
        if output.finish_reason is not None:
            self.ends.append("finished")

    def fail(self, error: BaseException) -> None:
        assert not self.ends, f"{self.request_id} was failed after its end"
        self.ends.append("failed")


@dataclass(eq=False)
class ExpectedCall:
    """One utility call as the model sees it."""

    call: PendingCall
    answered: int = 0
    told: int = 0


@dataclass
class Engine:
    """What one rank holds, by what it was told; and what it has ended, which it may speak of again."""

    running: dict[str, Expected] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    calls: list[ExpectedCall] = field(default_factory=list)


class ConnectionMachine(CountedMachine):
    """``live`` and ``pending`` are the model's registries; ``wire`` holds engine messages that have not arrived yet."""

    calls: Bundle[ExpectedCall] = Bundle("calls")

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Expected] = {}
        self.everyone: list[Expected] = []
        self.pending: dict[int, ExpectedCall] = {}
        self.late_outputs = self.late_replies = self.malformed = 0
        self.call_ids: set[int] = set()
        self.names = count()

    @initialize(num_ranks=st.integers(1, 3), dialect=st.sampled_from(DIALECTS), prefix=st.integers(0, (1 << 31) - 1))
    def connect(self, num_ranks: int, dialect: Dialect, prefix: int) -> None:
        self.dialect = dialect
        self.connection = Connection(dict.fromkeys(range(num_ranks), dialect), call_id_prefix=prefix)
        self.engines = [Engine() for _ in range(num_ranks)]
        self.wire: list[tuple[int, Frames]] = []

    # -------------------------------------------------------------------------------------------------------- commands

    @rule(data=st.data(), fragile=st.lists(st.booleans(), min_size=1, max_size=4))
    def add(self, data: st.DataObject, fragile: list[bool]) -> None:
        for is_fragile in fragile:
            expected = Expected(f"r{next(self.names)}", self._any_rank(data), is_fragile)
            frames = self.connection.add(_request(expected.request_id), expected.rank, expected)
            self.live[expected.request_id] = expected
            self.everyone.append(expected)
            self._told(expected.rank, frames, expected)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def add_twice(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(list(self.live)))
        with pytest.raises(LocalProtocolError):
            self.connection.add(_request(request_id), self._any_rank(data), Expected(request_id, 0, fragile=False))

    @precondition(lambda self: any(expected.ends == ["aborted"] for expected in self.everyone))
    @rule(data=st.data())
    def add_an_aborted_id(self, data: st.DataObject) -> None:
        aborted = [expected.request_id for expected in self.everyone if expected.ends == ["aborted"]]
        request_id = data.draw(st.sampled_from(aborted))
        with pytest.raises(LocalProtocolError):
            self.connection.add(_request(request_id), self._any_rank(data), Expected(request_id, 0, fragile=False))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        known = [expected.request_id for expected in self.everyone]
        request_ids = data.draw(st.lists(st.sampled_from([*known, "nobody's"]), max_size=5))
        doomed = {request_id: self.live[request_id] for request_id in request_ids if request_id in self.live}
        messages = self.connection.abort(request_ids)
        assert sorted(rank for rank, _ in messages) == sorted({expected.rank for expected in doomed.values()})
        for rank, frames in messages:
            self._told(rank, frames)
        for request_id, expected in doomed.items():
            assert expected.aborts == 1
            expected.ends.append("aborted")
            del self.live[request_id]

    @rule(target=calls, data=st.data(), method=st.sampled_from(["is_sleeping", "reset"]))
    def call_utility(self, data: st.DataObject, method: str) -> ExpectedCall:
        def on_done() -> None:
            expected.told += 1

        rank = self._any_rank(data)
        call, frames = self.connection.utility(method, [next(self.names)], rank, on_done)
        expected = self.pending[call.call_id] = ExpectedCall(call)
        assert call.call_id not in self.call_ids
        self.call_ids.add(call.call_id)
        self._told(rank, frames, call=expected)
        return expected

    @rule(expected=consumes(calls))
    def give_up(self, expected: ExpectedCall) -> None:
        self.connection.utilities.forget(expected.call.call_id)
        self.pending.pop(expected.call.call_id, None)

    # ----------------------------------------------------------------------------------------------- the engines speak

    @precondition(lambda self: any(engine.running for engine in self.engines))
    @rule(data=st.data(), size=st.integers(1, 5), delayed=st.booleans())
    def step(self, data: st.DataObject, size: int, delayed: bool) -> None:
        """One engine message: deltas of several requests, or several of one; some are the last."""
        rank = data.draw(st.sampled_from([rank for rank, engine in enumerate(self.engines) if engine.running]))
        self._speak(data, rank, size, list(self.engines[rank].running), delayed)

    @precondition(lambda self: self.everyone)
    @rule(data=st.data(), size=st.integers(1, 5), delayed=st.booleans())
    def stray(self, data: st.DataObject, size: int, delayed: bool) -> None:
        """The same, with second last words, and words about requests that are over or were never there."""
        rank = self._any_rank(data)
        engine = self.engines[rank]
        self._speak(data, rank, size, [*engine.running, *engine.ended, "nobody's"], delayed)

    def _speak(self, data: st.DataObject, rank: int, size: int, request_ids: list[str], delayed: bool) -> None:
        engine = self.engines[rank]
        few = data.draw(st.lists(st.sampled_from(request_ids), min_size=1, max_size=3))
        outputs = []
        for _ in range(size):
            request_id = data.draw(st.sampled_from(few))
            final = data.draw(st.booleans())
            outputs.append(EngineCoreOutput(request_id, data.draw(TOKENS), finish_reason=0 if final else None))
            if final and request_id in engine.running:
                del engine.running[request_id]
                engine.ended.append(request_id)
        self._send(rank, EngineCoreOutputs(engine_index=rank, outputs=outputs), delayed)

    @precondition(lambda self: any(engine.calls for engine in self.engines))
    @rule(data=st.data(), failure=st.sampled_from([None, "", "boom"]), twice=st.booleans(), delayed=st.booleans())
    def answer(self, data: st.DataObject, failure: str | None, twice: bool, delayed: bool) -> None:
        rank = data.draw(st.sampled_from([rank for rank, engine in enumerate(self.engines) if engine.calls]))
        expected = data.draw(st.sampled_from(self.engines[rank].calls))
        if not twice:
            self.engines[rank].calls.remove(expected)
        reply = UtilityOutput(expected.call.call_id, failure, expected.call.method if failure is None else None)
        self._send(rank, EngineCoreOutputs(engine_index=rank, utility_output=reply), delayed)

    @rule(data=st.data(), garbage=st.none() | st.sampled_from(GARBAGE))
    def notify_or_babble(self, data: st.DataObject, garbage: bytes | None) -> None:
        rank = self._any_rank(data)
        if garbage is not None:
            self.wire.append((rank, [garbage]))
            return
        notification = UtilityOutput(-1, None, ["RECONFIGURE_FINISHED", rank])
        self._send(rank, EngineCoreOutputs(engine_index=rank, utility_output=notification), delayed=True)

    # ------------------------------------------------------------------------------------------------- messages arrive

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """The oldest message of any rank: the order between ranks is free, that of one rank is kept."""
        self._arrive(data.draw(st.sampled_from(sorted({rank for rank, _ in self.wire}))))

    def _arrive(self, rank: int) -> None:
        position = next(index for index, (sender, _) in enumerate(self.wire) if sender == rank)
        _, frames = self.wire.pop(position)
        event = self.connection.receive(frames)
        match event:
            case OutputBatch():
                self._arrive_outputs(event.outputs)
            case UtilityReply():
                self._arrive_reply(event)
            case EEPNotification():
                assert event == EEPNotification("RECONFIGURE_FINISHED", rank)
            case MalformedMessage():
                assert frames[0] in GARBAGE
                self.malformed += 1
            case _:
                raise AssertionError(event)

    def _arrive_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        broken: list[Expected] = []
        for output in outputs:  # what ought to happen, before it does
            expected = self.live.get(output.request_id)
            if expected is None:
                self.late_outputs += 1
                continue
            if output.finish_reason is not None:
                del self.live[output.request_id]
            if expected in broken:
                continue
            if expected.fragile and 2 in output.new_token_ids:
                broken.append(expected)
            else:
                expected.sent += output.new_token_ids
        failures = self.connection.requests.dispatch(outputs)
        assert [entry.consumer for entry, _ in failures] == broken
        for entry, error in failures:  # as a client does
            assert isinstance(error, ArithmeticError)
            still_runs = entry.request_id in self.live
            messages = self.connection.abort([entry.request_id])
            assert [rank for rank, _ in messages] == ([entry.rank] if still_runs else [])
            for rank, frames in messages:
                self._told(rank, frames)
            self.live.pop(entry.request_id, None)
            entry.consumer.fail(error)

    def _arrive_reply(self, event: UtilityReply) -> None:
        assert event.output.call_id in self.call_ids, "what nobody asked for is no reply"
        expected = self.pending.pop(event.output.call_id, None)
        self.connection.utilities.resolve(event.rank, event.output)
        if expected is None:
            self.late_replies += 1
        elif event.output.failure_message is None:
            assert (expected.call.value, expected.call.error, expected.told) == (expected.call.method, None, 1)
        else:
            assert isinstance(expected.call.error, UtilityError)
            assert expected.told == 1

    # ----------------------------------------------------------------------------------------------------------- death

    @rule(data=st.data())
    def bury(self, data: st.DataObject) -> None:
        """One rank is given up: everyone who waits for it is told, nobody else. It may still be heard of."""
        rank = self._any_rank(data)
        cause = EngineDeadError("killed", rank=rank)
        doomed = [expected for expected in self.live.values() if expected.rank == rank]
        calls = [expected for expected in self.pending.values() if expected.call.rank == rank]
        entries = self.connection.requests.fail_all(cause, rank)
        self.connection.utilities.fail_all(cause, rank)
        assert [entry.consumer for entry in entries] == doomed
        for expected in doomed:
            assert expected.ends == ["failed"]
            del self.live[expected.request_id]
        for call in calls:
            assert isinstance(call.call.error, EngineError)
            assert call.call.error.__cause__ is cause
            del self.pending[call.call.call_id]
        self.engines[rank].running.clear()

    def teardown(self) -> None:
        if not hasattr(self, "connection"):
            return
        cause = EngineDeadError("killed")
        self.connection.requests.fail_all(cause)
        self.connection.utilities.fail_all(cause)
        assert len(self.connection.requests) == len(self.connection.utilities) == 0
        assert all(len(expected.ends) == 1 for expected in self.everyone)

    # ------------------------------------------------------------------------------------------------------ invariants

    @invariant()
    def the_registries_hold_what_the_model_holds(self) -> None:
        assert {name: entry.consumer for name, entry in self.connection.requests.live.items()} == self.live
        assert set(self.connection.utilities.pending) == set(self.pending)
        assert self.connection.requests.late_outputs == self.late_outputs
        assert self.connection.utilities.late_replies == self.late_replies
        assert self.connection.malformed_messages == self.malformed

    @invariant()
    def consumers_saw_their_tokens_and_at_most_one_end(self) -> None:
        for expected in self.everyone:
            assert expected.seen == expected.sent
            assert len(expected.ends) == (0 if self.live.get(expected.request_id) is expected else 1)
            assert expected.aborts <= 1

    # --------------------------------------------------------------------------------------------------------- helpers

    def _told(
        self, rank: int, frames: Frames, request: Expected | None = None, call: ExpectedCall | None = None
    ) -> None:
        """An engine takes a message of the connection: what it decodes is what was meant."""
        engine = self.engines[rank]
        message = self.dialect.decode_input(frames)
        if isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                expected = self.live.get(request_id)
                assert expected is not None, f"an ABORT for {request_id}, which is finished"
                assert expected.rank == rank, f"an ABORT for {request_id} to rank {rank}"
                expected.aborts += 1
                if request_id in engine.running:
                    del engine.running[request_id]
                    engine.ended.append(request_id)
        elif isinstance(message, UtilityCall):
            assert call is not None
            assert (message.call_id, message.method) == (call.call.call_id, call.call.method)
            engine.calls.append(call)
        else:
            assert request is not None and hasattr(
                message, "prompt_token_ids"
            )  # old releases have structs of their own
            assert request is not None
            assert message.request_id == request.request_id
            engine.running[message.request_id] = request

    def _send(self, rank: int, message: EngineCoreOutputs, delayed: bool) -> None:
        self.wire.append((rank, self.dialect.encode_outputs(message)))
        while not delayed and any(sender == rank for sender, _ in self.wire):
            self._arrive(rank)

    def _any_rank(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(self.connection.ranks))


def _request(request_id: str) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1], sampling_params=WireSamplingParams())
