"""The connection: commands become the dialect's frames, frames become events, and the registries tell the truth."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_pieces import PREFIX, Consumer, nothing, output, request

from anyengine._protocol import (
    Connection,
    DeadSentinel,
    EEPNotification,
    FaultStatus,
    Frames,
    MalformedMessage,
    RankState,
)
from anyengine._wire import (
    DIALECTS,
    ENGINE_CORE_DEAD,
    NEWEST,
    AbortRequests,
    EngineCoreOutputs,
    UtilityOutput,
    WireLoRARequest,
)
from anyengine.exceptions import DecodeError, EncodeError, LocalProtocolError


@pytest.fixture
def connection() -> Connection:
    return Connection({0: NEWEST, 1: NEWEST, 5: NEWEST}, call_id_prefix=PREFIX)


def unsolicited(call_id: int, result: Any) -> Frames:
    return NEWEST.encode_outputs(EngineCoreOutputs(engine_index=1, utility_output=UtilityOutput(call_id, None, result)))


# -------------------------------------------------------------------------------------------------------- construction


def test_a_connection_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least one rank"):
        Connection({}, call_id_prefix=1)


@pytest.mark.parametrize("prefix", [-1, 1 << 31, 1 << 63])
def test_a_prefix_has_31_bits(prefix: int) -> None:
    with pytest.raises(ValueError, match=f"prefix={prefix} must be a 31-bit number"):
        Connection({0: NEWEST}, call_id_prefix=prefix)


def test_ranks_are_those_it_was_given(connection: Connection) -> None:
    assert connection.ranks == (0, 1, 5)


@pytest.mark.parametrize("command", ["add", "utility"])
def test_a_rank_that_is_not_connected(connection: Connection, command: str) -> None:
    with pytest.raises(LocalProtocolError, match=r"rank 2 is not connected; connected: \[0, 1, 5\]"):
        if command == "add":
            connection.add(request(), 2, Consumer())
        else:
            connection.utility("is_sleeping", [], 2, nothing)
    assert len(connection.requests) == len(connection.utilities) == 0


# ---------------------------------------------------------------------------------------------------------- add, abort


@pytest.mark.parametrize("dialect", DIALECTS, ids=repr)
def test_an_add_is_the_dialects(dialect: Any) -> None:
    connection = Connection({3: dialect}, call_id_prefix=1)
    consumer = Consumer()
    frames = connection.add(request(), 3, consumer)
    assert frames == dialect.encode_add(request())
    assert dialect.decode_input(frames).prompt_token_ids == [1, 2, 3]
    entry = connection.requests.live["a"]
    assert (entry.request_id, entry.rank, entry.consumer) == ("a", 3, consumer)


def test_each_rank_is_told_in_its_own_dialect() -> None:
    oldest, newest = DIALECTS[0], DIALECTS[-1]
    assert oldest is not newest
    connection = Connection({0: oldest, 1: newest}, call_id_prefix=1)
    assert connection._dialect(0) is oldest
    assert connection._dialect(1) is newest


def test_what_cannot_be_encoded_is_not_registered(connection: Connection) -> None:
    bad = request(trace_headers={"who": object()})
    with pytest.raises(EncodeError, match="object") as caught:
        connection.add(bad, 0, Consumer())
    assert caught.value.field == "trace_headers['who']"
    assert len(connection.requests) == 0
    connection.add(request(), 0, Consumer())  # and its id is free


def test_an_id_lives_once(connection: Connection) -> None:
    first, second = Consumer(), Consumer()
    connection.add(request(), 0, first)
    with pytest.raises(LocalProtocolError, match="'a' is alive already"):
        connection.add(request(), 1, second)
    assert connection.requests.live["a"].consumer is first
    connection.requests.dispatch([output("a", 7, finish_reason=0)])
    connection.add(request(), 1, second)  # it has ended: the id is free again
    assert connection.requests.live["a"].rank == 1


def test_a_request_for_another_client_is_refused() -> None:
    connection = Connection({0: NEWEST}, call_id_prefix=1, client_index=2)
    with pytest.raises(LocalProtocolError, match="client_index=0 is not this client's 2"):
        connection.add(request(), 0, Consumer())
    assert len(connection.requests) == 0
    connection.add(request(client_index=2), 0, Consumer())


class Unhearing(Consumer):
    """Cannot be told."""

    def aborted(self) -> None:
        super().aborted()
        raise ZeroDivisionError


def test_an_abort_is_grouped_by_rank_and_told_once(connection: Connection) -> None:
    consumers = {name: Unhearing() if name == "c" else Consumer() for name in ("a", "b", "c", "d", "kept")}
    for request_id, rank in {"a": 0, "b": 1, "c": 0, "d": 5, "kept": 1}.items():
        connection.add(request(request_id), rank, consumers[request_id])
    messages = connection.abort(["c", "unknown", "b", "a", "c", "d"])
    told = {rank: NEWEST.decode_input(frames) for rank, frames in messages}
    assert told == {0: AbortRequests(["c", "a"]), 1: AbortRequests(["b"]), 5: AbortRequests(["d"])}
    assert len(messages) == 3
    assert list(connection.requests.live) == ["kept"]
    assert connection.abort(["a", "b", "c", "d", "unknown"]) == []
    assert connection.abort(iter([])) == []
    assert {name: consumer.aborts for name, consumer in consumers.items()} == dict.fromkeys("abcd", 1) | {"kept": 0}
    assert not any(consumer.errors for consumer in consumers.values())


def test_a_finished_request_is_not_aborted(connection: Connection) -> None:
    connection.add(request(), 0, Consumer())
    connection.requests.dispatch([output("a", 7, finish_reason=1)])
    assert connection.abort(["a"]) == []


# ------------------------------------------------------------------------------------------------------------- receive


def test_a_batch_is_handed_over_as_it_is(connection: Connection) -> None:
    batch = EngineCoreOutputs(engine_index=5, outputs=[output("a", 1, 2), output("b", 3, finish_reason=0)])
    event = connection.receive(NEWEST.encode_outputs(batch))
    assert isinstance(event, EngineCoreOutputs)
    assert event == batch


def test_a_batch_of_nothing_is_a_batch(connection: Connection) -> None:
    assert isinstance(connection.receive(NEWEST.encode_outputs(EngineCoreOutputs())), EngineCoreOutputs)


@pytest.mark.parametrize("frame", [ENGINE_CORE_DEAD, memoryview(ENGINE_CORE_DEAD)], ids=["bytes", "memoryview"])
def test_the_dead_sentinel(connection: Connection, frame: Any) -> None:
    assert connection.receive([frame]) == DeadSentinel()
    assert connection.malformed_messages == 0


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"ENGINE_CORE_DEAD", b""],
        [b"ENGINE_CORE_DEAD!"],
        [msgspec.msgpack.encode([0, "outputs"])],
        [msgspec.msgpack.encode([0, [["id-without-tokens"]]])],
        [msgspec.msgpack.encode([0, [], None, 0.0, [7, None, "not a pair"]])],
        [msgspec.msgpack.encode({"engine_index": 0})],
    ],
    ids=repr,
)
def test_garbage_is_an_event_and_harms_nothing(connection: Connection, frames: Frames) -> None:
    consumer = Consumer()
    connection.add(request(), 0, consumer)
    connection.utility("is_sleeping", [], 0, nothing)
    event = connection.receive(frames)
    assert isinstance(event, MalformedMessage)
    assert isinstance(event.error, DecodeError)
    assert connection.malformed_messages == 1
    assert len(connection.requests) == len(connection.utilities) == 1
    assert (consumer.outputs, consumer.errors) == ([], [])


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_no_bytes_make_it_raise(frames: list[bytes]) -> None:
    Connection({0: NEWEST}, call_id_prefix=1).receive(frames)


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["id", "status", "x"]), inner),
    max_leaves=8,
)


@pytest.mark.feature("C41")
@given(st.integers(-(1 << 63), -1), _PLAIN)
def test_no_unsolicited_message_touches_a_pending_call(call_id: int, result: Any) -> None:
    connection = Connection({0: NEWEST}, call_id_prefix=PREFIX)
    told: list[str] = []
    call, _ = connection.utility("is_sleeping", [], 0, lambda: told.append("done"))
    event = connection.receive(unsolicited(call_id, result))
    assert isinstance(event, EEPNotification | FaultStatus | MalformedMessage)
    assert connection.utilities.pending == {call.call_id: call}
    assert not told
    assert connection.utilities.late_replies == 0


@pytest.mark.feature("C41")
@pytest.mark.parametrize("name", ["RECONFIGURE_FINISHED", "SHUTDOWN_COMPLETE"])
def test_an_eep_notification(connection: Connection, name: str) -> None:
    assert connection.receive(unsolicited(-1, [name, 3])) == EEPNotification(name, 3)


@pytest.mark.feature("C41")
def test_a_fault_status(connection: Connection) -> None:
    status = {"id": 5, "status": "unhealthy", "fault_info": {"why": "nan"}}
    assert connection.receive(unsolicited(-2, status)) == FaultStatus(5, "unhealthy", {"why": "nan"})
    assert connection.receive(unsolicited(-2, {"id": "5", "status": "dead"})) == FaultStatus(5, "dead", None)


@pytest.mark.parametrize(
    ("call_id", "result"),
    [
        (-1, None),
        (-1, []),
        (-1, ["RECONFIGURE_FINISHED"]),
        (-1, ["RECONFIGURE_FINISHED", "0"]),
        (-1, [0, 0]),
        (-1, ["a", 0, 0]),
        (-1, {"name": "a"}),
        (-2, None),
        (-2, {}),
        (-2, {"id": 5}),
        (-2, {"status": "dead"}),
        (-2, {"id": None, "status": "dead"}),
        (-2, {"id": "five", "status": "dead"}),
        (-2, {"id": float("inf"), "status": "dead"}),
        (-2, {"id": float("nan"), "status": "dead"}),
        (-2, [5, "dead"]),
        (-2, "dead"),
        (-3, ["RECONFIGURE_FINISHED", 0]),
        (-1 << 63, None),
    ],
)
def test_an_unsolicited_message_that_makes_no_sense(connection: Connection, call_id: int, result: Any) -> None:
    event = connection.receive(unsolicited(call_id, result))
    assert isinstance(event, MalformedMessage)
    assert f"call id {call_id} from engine 1" in str(event.error)
    assert connection.malformed_messages == 1


# ------------------------------------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("replaced", [False, True])
def test_a_reply_of_a_former_engine_says_nothing_of_its_successor(replaced: bool) -> None:
    """It was sent before the death, and is taken when the rank has been started again."""
    modes: list[tuple[int, RankState]] = []
    connection = Connection({0: NEWEST}, call_id_prefix=PREFIX, on_mode=lambda *told: modes.append(told))
    loading, _ = connection.utility("add_lora", [WireLoRARequest("a", 1, "/a")], 0, nothing, unchecked=True)
    removing, _ = connection.utility("remove_lora", [2], 0, nothing, unchecked=True)
    pausing, _ = connection.utility("pause_generation", ["abort", True], 0, nothing)
    if replaced:
        connection.replace(0, NEWEST)
        again, _ = connection.utility("add_lora", [WireLoRARequest("b", 2, "/b")], 0, nothing, unchecked=True)
        connection.utilities.resolve(0, UtilityOutput(again.call_id, None, True))
    for call in (loading, removing, pausing):
        connection.utilities.resolve(0, UtilityOutput(call.call_id, None, True))
        assert call.value is True
    assert dict(connection.adapters.of(0)) == ({2: "/b"} if replaced else {1: "/a"})
    assert modes == ([] if replaced else [(0, RankState.PAUSED)])
