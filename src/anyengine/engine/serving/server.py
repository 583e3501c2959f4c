"""An engine process from HELLO to its end: handshake, model, registration, READY, busy loop, and who hears of the end.

Owns the order of these, the context and the handshake socket. Knows nothing of models. Mirrors
``EngineCoreProc.startup_handshake`` and ``run_engine_core`` of vLLM 0.32/0.33.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import zmq

from anyengine._process.status import Status
from anyengine._protocol.handshake import EngineHandshake
from anyengine._wire import EngineAddresses, dialect_for, engine_identity
from anyengine.engine.interfaces import Engine
from anyengine.engine.serving.busy_loop import BusyLoop
from anyengine.engine.serving.connections import ConnectionMonitor, connect
from anyengine.engine.serving.front_ends import FrontEndWatch
from anyengine.engine.serving.io_threads import Command, InputThread, OutputThread, StopEngine
from anyengine.exceptions import ProtocolError, RemoteProtocolError

__all__ = ["Attachment", "OnFailure", "OnStop", "serve"]

_INIT_TIMEOUT_S = 300  # as vLLM: a client that binds late is waited for
_HANDSHAKE_LINGER_MS = 5000
_NONSENSE_PAUSE_S = 0.2  # a front end that repeats itself must not fill the disk with warnings

OnStop = Callable[[Callable[[], None] | None], None]
"""Is told how to stop gracefully; ``None``: no special way (any more), the process may simply end."""

OnFailure = Callable[[BaseException], None]
"""Is told what ends an engine that was serving, inside its handler and before any client hears of it: who is told
that the engine is dead looks for the cause at once."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True, kw_only=True)
class Attachment:
    """Where an engine finds its front end, and what the two are to each other.

    ``local`` and ``headless`` are what the engine says of itself in the handshake; a front end that did not start it
    wants ``local=False, headless=True``. Then nobody watches the process, so it watches its front ends:
    ``reconnect_grace_s`` is how long one may be away before it counts as gone (``None``: no watch). With ``stay`` an
    engine whose front ends have all gone keeps its model and waits for the next one at the same address.
    """

    handshake_address: str
    rank: int = 0
    local: bool = True
    headless: bool = False
    reconnect_grace_s: float | None = None
    stay: bool = False


def serve(
    attachment: Attachment,
    *,
    create_engine: Callable[[], Engine],
    report: Callable[[Status], None],
    on_stop: OnStop,
    on_failure: OnFailure | None = None,
) -> None:
    """Run an engine from HELLO to its end. Returns after a graceful stop.

    ``on_stop`` is told how to stop gracefully, as soon as that is possible; the callable it gets may be called from
    any thread.

    Raises:
        Exception: whatever the start-up or the engine raised. In the second case every client has been told.
    """
    with zmq.Context() as context, ExitStack() as stack:
        engine: Engine | None = None
        while True:
            nonsense = False
            with context.socket(zmq.DEALER) as socket:
                report(Status("handshake"))
                handshake, addresses = _greet(socket, attachment, patient=engine is not None)
                if engine is None:
                    engine = stack.enter_context(closing(create_engine()))
                announce = partial(_announce, socket, handshake, report)
                try:
                    abandoned = _serve_clients(
                        context,
                        addresses,
                        engine,
                        attachment=attachment,
                        announce=announce,
                        on_stop=on_stop,
                        on_failure=on_failure,
                    )
                except RemoteProtocolError as exc:
                    if not attachment.stay:
                        raise
                    _note_nonsense(attachment, exc)
                    nonsense = abandoned = True
            if nonsense:
                # Behind the end of our connection: a router takes no second one of the same name beside it.
                time.sleep(_NONSENSE_PAUSE_S)
            if not (abandoned and attachment.stay):
                return
            on_stop(None)
            engine.reset()


