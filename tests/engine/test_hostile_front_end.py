"""A front end that makes no sense, or comes and goes without end: an engine that stays keeps its model for the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from foreign_frontend import DEADLINE_S, ForeignFrontend, address_of, pack, receive

from anyengine.testing.toy_runner import expected_tokens

PROMPT = [3, 1, 4, 1, 5]
STAY = ("--stay", "--reconnect-grace", "0")


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[ForeignFrontend]:
    with ForeignFrontend(tmp_path, tcp=True) as frontend:
        yield frontend


def replace(frontend: ForeignFrontend) -> None:
    """Leave, and come back at the same handshake address with other sockets."""
    frontend.close_sockets()
    frontend.handshake = frontend.bind_at(frontend.handshake_address)
    frontend.inputs, frontend.outputs = [frontend._bind(zmq.ROUTER, "i")], [frontend._bind(zmq.PULL, "o")]
    frontend.addresses = {
        "inputs": [address_of(frontend.inputs[0])],
        "outputs": [address_of(frontend.outputs[0])],
    }


def num_fds(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def init(inputs: Any, outputs: Any) -> bytes:
    return pack({"addresses": {"inputs": inputs, "outputs": outputs}, "parallel_config": {}})


NONSENSE = {
    "garbage": b"\xc1",
    "nothing": b"",
    "no map": pack([]),
    "no address": init([], []),
    "one input too many": init(["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"], ["tcp://127.0.0.1:3"]),
    "an address that is a number": init([1], [2]),
    "no scheme": init(["127.0.0.1:1"], ["127.0.0.1:2"]),
    "another scheme": init(["http://127.0.0.1:1"], ["http://127.0.0.1:2"]),
    "a good output only": init(["bogus"], ["tcp://127.0.0.1:1"]),
    "a good input only": init(["tcp://127.0.0.1:1"], ["bogus"]),
    "too long": init(["ipc:///" + "x" * 1000], ["ipc:///" + "x" * 1000]),
}


def test_answers_that_make_no_sense_do_not_end_an_engine_that_stays(frontend: ForeignFrontend) -> None:
    process = frontend.launch_by_hand(*STAY)
    frontend.shake_hands()
    fds = num_fds(process.pid)
    for answer in NONSENSE.values():
        replace(frontend)
        identity, _hello = receive(frontend.handshake)
        frontend.handshake.send_multipart([identity, answer])
    replace(frontend)
    frontend.shake_hands()
    assert frontend.generate("a", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)
    assert num_fds(process.pid) <= fds + 2
    assert "makes no sense" in frontend.stderr


def test_front_ends_that_come_and_go_leave_nothing_behind(frontend: ForeignFrontend) -> None:
    process = frontend.launch_by_hand(*STAY)
    counts = []
    for number in range(40):
        frontend.shake_hands()
        frontend.add(f"a{number}", PROMPT, max_tokens=30)
        if number % 2:
            frontend.receive()
            counts.append(num_fds(process.pid))
        replace(frontend)
    frontend.shake_hands()
    assert frontend.generate("a", PROMPT, max_tokens=3) == expected_tokens(PROMPT, 3)
    assert max(counts[-3:]) <= max(counts[:3]) + 2, counts
    process.terminate()
    assert process.wait(DEADLINE_S) == 0
