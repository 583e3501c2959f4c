"""The registries: replies find their calls, outputs their consumers, and an end is told to everyone once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from protocol_pieces import PREFIX, Consumer, nothing, output, request

from anyengine._protocol import Connection, Frames, PendingCall, RequestRegistry, UtilityReply
from anyengine._wire import (
    NEWEST,
    AbortRequests,
    EngineCoreOutput,
    EngineCoreOutputs,
    UtilityCall,
    UtilityOutput,
)
from anyengine.exceptions import EncodeError, EngineDeadError, UtilityError


class Unwilling(Consumer):
    """Takes nothing."""

    def push(self, output: EngineCoreOutput) -> None:
        super().push(output)
        raise ArithmeticError(f"no {output.new_token_ids}")


@pytest.fixture
def connection() -> Connection:
    return Connection({0: NEWEST, 1: NEWEST, 5: NEWEST}, call_id_prefix=PREFIX)


# ------------------------------------------------------------------------------------------------------- utility calls


def reply_to(call: PendingCall, *, rank: int = 0, failure: str | None = None, result: Any = None) -> Frames:
    reply = UtilityOutput(call.call_id, failure, result)
    return NEWEST.encode_outputs(EngineCoreOutputs(engine_index=rank, utility_output=reply))


def resolve(connection: Connection, frames: Frames) -> None:
    event = connection.receive(frames)
    assert isinstance(event, UtilityReply)
    connection.utilities.resolve(event.rank, event.output)


def test_a_call_is_the_dialects(connection: Connection) -> None:
    call, frames = connection.utility("add_lora", ["x", 3], 1, nothing)
    assert NEWEST.decode_input(frames) == UtilityCall(0, call.call_id, "add_lora", ["x", 3])
    assert (call.method, call.rank, connection.utilities.pending) == ("add_lora", 1, {call.call_id: call})


def test_a_call_names_the_output_socket_of_its_client() -> None:
    connection = Connection({0: NEWEST}, call_id_prefix=1, client_index=3)
    _, frames = connection.utility("is_sleeping", [], 0, nothing)
    decoded = NEWEST.decode_input(frames)
    assert isinstance(decoded, UtilityCall)
    assert decoded.client_index == 3


def test_a_call_that_cannot_be_encoded_is_not_registered(connection: Connection) -> None:
    with pytest.raises(EncodeError) as caught:
        connection.utility("x", [1, {"k": object()}], 0, nothing)
    assert (caught.value.field, caught.value.type_name) == ("args[1]['k']", "object")
    assert len(connection.utilities) == 0


@pytest.mark.feature("C41")
@pytest.mark.parametrize("prefix", [0, 1, PREFIX, (1 << 31) - 1])
def test_call_ids_are_unique_and_never_negative(prefix: int) -> None:
    connection = Connection({0: NEWEST}, call_id_prefix=prefix)
    ids = [connection.utility("x", [], 0, nothing)[0].call_id for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(0 <= call_id < 1 << 63 and call_id >> 32 == prefix for call_id in ids)


@pytest.mark.feature("C41")
def test_the_counter_stays_below_the_prefix(connection: Connection) -> None:
    connection.utilities._counter = 0xFFFF_FFFE
    ids = [connection.utility("x", [], 0, nothing)[0].call_id for _ in range(3)]
    assert [call_id & 0xFFFF_FFFF for call_id in ids] == [0xFFFF_FFFF, 0, 1]
    assert {call_id >> 32 for call_id in ids} == {PREFIX}


def test_an_id_is_not_used_again_while_its_call_waits(connection: Connection) -> None:
    """Found by the state machine, which lets the counter come around."""
    registry = connection.utilities
    first = registry.open("x", 0, nothing)
    registry._counter = (first.call_id - 1) & 0xFFFF_FFFF
    second = registry.open("x", 0, nothing)
    assert second.call_id != first.call_id
    assert registry.pending == {first.call_id: first, second.call_id: second}


def test_replies_find_their_calls_in_any_order(connection: Connection) -> None:
    done: list[str] = []
    first, _ = connection.utility("first", [], 0, lambda: done.append("first"))
    second, _ = connection.utility("second", [], 1, lambda: done.append("second"))
    resolve(connection, reply_to(second, rank=1, result={"answer": [1, 2]}))
    assert done == ["second"]
    assert (second.value, second.error, first.value) == ({"answer": [1, 2]}, None, None)
    resolve(connection, reply_to(first, result=None))
    assert done == ["second", "first"]
    assert len(connection.utilities) == connection.utilities.late_replies == 0


def test_a_failure_reply_is_that_calls_error(connection: Connection) -> None:
    done: list[str] = []
    call, _ = connection.utility("explode", [], 1, lambda: done.append("done"))
    other, _ = connection.utility("other", [], 1, lambda: done.append("other"))
    resolve(connection, reply_to(call, rank=1, failure="Call to explode method failed: boom"))
    assert isinstance(call.error, UtilityError)
    assert "'explode' failed in engine 1" in str(call.error)
    assert "boom" in str(call.error)
    assert (call.error.method, call.error.call_id, call.error.rank) == ("explode", call.call_id, 1)
    assert done == ["done"]
    assert list(connection.utilities.pending.values()) == [other]


def test_an_empty_failure_message_is_a_failure_too(connection: Connection) -> None:
    call, _ = connection.utility("explode", [], 0, nothing)
    resolve(connection, reply_to(call, failure=""))
    assert isinstance(call.error, UtilityError)


def test_late_replies_are_dropped_and_counted(connection: Connection) -> None:
    told: list[str] = []
    call, _ = connection.utility("slow", [], 0, lambda: told.append("done"))
    connection.utilities.forget(call.call_id)
    connection.utilities.forget(call.call_id)  # unknown by now
    for _ in range(2):
        resolve(connection, reply_to(call, result=1))
    assert (told, call.value, connection.utilities.late_replies) == ([], None, 2)


def test_a_reply_to_another_client_is_late(connection: Connection) -> None:
    stranger, _ = Connection({0: NEWEST}, call_id_prefix=PREFIX + 1).utility("x", [], 0, nothing)
    call, _ = connection.utility("x", [], 0, nothing)
    resolve(connection, reply_to(stranger, result="not for us"))
    assert connection.utilities.pending == {call.call_id: call}
    assert connection.utilities.late_replies == 1


# ----------------------------------------------------------------------------------------------------- dispatch, death


@pytest.mark.feature("L11")
def test_outputs_after_an_abort_are_dropped_and_counted(connection: Connection) -> None:
    gone, kept = Consumer(), Consumer()
    connection.add(request("gone"), 0, gone)
    connection.add(request("kept"), 0, kept)
    connection.abort(["gone"])
    for token_id in range(5):
        assert connection.requests.dispatch([output("gone", token_id), output("kept", token_id)]) == []
    assert (gone.outputs, gone.errors) == ([], [])
    assert kept.token_ids == [0, 1, 2, 3, 4]
    assert connection.requests.late_outputs == 5


def test_a_second_final_output_is_late(connection: Connection) -> None:
    consumer = Consumer()
    connection.add(request(), 0, consumer)
    connection.requests.dispatch([output("a", 1), output("a", 2, finish_reason=0), output("a", 3, finish_reason=0)])
    assert consumer.token_ids == [1, 2]
    assert connection.requests.late_outputs == 1


def test_one_consumers_trouble_is_its_own(connection: Connection) -> None:
    bad, good = Unwilling(), Consumer()
    connection.add(request("bad"), 0, bad)
    connection.add(request("good"), 0, good)
    entry = connection.requests.live["bad"]
    batch = [
        output("good", 1),
        output("bad", 1),
        output("good", 2),
        output("bad", 2),
        output("good", 3, finish_reason=0),
    ]
    [(failed, error)] = connection.requests.dispatch(batch)
    assert failed is entry
    assert isinstance(error, ArithmeticError)
    assert good.token_ids == [1, 2, 3]
    assert bad.token_ids == [1]  # it gets nothing more after what it could not take
    [(rank, frames)] = connection.abort([failed.request_id])  # it lives in the engine until it is aborted
    assert (rank, NEWEST.decode_input(frames)) == (0, AbortRequests(["bad"]))
    assert bad.aborts == 0  # that it failed is what it is told


def test_a_consumer_that_cannot_take_its_last_output_has_ended(connection: Connection) -> None:
    connection.add(request(), 0, Unwilling())
    [(failed, _)] = connection.requests.dispatch([output("a", 1, finish_reason=0)])
    assert failed.request_id == "a"
    assert connection.abort(["a"]) == []


def test_cancellation_is_not_one_consumers_trouble(connection: Connection) -> None:
    class Interrupted(Consumer):
        def push(self, output: EngineCoreOutput) -> None:
            raise KeyboardInterrupt

    connection.add(request(), 0, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        connection.requests.dispatch([output("a", 1)])


def dead() -> EngineDeadError:
    return EngineDeadError("engine 1 was killed", rank=1, pid=77, signal="SIGKILL")


def test_death_tells_every_request_once(connection: Connection) -> None:
    consumers = {name: Consumer() for name in "abc"}
    for name, rank in {"a": 0, "b": 1, "c": 1}.items():
        connection.add(request(name), rank, consumers[name])
    cause = dead()
    assert [entry.request_id for entry in connection.requests.fail_all(cause, rank=1)] == ["b", "c"]
    assert [consumers[name].errors for name in "abc"] == [[], [cause], [cause]]
    assert [entry.request_id for entry in connection.requests.fail_all(cause)] == ["a"]
    assert connection.requests.fail_all(cause) == []
    assert [len(consumers[name].errors) for name in "abc"] == [1, 1, 1]
    assert connection.abort(["a", "b", "c"]) == []


def test_each_pending_call_gets_an_instance_of_its_own(connection: Connection) -> None:
    done: list[int] = []
    calls = [connection.utility("x", [], rank, lambda rank=rank: done.append(rank))[0] for rank in (0, 1, 1)]  # type: ignore[misc]
    cause = dead()
    connection.utilities.fail_all(cause, rank=1)
    assert done == [1, 1]
    assert calls[0].error is None
    connection.utilities.fail_all(cause)
    assert done == [1, 1, 0]
    errors = [call.error for call in calls]
    assert len({id(error) for error in [cause, *errors]}) == 4
    for error in errors:
        assert isinstance(error, EngineDeadError)
        assert error.__cause__ is cause
        assert (error.rank, error.pid, error.signal) == (1, 77, "SIGKILL")
    assert len(connection.utilities) == 0


@pytest.mark.parametrize("registry", ["requests", "utilities"])
def test_whoever_is_told_may_act_at_once(connection: Connection, registry: str) -> None:
    """A consumer that is told may register, abort and forget; nobody is told twice or passed over."""
    told: list[str] = []

    def act(name: str) -> Callable[[], None]:
        def on_told() -> None:
            told.append(name)
            connection.abort(["a", "b"])
            for call_id in list(connection.utilities.pending):
                connection.utilities.forget(call_id)

        return on_told

    class Acting(Consumer):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._act = act(name)

        def fail(self, error: BaseException) -> None:
            self._act()

    for name in "ab":
        connection.add(request(name), 0, Acting(name))
        connection.utility(name, [], 0, act(name))
    getattr(connection, registry).fail_all(dead())
    assert told == ["a", "b"]


def test_a_consumer_that_cannot_be_told_keeps_nobody_from_being_told() -> None:
    class Deaf:
        def push(self, output: EngineCoreOutput) -> None: ...

        def aborted(self) -> None:
            raise ZeroDivisionError

        def fail(self, error: BaseException) -> None:
            raise ZeroDivisionError

    registry = RequestRegistry()
    told: list[BaseException] = []

    class Listening(Deaf):
        def fail(self, error: BaseException) -> None:
            told.append(error)

    registry.open("a", 0, Deaf())
    registry.open("b", 0, Listening())
    cause = EngineDeadError("gone")
    registry.fail_all(cause)
    assert told == [cause]
    assert len(registry) == 0
