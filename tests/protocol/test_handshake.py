"""The handshake: both roles wired to each other in memory, in every order, and everything that may not happen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyengine._protocol import EngineHandshake, FrontendHandshake, HandshakeStage
from anyengine._wire import (
    NEWEST,
    EngineAddresses,
    EngineCoreReadyResponse,
    HandshakeHello,
    HandshakeInit,
    HandshakeReady,
    encode_handshake,
    engine_identity,
)
from anyengine.exceptions import DecodeError, LocalProtocolError, RemoteProtocolError

ADDRESSES = EngineAddresses(inputs=["ipc:///in"], outputs=["ipc:///out"])
HELLO = encode_handshake(HandshakeHello(local=True, headless=False))
READY = encode_handshake(HandshakeReady(local=True, headless=False))
GARBAGE = b"\xc1\xff\x00"


def registration(rank: int) -> bytes:
    return NEWEST.encode_ready(EngineCoreReadyResponse(max_model_len=1000 + rank, data_parallel_rank=rank))


class Engine:
    """One rank: what it may do next, in any order that a real engine can show."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.role = EngineHandshake()
        self.mail: deque[bytes] = deque()
        self.todo: list[Callable[[FrontendHandshake], None]] = [self.greet]

    def greet(self, frontend: FrontendHandshake) -> None:
        reply = frontend.receive_handshake(engine_identity(self.rank), self.role.hello())
        assert reply is not None
        self.mail.append(reply)
        self.todo = [self.initialize]

    def initialize(self, frontend: FrontendHandshake) -> None:
        assert self.role.receive_init(self.mail.popleft()) == HandshakeInit(addresses=ADDRESSES)
        self.todo = [self.report_ready, self.register]  # two sockets: either may arrive first

    def report_ready(self, frontend: FrontendHandshake) -> None:
        assert frontend.receive_handshake(engine_identity(self.rank), self.role.ready()) is None
        self.todo.remove(self.report_ready)

    def register(self, frontend: FrontendHandshake) -> None:
        frontend.receive_registration(engine_identity(self.rank), registration(self.rank))
        self.todo.remove(self.register)

    @property
    def complete(self) -> bool:
        return not self.todo

    @property
    def stage(self) -> HandshakeStage:
        if self.todo == [self.greet]:
            return HandshakeStage.WAITING
        done = self.todo in ([], [self.register])
        return HandshakeStage.READY if done else HandshakeStage.INITIALIZED


def check_truth(frontend: FrontendHandshake, engines: list[Engine], registered: set[int]) -> None:
    assert frontend.pending == tuple(engine.rank for engine in engines if not engine.complete)
    assert [frontend.stage(engine.rank) for engine in engines] == [engine.stage for engine in engines]
    assert set(frontend.registrations) == registered
    for rank, ready in frontend.registrations.items():
        assert ready is not None
        assert ready.max_model_len == 1000 + rank


@given(st.data(), st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=4, unique=True))
def test_every_interleaving_completes(data: st.DataObject, ranks: list[int]) -> None:
    frontend = FrontendHandshake(ranks, ADDRESSES)
    engines = [Engine(rank) for rank in ranks]
    registered: set[int] = set()
    check_truth(frontend, engines, registered)
    while moves := [(engine, move) for engine in engines for move in engine.todo]:
        engine, move = data.draw(st.sampled_from(moves))
        if move == engine.register:
            registered.add(engine.rank)
        move(frontend)
        check_truth(frontend, engines, registered)
    assert frontend.pending == ()


def test_an_old_release_registers_with_an_empty_frame() -> None:
    frontend = FrontendHandshake([0], ADDRESSES)
    frontend.receive_registration(engine_identity(0), b"")
    assert frontend.registrations == {0: None}
    assert frontend.pending == (0,)


def test_the_identity_may_be_any_kind_of_frame() -> None:
    frontend = FrontendHandshake([258], ADDRESSES)
    assert frontend.receive_handshake(memoryview(engine_identity(258)), memoryview(HELLO)) is not None
    assert frontend.stage(258) is HandshakeStage.INITIALIZED


# ---------------------------------------------------------------------------------------------------------- violations


class Violation(NamedTuple):
    """``steps`` are allowed, the ``last`` one is not. A step is ``"h"`` or ``"r"`` (socket), identity, payload."""

    steps: list[tuple[str, bytes, bytes]]
    last: tuple[str, bytes, bytes]
    message: str


ONE = engine_identity(1)
VIOLATIONS = {
    "unknown rank says HELLO": Violation([], ("h", engine_identity(9), HELLO), r"rank 9 .* expected \[0, 1\]"),
    "unknown rank registers": Violation([], ("r", engine_identity(9), b""), r"rank 9 .* expected \[0, 1\]"),
    "HELLO twice": Violation([("h", ONE, HELLO)], ("h", ONE, HELLO), "engine 1 sent HELLO in stage initialized"),
    "HELLO after READY": Violation(
        [("h", ONE, HELLO), ("h", ONE, READY)], ("h", ONE, HELLO), "engine 1 sent HELLO in stage ready"
    ),
    "READY before HELLO": Violation([], ("h", ONE, READY), "engine 1 sent READY in stage waiting"),
    "READY twice": Violation(
        [("h", ONE, HELLO), ("h", ONE, READY)], ("h", ONE, READY), "engine 1 sent READY in stage ready"
    ),
    "registered twice": Violation([("r", ONE, registration(1))], ("r", ONE, registration(1)), "engine 1 .* twice"),
    "registered twice, emptily": Violation([("r", ONE, b"")], ("r", ONE, b""), "engine 1 .* twice"),
    "HELLO of a remote engine": Violation(
        [], ("h", ONE, encode_handshake(HandshakeHello(local=False, headless=True))), "engine 1 says local=False"
    ),
    "READY of a remote engine": Violation(
        [("h", ONE, HELLO)],
        ("h", ONE, encode_handshake(HandshakeReady(local=False, headless=True))),
        "engine 1 says local=False",
    ),
    "garbage instead of HELLO": Violation([], ("h", ONE, GARBAGE), "engine 1 sent neither HELLO nor READY: .* 3 bytes"),
    "another status": Violation(
        [], ("h", ONE, msgspec.msgpack.encode({"status": "BYE", "local": True, "headless": False})), "engine 1 .*BYE"
    ),
    "an empty HELLO": Violation([], ("h", ONE, b""), "engine 1 sent neither HELLO nor READY"),
    "garbage as registration": Violation([], ("r", ONE, GARBAGE), "engine 1 sent no registration: .* 3 bytes"),
    "registration without max_model_len": Violation([], ("r", ONE, b"\x80"), "engine 1 .*max_model_len"),
}


