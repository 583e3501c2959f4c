"""An engine process from HELLO to its end: handshake, model, registration, READY, busy loop, and who hears of the end.

Owns the order of these, the context and the handshake socket. Knows nothing of models. Mirrors
``EngineCoreProc.startup_handshake`` and ``run_engine_core`` of vLLM 0.32/0.33.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from queue import SimpleQueue

import zmq

from anyengine._process.status import Status
from anyengine._protocol.handshake import EngineHandshake
from anyengine._wire import EngineAddresses, dialect_for, engine_identity
from anyengine.config import EngineLaunch
from anyengine.engine.interfaces import Engine
from anyengine.engine.serving.busy_loop import BusyLoop
from anyengine.engine.serving.io_threads import Command, InputThread, OutputThread, StopEngine

__all__ = ["serve"]

_INIT_TIMEOUT_S = 300  # as vLLM: a client that binds late is waited for
_HANDSHAKE_LINGER_MS = 5000

_logger = logging.getLogger(__name__)


def serve(
    launch: EngineLaunch,
    *,
    create_engine: Callable[[], Engine],
    report: Callable[[Status], None],
    on_stop: Callable[[Callable[[], None]], None],
) -> None:
    """Run an engine from HELLO to its end. Returns after a graceful stop.

    ``on_stop`` is told how to stop gracefully, as soon as that is possible; the callable it gets may be called from
    any thread.

    Raises:
        Exception: whatever the start-up or the engine raised. In the second case every client has been told.
    """
    handshake = EngineHandshake()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        report(Status("handshake"))
        addresses = _greet(socket, handshake, launch)
        with closing(create_engine()) as engine:

            def announce() -> None:
                socket.send(handshake.ready())
                # Kept open, it would try to reconnect for ever once the client has closed its end.
                socket.close(linger=_HANDSHAKE_LINGER_MS)
                report(Status("ready"))

            _serve_clients(context, addresses, engine, rank=launch.rank, announce=announce, on_stop=on_stop)


def _greet(socket: zmq.Socket[bytes], handshake: EngineHandshake, launch: EngineLaunch) -> EngineAddresses:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, engine_identity(launch.rank))
    socket.connect(launch.handshake_address)
    socket.send(handshake.hello())
    if not socket.poll(_INIT_TIMEOUT_S * 1000):
        raise TimeoutError(f"no answer to HELLO from {launch.handshake_address} in {_INIT_TIMEOUT_S} s")
    addresses = handshake.receive_init(socket.recv()).addresses
    if addresses.coordinator_input is not None:
        _logger.warning("this engine reports to no coordinator; %s is left alone", addresses.coordinator_input)
    return addresses


def _serve_clients(
    context: zmq.Context[zmq.Socket[bytes]],
    addresses: EngineAddresses,
    engine: Engine,
    *,
    rank: int,
    announce: Callable[[], None],
    on_stop: Callable[[Callable[[], None]], None],
) -> None:
    commands: SimpleQueue[Command] = SimpleQueue()
    registration = engine.ready_response()
    dialect = dialect_for(registration.vllm_version)
    output = OutputThread(context, addresses.outputs, commands, dialect=dialect)
    input_ = InputThread(
        context,
        addresses.inputs,
        commands,
        dialect=dialect,
        identity=engine_identity(rank),
        registration=dialect.encode_ready(registration),
    )
    loop = BusyLoop(engine, commands, output, rank=rank, num_clients=len(addresses.outputs))
    output.start()
    try:
        input_.start()
        try:
            on_stop(lambda: commands.put(StopEngine()))
            announce()
            loop.run()
        except BaseException:
            output.send_dead()
            raise
        finally:
            input_.stop()
        loop.refuse_rest()
    finally:
        output.stop()
