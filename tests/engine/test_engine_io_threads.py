"""The input and output threads over real sockets inside one process: what no allow-listed utility can provoke from
outside."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import zmq

from anyengine._wire import NEWEST, AbortRequests, EngineCoreOutputs, UtilityOutput
from anyengine.engine.serving.io_threads import Command, InputThread, OutputThread, ThreadFailed
from anyengine.engine.serving.malformed import Malformed

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        context.setsockopt(zmq.RCVTIMEO, 10_000)
        yield context


@pytest.fixture
def commands() -> SimpleQueue[Command]:
    return SimpleQueue()


def test_a_result_that_cannot_be_encoded_becomes_a_failure_reply(
    context: Context, commands: SimpleQueue[Command]
) -> None:
    with context.socket(zmq.PULL) as pull:
        pull.bind("inproc://out")
        thread = OutputThread(context, ["inproc://out"], commands, dialect=NEWEST)
        thread.start()
        for call_id, result in ((1, object()), (2, "fine")):
            thread.send(0, EngineCoreOutputs(utility_output=UtilityOutput(call_id, None, result)), method="f")
        thread.stop()
        replies = [NEWEST.decode_outputs(pull.recv_multipart()).utility_output for _ in range(2)]
    assert replies[0] is not None
    assert replies[1] is not None
    assert replies[0].failure_message is not None
    assert replies[0].failure_message.startswith("Call to f method failed: its result cannot be encoded")
    assert (replies[1].failure_message, replies[1].result) == (None, "fine")
    assert commands.empty()


def test_a_failing_output_thread_tells_the_busy_loop(context: Context, commands: SimpleQueue[Command]) -> None:
    thread = OutputThread(context, ["inproc://out"], commands, dialect=NEWEST)
    with context.socket(zmq.PULL) as pull:
        pull.bind("inproc://out")
        thread.start()
        thread.send(7, EngineCoreOutputs())
        thread.stop()
    failed = commands.get(timeout=10)
    assert isinstance(failed, ThreadFailed)
    assert isinstance(failed.error, IndexError)


@pytest.mark.parametrize("thread_type", [InputThread, OutputThread])
def test_an_address_that_makes_no_sense_is_reported(
    context: Context, commands: SimpleQueue[Command], thread_type: type[InputThread | OutputThread]
) -> None:
    thread = (
        InputThread(context, ["nonsense"], commands, dialect=NEWEST, identity=b"\0\0", registration=b"")
        if thread_type is InputThread
        else OutputThread(context, ["nonsense"], commands, dialect=NEWEST)
    )
    with pytest.raises(zmq.ZMQError):
        thread.start()
    thread.stop()


def test_input_is_decoded_in_order_and_nothing_malformed_ends_the_thread(
    context: Context, commands: SimpleQueue[Command]
) -> None:
    with context.socket(zmq.ROUTER) as router:
        router.bind("inproc://in")
        thread = InputThread(
            context, ["inproc://in"], commands, dialect=NEWEST, identity=b"\0\0", registration=b"registration"
        )
        thread.start()
        assert router.recv_multipart() == [b"\0\0", b"registration"]
        router.send_multipart([b"\0\0", *NEWEST.encode_abort(["a"])])
        router.send_multipart([b"\0\0", b"\x42", b""])
        router.send_multipart([b"\0\0", *NEWEST.encode_abort(["b"])])
        received = [commands.get(timeout=10) for _ in range(3)]
        thread.stop()
    assert received[0] == AbortRequests(["a"])
    assert received[2] == AbortRequests(["b"])
    assert isinstance(received[1], Malformed)
    assert received[1].kind == "unknown type"