def _greet(
    socket: zmq.Socket[bytes], attachment: Attachment, *, patient: bool
) -> tuple[EngineHandshake, EngineAddresses]:
    """Say HELLO to whoever is, or comes, at the handshake address, until one answers with INIT."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, engine_identity(attachment.rank))
    monitor = ConnectionMonitor(socket)
    try:
        connect(socket, attachment.handshake_address)
        deadline_s = time.monotonic() + _INIT_TIMEOUT_S
        handshake = EngineHandshake()
        addresses: EngineAddresses | None = None
        while addresses is None:
            if socket.poll(0):
                try:
                    addresses = handshake.receive_init(socket.recv_multipart()[0]).addresses
                except ProtocolError as exc:
                    if not patient:
                        raise
                    _note_nonsense(attachment, exc)
                    time.sleep(_NONSENSE_PAUSE_S)
                continue
            if not patient and time.monotonic() > deadline_s:
                raise TimeoutError(f"no answer to HELLO from {attachment.handshake_address} in {_INIT_TIMEOUT_S} s")
            # HELLO belongs to a connection: a front end that takes the place of another has not heard ours.
            if any(monitor.read()):
                handshake = EngineHandshake(local=attachment.local, headless=attachment.headless)
                socket.send(handshake.hello())
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(monitor.socket, zmq.POLLIN)
            poller.poll(None if patient else 1 + int(1000 * max(0.0, deadline_s - time.monotonic())))
    finally:
        monitor.close()
    return handshake, addresses


def _note_nonsense(attachment: Attachment, trouble: ProtocolError) -> None:
    """An engine that has its model outlives a front end that makes no sense."""
    _logger.warning("what the front end at %s says makes no sense: %s", attachment.handshake_address, trouble)


def _announce(socket: zmq.Socket[bytes], handshake: EngineHandshake, report: Callable[[Status], None]) -> None:
    socket.send(handshake.ready())
    # Kept open, it would try to reconnect for ever once the client has closed its end.
    socket.close(linger=_HANDSHAKE_LINGER_MS)
    report(Status("ready"))


def _serve_clients(
    context: zmq.Context[zmq.Socket[bytes]],
    addresses: EngineAddresses,
    engine: Engine,
    *,
    attachment: Attachment,
    announce: Callable[[], None],
    on_stop: OnStop,
    on_failure: OnFailure | None,
) -> bool:
    """Serve until somebody stops the engine, or (then ``True``) until all clients have gone.

    Raises:
        RemoteProtocolError: an address makes no sense.
        Exception: what the engine raised.
    """
    commands: SimpleQueue[Command] = SimpleQueue()
    registration = engine.ready_response()
    dialect = dialect_for(registration.vllm_version)
    identity, num_clients = engine_identity(attachment.rank), len(addresses.outputs)
    hears, tells = _coordinator(engine, addresses)
    output = OutputThread(context, addresses.outputs, commands, dialect=dialect, coordinator=tells)
    knows_one = addresses.coordinator_input is not None
    loop = BusyLoop(engine, commands, output, rank=attachment.rank, num_clients=num_clients, has_coordinator=knows_one)
    _start(output)
    try:
        input_ = InputThread(
            context,
            addresses.inputs,
            commands,
            dialect=dialect,
            identity=identity,
            registration=dialect.encode_ready(registration),
            watch=_watch(attachment, num_clients),
            coordinator=hears,
        )
        _start(input_)
        try:
            input_.wait_for_coordinator(_INIT_TIMEOUT_S)
            on_stop(lambda: commands.put(StopEngine()))
            announce()
            loop.run()
        except BaseException as exc:
            if on_failure is not None:
                on_failure(exc)
            output.send_dead()
            raise
        finally:
            input_.stop()
        loop.refuse_rest()
        if not attachment.local:
            # Who started us watches our process; nobody else would learn that there is no engine any more.
            output.send_dead()
    finally:
        output.stop(nobody_listens=loop.abandoned)
    return loop.abandoned


def _coordinator(engine: Engine, addresses: EngineAddresses) -> tuple[str | None, str | None]:
    """Where to hear from a coordinator, and where to tell it. An engine that runs by itself does neither."""
    hears, tells = addresses.coordinator_input, addresses.coordinator_output
    if not engine.needs_coordinator:
        return None, None
    if hears is None or tells is None:
        raise RemoteProtocolError("INIT names no coordinator: nobody would start the waves that this engine runs in")
    return hears, tells


def _start(thread: InputThread | OutputThread) -> None:
    try:
        thread.start()
    except zmq.ZMQError as exc:
        thread.stop()
        raise RemoteProtocolError(f"INIT names an address that cannot be used: {exc}") from exc


def _watch(attachment: Attachment, num_clients: int) -> FrontEndWatch | None:
    if attachment.reconnect_grace_s is None:
        return None
    return FrontEndWatch(
        num_clients,
        grace_s=attachment.reconnect_grace_s,
        first_contact_s=_INIT_TIMEOUT_S,
        now_s=time.monotonic(),
    )
