"""The embedded engine core in a thread of the client's process: the same engine, busy loop and messages, no sockets.

Owns the thread, and the task that speaks for it in the client's event loop. A thread cannot be killed: asked to stop,
it ends between two steps, or where the loading of the model reports next; whoever leaves waits for that.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue

import anyio

from anyengine._process.status import Status
from anyengine._process.task_child import TaskExit, TaskHost
from anyengine._protocol.handshake import EngineHandshake
from anyengine._transport.abc import SendablePart
from anyengine._transport.mailbox import Mailbox
from anyengine._transport.memory import MemoryLink
from anyengine._wire import ENGINE_CORE_DEAD, Dialect, EngineCoreOutputs, EngineCoreReadyResponse, dialect_for
from anyengine.config import EmbeddedEngine
from anyengine.engine.serving.busy_loop import BusyLoop
from anyengine.engine.serving.io_threads import Command, StopEngine, decode_command, encode_outputs
from anyengine.engine.start import create_core, failure_status

__all__ = ["serve_in_thread"]


async def serve_in_thread(config: EmbeddedEngine, link: MemoryLink, rank: int, host: TaskHost) -> None:
    """Run our engine core behind ``link`` until it is told to stop.

    Raises:
        TaskExit: it has failed, and reported why.

    Cancellation: stops the engine, and waits for its thread.
    """
    host.report(Status("handshake"))
    socket, handshake = link.connect_handshake(), EngineHandshake()
    socket.send_nowait([handshake.hello()])
    [[init, *_]] = await socket.drain(1)
    handshake.receive_init(init)
    thread = _EngineThread(config, rank, link, host, lambda: socket.send_nowait([handshake.ready()]))
    with closing(thread):
        host.on_terminate = thread.stop
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(thread.forward_commands)
                await thread.relay()
                tasks.cancel_scope.cancel()
        finally:
            if not thread.has_ended:
                thread.stop()
                # Not bounded: a thread cannot be killed, and must not be abandoned with the model in its hands. It ends
                # with its present step.
                with anyio.CancelScope(shield=True):
                    await thread.relay()
    if thread.exit_code:
        raise TaskExit(thread.exit_code)


class _EngineThread:
    """The thread and its two queues: commands in, and what the loop shall do for it out. Lifetime: one engine core.

    Its methods belong to the loop; those that begin with ``_in_thread`` run in the thread.
    """

    def __init__(
        self,
        config: EmbeddedEngine,
        rank: int,
        link: MemoryLink,
        host: TaskHost,
        announce: Callable[[], None],
    ) -> None:
        self._config = config
        self._rank = rank
        self._link = link
        self._host = host
        self._announce = announce
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._inputs = link.connect_inputs()
        self._outputs = link.connect_outputs()
        self._dialect: Dialect | None = None
        self._ready = anyio.Event()
        self._stopping = False
        self._reported = False
        self.has_ended: bool = False
        self.exit_code: int = 0
        self._thread = threading.Thread(target=self._in_thread, name=f"anyengine-engine-{rank}")
        self._thread.start()

    async def relay(self) -> None:
        """Do what the thread asks for, until it has ended.

        Cancellation: loses nothing; call it again.
        """
        while not self.has_ended:
            for job in await self._mailbox.take():
                job()

    async def forward_commands(self) -> None:
        """Hand on what the client sends, once the engine is there."""
        await self._ready.wait()
        assert self._dialect is not None
        while True:
            for frames in await self._inputs.drain():
                self._commands.put(decode_command(self._dialect, frames, input_index=0))

    def stop(self) -> None:
        """Ask the engine to stop gracefully: its requests end with ABORT. Idempotent."""
        if not self._stopping:
            self._stopping = True
            self._commands.put(StopEngine())

    def close(self) -> None:
        """Join the thread, which has ended unless somebody cancelled our task natively; then this blocks until it has.
        Idempotent."""
        self.stop()
        self._thread.join()
        self._mailbox.close()

    def _be_ready(self, response: EngineCoreReadyResponse, dialect: Dialect) -> None:
        self._dialect = dialect
        self._inputs.send_nowait([dialect.encode_ready(response)])
        self._announce()
        self._host.report(Status("ready"))
        self._ready.set()

    def _end(self, exit_code: int) -> None:
        self.has_ended, self.exit_code = True, exit_code

    # ------------------------------------------------------------------ in the thread

    def _in_thread(self) -> None:
        exit_code = 1
        try:
            core = create_core(self._config, self._rank, self._in_thread_report)
            with closing(core):
                response = core.ready_response()
                dialect = dialect_for(response.vllm_version)
                self._mailbox.put(partial(self._be_ready, response, dialect))
                loop = BusyLoop(
                    core,
                    self._commands,
                    _Outputs(dialect, self._in_thread_send),
                    rank=self._rank,
                    num_clients=1,
                    has_coordinator=False,
                )
                try:
                    loop.run()
                except BaseException as exc:
                    self._in_thread_fail(exc)  # first: who is told of the death looks for the cause
                    self._in_thread_send([ENGINE_CORE_DEAD])
                    raise
                loop.refuse_rest()
            exit_code = 0
        except _StopLoading:
            exit_code = 0
        except BaseException as exc:  # noqa: BLE001 - whatever ends an engine is reported, as in a process
            self._in_thread_fail(exc)
        finally:
            self._mailbox.put(partial(self._end, exit_code))

    def _in_thread_fail(self, exc: BaseException) -> None:
        """Tell what ends the engine, once. Inside the handler of ``exc``."""
        if not self._reported:
            self._reported = True
            for line in traceback.format_exc().splitlines():
                self._mailbox.put(partial(self._host.log, line))
            self._mailbox.put(partial(self._host.report, failure_status(exc)))

    def _in_thread_report(self, status: Status) -> None:
        """Raises _StopLoading if nobody wants the model any more."""
        if self._stopping:
            raise _StopLoading
        self._mailbox.put(partial(self._host.report, status))

    def _in_thread_send(self, frames: Sequence[SendablePart]) -> None:
        self._mailbox.put(partial(self._outputs.send_nowait, frames))


class _StopLoading(Exception):
    """The client leaves while the model is being loaded."""


class _Outputs:
    """What the busy loop says: encoded in the thread, sent by the loop."""

    def __init__(self, dialect: Dialect, send_frames: Callable[[Sequence[SendablePart]], None]) -> None:
        self._dialect = dialect
        self._send_frames = send_frames

    def send(self, client_index: int, outputs: EngineCoreOutputs, *, method: str = "") -> None:
        """See :class:`~anyengine.engine.serving.busy_loop.Outputs`."""
        self._send_frames(encode_outputs(self._dialect, outputs, method))
