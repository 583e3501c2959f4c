"""Engine cores in the client's own event loop, whose every wait is AnyIO's: for tests of time, and of many clients."""

from __future__ import annotations

from queue import SimpleQueue

import anyio

from anyengine._process.status import Status
from anyengine._process.task_child import TaskHost
from anyengine._protocol.handshake import EngineHandshake
from anyengine._transport.memory import MemoryLink
from anyengine._wire import dialect_for
from anyengine.config import EmbeddedEngine, InMemoryEngine
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.serving.busy_loop import BusyLoop
from anyengine.engine.serving.io_threads import Command, decode_command, encode_outputs
from anyengine.testing.toy_runner import ToyOptions, ToyRunner

__all__ = ["in_loop"]


def in_loop(*, step_s: float = 0.0, max_num_seqs: int = 256, grace_s: float = 0.0) -> InMemoryEngine:
    """Our engine core with the toy model, a task of the loop. A step takes ``step_s`` of its clock; told to stop, it
    goes on for ``grace_s``."""

    async def serve_core(link: MemoryLink, rank: int, host: TaskHost) -> None:
        socket, handshake = link.connect_handshake(), EngineHandshake()
        socket.send_nowait([handshake.hello()])
        [[init]] = await socket.drain(1)
        handshake.receive_init(init)
        host.report(Status("loading"))
        core = EngineCore(
            ToyRunner(ToyOptions(), seed=0, max_model_len=2048), EmbeddedEngine(max_num_seqs=max_num_seqs), rank=0
        )
        response = core.ready_response()
        dialect = dialect_for(response.vllm_version)
        inputs, outputs = link.connect_inputs(), link.connect_outputs()
        inputs.send_nowait([dialect.encode_ready(response)])
        socket.send_nowait([handshake.ready()])
        host.report(Status("ready"))

        class Sink:
            def send(self, client_index, message, *, method=""):
                outputs.send_nowait(encode_outputs(dialect, message, method))

        asked = anyio.Event()
        host.on_terminate = asked.set
        commands: SimpleQueue[Command] = SimpleQueue()
        loop = BusyLoop(core, commands, Sink(), rank=rank, num_clients=1, has_coordinator=False)

        async def serve() -> None:
            while True:
                messages = inputs.drain_nowait() if core.has_work() else await inputs.drain()
                for frames in messages:
                    commands.put(decode_command(dialect, frames, input_index=0))
                loop._handle_commands(block=False)
                if core.has_work():
                    await anyio.sleep(step_s)
                    loop._deliver(core.step())
                    loop._answer_deferred()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await asked.wait()
            await anyio.sleep(grace_s)
            tasks.cancel_scope.cancel()
        core.abort_all()
        loop._deliver(core.step())

    return InMemoryEngine(serve=serve_core)