def send(frontend: FrontendHandshake, step: tuple[str, bytes, bytes]) -> None:
    socket, identity, payload = step
    (frontend.receive_handshake if socket == "h" else frontend.receive_registration)(identity, payload)


@pytest.mark.parametrize("violation", VIOLATIONS.values(), ids=VIOLATIONS)
@pytest.mark.parametrize("progress", range(5), ids=lambda steps: f"rank 0 after {steps} steps")
def test_a_violation_is_told_and_harms_no_other_rank(violation: Violation, progress: int) -> None:
    frontend = FrontendHandshake([0, 1], ADDRESSES)
    good = Engine(0)
    for _ in range(min(progress, 4)):
        if good.todo:
            good.todo[0](frontend)
    for step in violation.steps:
        send(frontend, step)
    before = frontend.pending, frontend.stage(0), frontend.stage(1), frontend.registrations

    with pytest.raises(RemoteProtocolError, match=violation.message):
        send(frontend, violation.last)

    assert (frontend.pending, frontend.stage(0), frontend.stage(1), frontend.registrations) == before
    while good.todo:
        good.todo[0](frontend)
    assert frontend.pending == (1,)


@pytest.mark.parametrize("identity", [b"", b"\1", b"\0bcde", b"T / HTTP/1.1\r\nHost"])
@pytest.mark.parametrize("payload", [HELLO, GARBAGE, b""])
def test_a_stranger_is_counted_and_left_alone(identity: bytes, payload: bytes) -> None:
    frontend = FrontendHandshake([0], ADDRESSES)
    assert frontend.receive_handshake(identity, payload) is None
    frontend.receive_registration(identity, payload)
    assert (frontend.strangers, frontend.pending, frontend.registrations) == (2, (0,), {})


def test_bytes_that_cannot_be_read_keep_the_reason() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        FrontendHandshake([0], ADDRESSES).receive_handshake(engine_identity(0), GARBAGE)
    assert isinstance(caught.value.__cause__, DecodeError)
    assert caught.value.__cause__.size_bytes == len(GARBAGE)


def test_a_client_of_remote_engines_refuses_a_local_one() -> None:
    frontend = FrontendHandshake([0], ADDRESSES, expect_local=False)
    with pytest.raises(RemoteProtocolError, match="engine 0 says local=True, but this client did not start it"):
        frontend.receive_handshake(engine_identity(0), HELLO)
    remote = EngineHandshake(local=False, headless=True)
    assert frontend.receive_handshake(engine_identity(0), remote.hello()) is not None


# --------------------------------------------------------------------------------------------------- the engine's role


@pytest.mark.parametrize(
    ("done", "forbidden"),
    [
        ("", "init"),
        ("", "ready"),
        ("hello", "hello"),
        ("hello", "ready"),
        ("hello init", "hello"),
        ("hello init", "init"),
        ("hello init ready", "hello"),
        ("hello init ready", "init"),
        ("hello init ready", "ready"),
    ],
)
def test_the_engine_keeps_the_order_too(done: str, forbidden: str) -> None:
    engine = EngineHandshake()
    steps: dict[str, Callable[[], object]] = {
        "hello": engine.hello,
        "init": lambda: engine.receive_init(encode_handshake(HandshakeInit(addresses=ADDRESSES))),
        "ready": engine.ready,
    }
    for step in done.split():
        steps[step]()
    with pytest.raises(LocalProtocolError, match="the handshake is"):
        steps[forbidden]()


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([], [], "0 input and 0 output"),
        (["a"], [], "1 input and 0 output"),
        ([], ["a"], "0 input and 1 output"),
        (["a", "b"], ["a"], "2 input and 1 output"),
    ],
)
def test_an_init_without_a_pair_of_addresses_for_each_client(
    inputs: list[str], outputs: list[str], message: str
) -> None:
    engine = EngineHandshake()
    engine.hello()
    bad = encode_handshake(HandshakeInit(addresses=EngineAddresses(inputs=inputs, outputs=outputs)))
    with pytest.raises(RemoteProtocolError, match=message):
        engine.receive_init(bad)
    with pytest.raises(LocalProtocolError):
        engine.ready()  # it knows no address: it cannot have connected


@pytest.mark.parametrize("payload", [GARBAGE, b"", b"\x80", HELLO], ids=["garbage", "empty", "no addresses", "HELLO"])
def test_an_init_that_cannot_be_read_changes_nothing(payload: bytes) -> None:
    engine = EngineHandshake()
    engine.hello()
    with pytest.raises(DecodeError, match="HandshakeInit"):
        engine.receive_init(payload)
    assert engine.receive_init(encode_handshake(HandshakeInit(addresses=ADDRESSES))).addresses == ADDRESSES
    assert engine.ready()
