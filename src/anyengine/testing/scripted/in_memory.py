"""A scripted engine in memory: performs what :class:`~.core.ScriptedCore` says, in a task of the client.

Owns the waiting. Decides nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import anyio
import anyio.lowlevel

from anyengine._process.status import ChildError, Status
from anyengine._process.task_child import TaskExit, TaskHost
from anyengine._transport.memory import MemoryDealer, MemoryLink, MemoryPush

from .core import Acquire, Action, Close, Connect, Ended, Hang, Log, Report, ScriptedCore, Send, Serve, Sleep
from .records import Record
from .resources import take_resources
from .script import Script

__all__ = ["serve_in_memory"]


async def serve_in_memory(
    script: Script, link: MemoryLink, rank: int, host: TaskHost, log: Callable[[Record], None]
) -> None:
    """Run an engine to its end.

    Raises:
        TaskExit: how it ended.

    Cancellation: as SIGKILL.
    """
    with ExitStack() as resources:
        await _MemoryEngine(script, link, rank, host, resources, log).run()


class _MemoryEngine:
    def __init__(
        self,
        script: Script,
        link: MemoryLink,
        rank: int,
        host: TaskHost,
        resources: ExitStack,
        log: Callable[[Record], None],
    ) -> None:
        self._script = script
        self._link = link
        self._host = host
        self._resources = resources
        self._core = ScriptedCore(script, rank, log=log)
        self._waiting = anyio.CancelScope()
        self._handshake: MemoryDealer | None = None
        self._inputs: MemoryDealer | None = None
        self._outputs: MemoryPush | None = None
        self._unread: deque[list[bytes]] = deque()

    async def run(self) -> None:
        self._host.on_terminate = lambda: self._waiting.cancel()
        await self._perform(self._core.start(anyio.current_time()))
        assert self._handshake is not None
        while self._inputs is None:
            for frames in await self._next_batch(self._handshake):
                await self._perform(self._core.receive("handshake", frames, anyio.current_time()))
        while True:
            await self._turn()

    async def _turn(self) -> None:
        core = self._core
        if self._host.terminated:
            await self._perform(core.terminate(anyio.current_time()))
        if core.deadline_s() <= anyio.current_time():
            await self._perform(core.wake(anyio.current_time()))
        if self._inputs is not None and core.reads_after_s() != math.inf and not self._unread:
            self._unread += await self._next_batch(self._inputs)
        else:
            await self._next_batch(None)
        while self._unread and core.reads_after_s() <= anyio.current_time():
            await self._perform(core.receive("input", self._unread.popleft(), anyio.current_time()))

    async def _next_batch(self, source: MemoryDealer | None) -> Sequence[list[bytes]]:
        """What comes next, if it comes before something else is to be done."""
        until_s = self._core.deadline_s()
        if self._unread:
            until_s = min(until_s, self._core.reads_after_s())
        if self._host.terminated and self._inputs is None and not self._script.ignore_sigterm:
            raise TaskExit(signal="SIGTERM")
        if until_s <= anyio.current_time():
            await anyio.lowlevel.checkpoint()
            return _bytes(source.drain_nowait()) if source is not None else []
        with self._interruptible(until_s):
            if source is None:
                await anyio.sleep_forever()
            else:
                return _bytes(await source.drain())
        return []

    def _interruptible(self, until_s: float) -> anyio.CancelScope:
        """For one wait: ends at ``until_s``, or at SIGTERM."""
        self._waiting = anyio.CancelScope(deadline=until_s)
        return self._waiting

    # --------------------------------------------------------------------------------------------- the actions

    async def _perform(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Send("output", payload):
                    assert self._outputs is not None
                    self._outputs.send_nowait([payload])
                case Send(name, payload):
                    socket = self._handshake if name == "handshake" else self._inputs
                    assert socket is not None
                    socket.send_nowait([payload])
                case Acquire():
                    self._resources.enter_context(take_resources(self._script))
                case Connect(name, _):
                    self._connect(name)
                case Close(name):
                    self._close(name)
                case Report(stage, error):
                    self._host.report(Status(stage, error=None if error is None else ChildError(*error)))
                case Log(text):
                    self._host.log(text)
                case Sleep(seconds):
                    await self._sleep(seconds)
                case Serve():
                    pass  # a task has no signals
                case Hang():
                    await self._hang()
                case Ended(exit_code, signal):
                    raise TaskExit(exit_code, signal)

    def _connect(self, name: str) -> None:
        if name == "handshake":
            self._handshake = self._link.connect_handshake()
        elif name == "input":
            self._inputs = self._link.connect_inputs()
        else:
            self._outputs = self._link.connect_outputs()

    def _close(self, name: str) -> None:
        socket = self._inputs if name == "input" else self._outputs
        assert socket is not None
        socket.close()

    async def _sleep(self, seconds: float) -> None:
        if self._inputs is not None:  # a step is not interrupted
            await anyio.sleep(seconds)
            return
        with self._interruptible(anyio.current_time() + seconds) as waiting:
            if self._host.terminated:
                waiting.cancel()
            await anyio.sleep(seconds)
        if self._host.terminated:
            await self._obey(seconds)

    async def _obey(self, seconds: float) -> None:
        """SIGTERM before it serves ends it at once, or not at all."""
        if not self._script.ignore_sigterm:
            raise TaskExit(signal="SIGTERM")
        await anyio.sleep(seconds)

    async def _hang(self) -> None:
        if not self._host.terminated or self._script.ignore_sigterm:
            with self._interruptible(math.inf):
                await anyio.sleep_forever()
        await self._obey(math.inf)


def _bytes(messages: Sequence[Sequence[bytes | memoryview]]) -> list[list[bytes]]:
    return [[bytes(part) for part in parts] for parts in messages]
