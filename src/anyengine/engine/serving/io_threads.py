"""The two threads between an engine's sockets and its busy loop.

Owns the input sockets (one DEALER for each client, in the input thread) and the output sockets (one PUSH for each
client, in the output thread): a socket is created, used and closed by one thread. Knows the wire, and nothing of
engines. Unlike vLLM's threads, neither can be killed by a message: what cannot be decoded goes to the busy loop as
:class:`Malformed`, what cannot be encoded becomes a failure reply. The input thread also notices when front ends
leave, where it is asked to. Mirrors ``EngineCoreProc.process_input_sockets`` and ``process_output_sockets`` of vLLM
0.32/0.33.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import ClassVar, Final

import zmq

from anyengine._wire import (
    COORDINATOR_READY,
    ENGINE_CORE_DEAD,
    SUBSCRIBE,
    Dialect,
    EngineCoreOutputs,
    EngineInput,
    Frame,
    UtilityOutput,
)
from anyengine.engine.serving.connections import ConnectionMonitor, connect
from anyengine.engine.serving.front_ends import FrontEndsGone, FrontEndWatch
from anyengine.engine.serving.malformed import Malformed, salvage
from anyengine.exceptions import DecodeError, EncodeError

__all__ = [
    "COORDINATOR",
    "Command",
    "InputThread",
    "OutputThread",
    "StopEngine",
    "ThreadFailed",
    "decode_command",
    "encode_outputs",
    "utility_failure",
]

_logger = logging.getLogger(__name__)

COORDINATOR: Final = -1
"""The index of the coordinator among clients, as vLLM's: the last output socket."""


def utility_failure(call_id: int, method: str, reason: str) -> UtilityOutput:
    """A failure reply, in vLLM's words."""
    return UtilityOutput(call_id, f"Call to {method} method failed: {reason}", None)


@dataclass(slots=True, frozen=True)
class StopEngine:
    """Stop gracefully (SIGTERM, or the host is gone)."""


@dataclass(slots=True, frozen=True)
class ThreadFailed:
    """An input or output thread ended by a bug of ours: fatal for the engine."""

    error: BaseException


Command = EngineInput | Malformed | StopEngine | FrontEndsGone | ThreadFailed


def decode_command(dialect: Dialect, frames: Sequence[Frame], *, input_index: int) -> Command:
    """What a client said, or what is left of it; ``input_index``: the socket that it came from."""
    try:
        return dialect.decode_input(frames)
    except DecodeError as exc:
        return salvage(frames, str(exc), input_index=input_index)


def encode_outputs(dialect: Dialect, outputs: EngineCoreOutputs, method: str) -> list[Frame]:
    """The frames of an engine message; of a failure reply, if the result of ``method`` cannot be encoded.

    Raises:
        EncodeError: outputs of requests cannot be encoded: a bug of ours.
    """
    try:
        return dialect.encode_outputs(outputs)
    except EncodeError as exc:
        call = outputs.utility_output
        if call is None:
            raise
        _logger.error("the result of utility call %s cannot be encoded: %s", method, exc)
        failure = utility_failure(call.call_id, method, f"its result cannot be encoded: {exc}")
        return dialect.encode_outputs(EngineCoreOutputs(outputs.engine_index, utility_output=failure))


class _SocketThread(ABC):
    """One socket for each address, created, used and closed in one thread."""

    name: ClassVar[str]
    socket_type: ClassVar[int]
    linger_ms: int

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[str], commands: SimpleQueue[Command]
    ) -> None:
        self._context = context
        self._addresses = addresses
        self._commands = commands
        self._monitors: list[ConnectionMonitor] = []
        self._connected: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=self.name)

    def start(self) -> None:
        """Returns when all sockets have been connected.

        Raises:
            zmq.ZMQError: an address makes no sense. The thread has ended.
        """
        self._thread.start()
        self._connected.result()

    def _run(self) -> None:
        sockets: list[zmq.Socket[bytes]] = []
        try:
            for address in self._addresses:
                sockets.append(socket := self._context.socket(self.socket_type))
                self._configure(socket)
                connect(socket, address)
            self._connected.set_result(None)
            self._work(sockets)
        except BaseException as exc:  # noqa: BLE001 - whatever it is, the main thread has to know
            if self._connected.done():
                self._commands.put(ThreadFailed(exc))
            else:
                self._connected.set_exception(exc)
        finally:
            for monitor in self._monitors:
                monitor.close()
            for socket in sockets:
                socket.close(linger=self.linger_ms)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        socket.set_hwm(0)

    @abstractmethod
    def _work(self, sockets: list[zmq.Socket[bytes]]) -> None:
        """Until the thread is told to stop."""


