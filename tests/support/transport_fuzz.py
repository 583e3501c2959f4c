"""The interleaving fuzz: what the peer does is injected between any two libzmq calls of the socket under test.

An inproc PAIR with tiny high-water marks, both ends in one thread: nothing happens behind our back, so a run is a
function of its seed. One reader and up to three senders share one socket. A lost wake-up shows as: the peer can do
nothing more, and a parked task stays parked, however often the loop turns. No clock is involved.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import trio
import zmq
from anyio.lowlevel import checkpoint

from anyengine._transport.socket_base import SocketBase
from anyengine._transport.zmq_socket import ZmqSocket

IDLE_ROUNDS = 60  # of up to 8 turns of the loop each, in which nothing moved; a wake-up takes about 3 turns


class Hang(Exception):
    """Nothing moves any more, and not everything has arrived."""


class NaiveSocket(ZmqSocket):
    """Control: takes no second look at EVENTS after a call, and wakes nobody."""

    def _recheck(self) -> None:
        pass

    def _poll(self) -> int:
        return self._events()


class StaleDrySocket(ZmqSocket):
    """Control: looks and wakes, but forgets that reading EVENTS makes an older "nothing there" void."""

    def _poll(self) -> int:
        dry = self._dry
        ready = super()._poll()
        self._dry = dry
        return ready


class Intruder:
    """Stands before the real socket and lets the peer act around every call."""

    def __init__(self, socket: zmq.Socket[bytes], act: Callable[[], None], processes: Callable[[], bool]) -> None:
        self._socket = socket
        self._act = act
        self._processes = processes

    def _around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._act()
        try:
            return call(*args, **kwargs)
        finally:
            self._act()

    def recv(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._socket.recv, *args, **kwargs)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        if self._processes():
            # send() processes commands only if the last time was over 3e6 TSC ticks (1 ms) ago. Reading EVENTS does the
            # same without the wait, and without the clock.
            self._socket.get(zmq.EVENTS)
        return self._around(self._socket.send, *args, **kwargs)

    def get(self, option: int) -> Any:
        return self._around(self._socket.get, option)

    def close(self, linger: int) -> None:
        self._socket.close(linger)


class Peer:
    """The other end: sends ``total`` numbered messages and reads what comes, one step at a time."""

    def __init__(self, socket: zmq.Socket[bytes], total: int) -> None:
        self._socket = socket
        self.total = total
        self.sent = 0
        self.got = 0
        self.may_read: Callable[[], bool] = lambda: True

    def send(self) -> bool:
        if self.sent == self.total:
            return False
        try:
            self._socket.send(b"%d" % self.sent, zmq.DONTWAIT | zmq.SNDMORE)
        except zmq.Again:
            return False
        self._socket.send(b"", zmq.DONTWAIT)
        self.sent += 1
        return True

    def receive(self) -> bool:
        if not self.may_read():
            return False
        try:
            self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return False
        self.got += 1
        return True


class Run:
    """One interleaving, chosen by ``seed``."""

    def __init__(self, socket_type: type[ZmqSocket], seed: int) -> None:
        self._random = random.Random(seed)
        # trio shuffles its run queue; Hypothesis' own integration fixes it in the same way.
        vars(trio._core._run)["_ALLOW_DETERMINISTIC_SCHEDULING"] = True
        trio._core._run._r.seed(seed)
        # Few messages: no later traffic comes to the rescue of a lost wake-up.
        self._total = self._random.choice((1, 2, 3, 5, 12, 40))
        self._context = zmq.Context()
        high_water_mark = self._random.choice((1, 1, 2, 3, 10))
        ends = [self._context.socket(zmq.PAIR) for _ in range(2)]
        for end in ends:
            end.set(zmq.LINGER, 0)
            end.set(zmq.SNDHWM, high_water_mark)
            end.set(zmq.RCVHWM, high_water_mark)
        ends[0].bind("inproc://fuzz")
        ends[1].connect("inproc://fuzz")
        self._peer_end = ends[1]
        self._peer = Peer(ends[1], self._total)
        self._socket = socket_type(ends[0])
        act_probability = self._random.choice((0.05, 0.3, 0.7))
        if self._random.random() < 0.5:  # a stingy peer reads only when all its own messages were taken
            self._peer.may_read = lambda: self._got >= self._peer.sent
        self._got = self._sent = 0
        self._to_send = self._total
        self._scopes: list[anyio.CancelScope] = []

        def act() -> None:
            if self._random.random() < act_probability:
                self._step()

        self._socket._socket = Intruder(ends[0], act, lambda: self._random.random() < 0.3)  # type: ignore[assignment]

    def _step(self) -> bool:
        return self._random.choice((self._peer.send, self._peer.receive))()

    async def _read(self) -> None:
        while self._got < self._total:
            for number, empty in await self._socket.drain(self._random.choice((1, 2, 5, 100))):
                assert (int(number), empty) == (self._got, b"")
                self._got += 1
            if self._random.random() < 0.3:
                await checkpoint()

    async def _write(self) -> None:
        while self._to_send:
            self._to_send -= 1
            scope = anyio.CancelScope()
            if self._random.random() < 0.1:  # may be cancelled while parked: the watch must be passed on
                self._scopes.append(scope)
            with scope:
                await self._socket.send([b"h", b"t"])
                self._sent += 1
            with suppress(ValueError):
                self._scopes.remove(scope)
            if scope.cancelled_caught:
                self._to_send += 1
            if self._random.random() < 0.3:
                await checkpoint()

    async def _drive(self) -> None:
        idle = 0
        before: tuple[int, ...] = ()
        while self._got < self._total or self._peer.got < self._total:
            for _ in range(self._random.choice((1, 3, 8))):
                await checkpoint()
            moved = False
            for _ in range(self._random.choice((1, 1, 4))):
                moved = self._step() or moved
            if self._scopes and self._random.random() < 0.2:
                self._scopes.pop(self._random.randrange(len(self._scopes))).cancel()
                moved = True
            state = (self._got, self._sent, self._peer.sent, self._peer.got)
            idle = 0 if moved or state != before else idle + 1
            before = state
            if idle > IDLE_ROUNDS:
                raise Hang(f"received, sent, peer sent, peer received: {state} of {self._total}")

    async def __call__(self) -> SocketBase:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._read)
                for _ in range(self._random.choice((1, 2, 3))):
                    tasks.start_soon(self._write)
                await self._drive()
            assert self._sent == self._total
        finally:
            self._socket.close()
            self._peer_end.close(0)
            self._context.term()
        return self._socket


async def hangs(socket_type: type[ZmqSocket], seed: int) -> bool:
    """Whether this interleaving hangs."""
    try:
        await Run(socket_type, seed)()
    except BaseExceptionGroup as group:
        if group.split(Hang)[1] is not None:
            raise
        return True
    return False
