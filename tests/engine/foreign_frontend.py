"""A front end that shares no code with ours: raw pyzmq sockets and untyped msgpack, written from the protocol notes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

DEADLINE_S = 10.0
IDENTITY = b"\x00\x00"
DEAD = b"ENGINE_CORE_DEAD"
TOY = "anyengine.testing.toy_runner:create_runner"
STOP, LENGTH, ABORT, ERROR = 0, 1, 2, 3


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload)


def request(request_id: str, prompt: list[int], *, client: int = 0, **sampling: Any) -> list[Any]:
    """The first 12 positions of EngineCoreRequest."""
    return [request_id, prompt, None, {"temperature": 0.0, **sampling}, None, 0.0, None, None, None, None, None, client]


class ForeignFrontend:
    """Binds the three kinds of sockets, starts one toy engine, speaks the protocol by hand."""

    def __init__(self, directory: Path, *, num_clients: int = 1, tcp: bool = False) -> None:
        self._tcp = tcp
        self._directory = directory
        self._context = zmq.Context()
        self._stderr_path = directory / "stderr.txt"
        self._calls = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.handshake = self._bind(zmq.ROUTER, "h")
        self.handshake_address = address_of(self.handshake)
        self.inputs = [self._bind(zmq.ROUTER, f"i{n}") for n in range(num_clients)]
        self.outputs = [self._bind(zmq.PULL, f"o{n}") for n in range(num_clients)]
        self.addresses = {
            "inputs": [address_of(socket) for socket in self.inputs],
            "outputs": [address_of(socket) for socket in self.outputs],
        }

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.bind("tcp://127.0.0.1:*" if self._tcp else f"ipc://{self._directory}/{name}")
        return socket

    def bind_at(self, address: str) -> zmq.Socket[bytes]:
        """A ROUTER in place of one that has just been closed; libzmq gives an address back a moment later."""
        socket = self._context.socket(zmq.ROUTER)
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                socket.bind(address)
            except zmq.ZMQError:
                assert time.monotonic() < deadline_s, f"{address} is still in use"
                time.sleep(0.01)
            else:
                return socket

    def close_sockets(self) -> None:
        """Leave, as a front end that ends."""
        for socket in (self.handshake, *self.inputs, *self.outputs):
            socket.close(linger=0)

    def send_when_reachable(self, *frames: bytes) -> None:
        """For an engine that has lost its connection and is about to find it again."""
        deadline_s = time.monotonic() + DEADLINE_S
        self.inputs[0].setsockopt(zmq.ROUTER_MANDATORY, 1)
        while True:
            try:
                return self.send(*frames)
            except zmq.ZMQError:
                assert time.monotonic() < deadline_s, "the engine does not come back"
                time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(DEADLINE_S)
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()
        self._context.destroy(linger=0)

    def launch_line(self, engine: dict[str, Any], **runner_options: Any) -> bytes:
        engine = {"runner": TOY, "runner_options": runner_options, **engine}
        return msgspec.json.encode({"handshake_address": self.handshake_address, "engine": engine}) + b"\n"

    def launch(self, engine: dict[str, Any] | None = None, **runner_options: Any) -> subprocess.Popen[bytes]:
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "anyengine.engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        assert self.process.stdin is not None
        self.process.stdin.write(self.launch_line(engine or {}, **runner_options))
        self.process.stdin.flush()
        return self.process

    def launch_by_hand(self, *options: str, handshake: str | None = None) -> subprocess.Popen[bytes]:
        """``anyengine engine``, as a person starts it: nothing on standard input, nobody who watches."""
        command = [sys.executable, "-m", "anyengine.cli", "engine", "--handshake", handshake or self.handshake_address]
        with self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--runner", TOY, *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        return self.process

    def start(self, engine: dict[str, Any] | None = None, **runner_options: Any) -> Self:
        """Launch and shake hands."""
        self.launch(engine, **runner_options)
        self.shake_hands()
        return self

    def shake_hands(self) -> list[dict[str, Any]]:
        """HELLO, the registration of every input, READY."""
        hello = self.answer_hello()
        registrations = [unpack(receive(socket)[1]) for socket in self.inputs]
        identity, ready = receive(self.handshake)
        assert identity == IDENTITY
        return [hello, *registrations, unpack(ready)]

    def answer_hello(self) -> dict[str, Any]:
        identity, hello = receive(self.handshake)
        assert identity == IDENTITY
        self.handshake.send_multipart([identity, pack({"addresses": self.addresses, "parallel_config": {}})])
        message: dict[str, Any] = unpack(hello)
        return message

    def send(self, kind: bytes, *payload: bytes, client: int = 0) -> None:
        self.inputs[client].send_multipart([IDENTITY, kind, *payload])

    def add(self, request_id: str, prompt: list[int], *, client: int = 0, **sampling: Any) -> None:
        self.send(b"\x00", pack(request(request_id, prompt, client=client, **sampling)), client=client)

    def abort(self, *request_ids: str, client: int = 0) -> None:
        self.send(b"\x01", pack(request_ids), client=client)

    def call_nowait(self, method: str, *args: Any, client: int = 0) -> int:
        self._calls += 1
        self.send(b"\x03", pack([client, self._calls, method, args]), client=client)
        return self._calls

    def receive(self, client: int = 0) -> Any:
        """The next message, decoded; ``DEAD`` for the dead sentinel."""
        (payload,) = receive(self.outputs[client])
        return DEAD if payload == DEAD else unpack(payload)

    def receive_until(self, done: Callable[[Any], bool], client: int = 0) -> list[Any]:
        """All messages up to and including the one that ``done``."""
        messages = []
        while True:
            messages.append(self.receive(client))
            if done(messages[-1]):
                return messages

    def call(self, method: str, *args: Any, client: int = 0) -> tuple[str | None, Any, list[Any]]:
        """Failure text, result, and the outputs that came before the reply."""
        call_id = self.call_nowait(method, *args, client=client)
        *before, reply = self.receive_until(lambda message: bool(message[4]) and message[4][0] == call_id, client)
        _, failure, result = reply[4]
        assert reply[1] == []
        return failure, None if result is None else result[1], [output for message in before for output in message[1]]

    def statistics(self) -> Counter[str]:
        failure, result, _ = self.call("get_engine_statistics")
        assert failure is None
        return Counter(result)

    def collect(self, *request_ids: str, client: int = 0) -> dict[str, list[list[Any]]]:
        """All outputs until each of ``request_ids`` has finished, by request id."""
        collected: dict[str, list[list[Any]]] = {request_id: [] for request_id in request_ids}
        pending = set(request_ids)
        while pending:
            for output in self.receive(client)[1]:
                collected.setdefault(output[0], []).append(output)
                if output[5] is not None:
                    pending.discard(output[0])
        return collected

    def generate(self, request_id: str, prompt: list[int], *, client: int = 0, **sampling: Any) -> list[int]:
        self.add(request_id, prompt, client=client, **sampling)
        return tokens(self.collect(request_id, client=client)[request_id])

    def wait_exit(self) -> int:
        assert self.process is not None
        return self.process.wait(DEADLINE_S)

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    def status_lines(self) -> list[dict[str, Any]]:
        """What the process wrote to its standard output; waits for its end."""
        assert self.process is not None
        assert self.process.stdout is not None
        return [msgspec.json.decode(line) for line in self.process.stdout.read().splitlines()]


def address_of(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def tokens(outputs: list[list[Any]]) -> list[int]:
    return [token for output in outputs for token in output[1]]


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(int(DEADLINE_S * 1000)), "the engine says nothing"
    return socket.recv_multipart()


def assert_gone(pid: int) -> None:
    """Waits for the end of a process that is not our child, and makes sure that it is none in any case."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = select.select([pidfd], [], [], DEADLINE_S)
        if not ready:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert ready, f"process {pid} lives on"
    finally:
        os.close(pidfd)