class InputThread(_SocketThread):
    """Registers with every client, then turns messages into commands, in order of arrival."""

    name = "engine-input"
    socket_type: ClassVar[int] = zmq.DEALER
    linger_ms: int = 0

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        commands: SimpleQueue[Command],
        *,
        dialect: Dialect,
        identity: bytes,
        registration: bytes,
        watch: FrontEndWatch | None = None,
        coordinator: str | None = None,
    ) -> None:
        super().__init__(context, addresses, commands)
        self._coordinator = coordinator
        self._coordinator_ready: Future[None] = Future()
        self._watch = watch
        self._dialect = dialect
        self._identity = identity
        self._registration = registration
        self._wake_reader, self._wake_writer = os.pipe()

    def wait_for_coordinator(self, timeout_s: float) -> None:
        """Until the coordinator has all its engines: waves that it starts from now on reach us.

        Raises:
            TimeoutError: it has not.
        """
        if self._coordinator is not None:
            self._coordinator_ready.result(timeout_s)

    def stop(self) -> None:
        """End the thread. Messages that have not been read are dropped."""
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        super()._configure(socket)
        socket.setsockopt(zmq.IDENTITY, self._identity)
        if self._watch is not None:
            self._monitors.append(ConnectionMonitor(socket))

    def _work(self, sockets: list[zmq.Socket[bytes]]) -> None:
        if self._coordinator is None:
            self._read(sockets, None)
            return
        with self._context.socket(zmq.XSUB) as coordinator:
            connect(coordinator, self._coordinator)
            coordinator.linger = 0
            coordinator.send(SUBSCRIBE)
            self._read(sockets, coordinator)

    def _read(self, sockets: list[zmq.Socket[bytes]], coordinator: zmq.Socket[bytes] | None) -> None:
        poller = zmq.Poller()
        if coordinator is not None:
            poller.register(coordinator, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        for monitor in self._monitors:
            poller.register(monitor.socket, zmq.POLLIN)
        for socket in sockets:
            socket.send(self._registration)
            poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._poll_timeout_ms()))
            if self._wake_reader in ready:
                return
            for index, socket in enumerate(sockets):
                if socket in ready:
                    command = decode_command(self._dialect, socket.recv_multipart(), input_index=index)
                    self._commands.put(command)
            if coordinator is not None and coordinator in ready:
                self._hear_coordinator(coordinator.recv_multipart())
            if self._watch is not None:
                self._note_connections(self._watch, [m.socket in ready for m in self._monitors])

    def _hear_coordinator(self, frames: list[bytes]) -> None:
        """READY comes again with each engine that is added later."""
        if frames != [COORDINATOR_READY]:
            self._commands.put(decode_command(self._dialect, frames, input_index=COORDINATOR))
        elif not self._coordinator_ready.done():
            self._coordinator_ready.set_result(None)

    def _poll_timeout_ms(self) -> int | None:
        timeout_s = self._watch.timeout_s(time.monotonic()) if self._watch is not None else None
        return None if timeout_s is None else math.ceil(timeout_s * 1000)

    def _note_connections(self, watch: FrontEndWatch, readable: Sequence[bool]) -> None:
        now_s = time.monotonic()
        for index, monitor in enumerate(self._monitors):
            for connected in monitor.read() if readable[index] else ():
                if connected:
                    watch.connected(index)
                else:
                    watch.disconnected(index, now_s)
        if gone := watch.expire(now_s):
            self._commands.put(gone)


class OutputThread(_SocketThread):
    """Encodes and sends, in the order of :meth:`send`. No client can block it: its sockets have no high-water mark."""

    name = "engine-output"
    socket_type: ClassVar[int] = zmq.PUSH
    linger_ms: int = 4000  # as vLLM: long enough for the last outputs, short enough for a supervisor's grace period

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        commands: SimpleQueue[Command],
        *,
        dialect: Dialect,
        coordinator: str | None = None,
    ) -> None:
        super().__init__(context, [*addresses, coordinator] if coordinator is not None else addresses, commands)
        self._num_clients = len(addresses)
        self._dialect = dialect
        self._queue: SimpleQueue[tuple[int, EngineCoreOutputs, str] | bytes | None] = SimpleQueue()

    def send(self, client_index: int, outputs: EngineCoreOutputs, *, method: str = "") -> None:
        """``method``: the utility that this is the reply of."""
        self._queue.put((client_index, outputs, method))

    def send_dead(self) -> None:
        """ENGINE_CORE_DEAD on every socket, as its last frame: nothing may be sent afterwards."""
        self._queue.put(ENGINE_CORE_DEAD)

    def stop(self, *, nobody_listens: bool = False) -> None:
        """Send what is queued, and end the thread. Where nobody listens, nothing is waited for."""
        if nobody_listens:
            self.linger_ms = 0
        self._queue.put(None)
        self._thread.join()

    def _work(self, sockets: list[zmq.Socket[bytes]]) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, bytes):
                for socket in sockets[: self._num_clients]:
                    socket.send(item)
            else:
                client_index, outputs, method = item
                sockets[client_index].send_multipart(encode_outputs(self._dialect, outputs, method), copy=False)
