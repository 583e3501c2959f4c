"""The order in which a session starts and stops.

Owns the one place where a task group is open across a yield: the client's own context manager. Leaving it, in
whatever way, leaves nothing behind: consumers told, processes reaped, sockets closed, ipc files gone, tasks ended, in
that order.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from anyengine._process.launch import launch_engine
from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import Connection, FrontendHandshake
from anyengine._transport.abc import MessageSocket, PeerUnreachable
from anyengine._transport.endpoints import open_endpoints
from anyengine._transport.monitor import open_monitor
from anyengine._wire import EngineAddresses, engine_identity, newer_than_known
from anyengine.exceptions import (
    ClientClosedError,
    EngineDeadError,
    EngineError,
    RemoteProtocolError,
)

from .engine_limits import learn_limits
from .session import ClientState, Session, SessionSettings

__all__ = ["open_session"]

_logger = logging.getLogger("anyengine.client")

_PROBE_LIMIT_S = 30.0  # an engine that has just become ready has nothing else to do
_STARTUP_GRACE_S = 0.5  # an engine that is still loading has nothing to finish


@asynccontextmanager
async def open_session(settings: SessionSettings) -> AsyncIterator[Session]:
    """Start the engine and the session's tasks; end all of it when the block ends.

    Raises:
        EngineStartupError: the engine did not become ready (:class:`StartupTimeout`: in time).
        EngineDeadError: with ``on_death="cancel"``: the block was cancelled because the engine died.

    Cancellation: at any point, start-up included; every process is gone before it propagates.
    """
    error: BaseException | None = None
    interrupted = False
    session: Session | None = None
    with (
        open_endpoints() as endpoints,
        open_monitor(endpoints.inputs) as input_monitor,
        open_monitor(endpoints.outputs) as output_monitor,
    ):
        try:
            async with anyio.create_task_group() as tasks:
                session = Session(settings, endpoints, tasks)
                try:
                    tasks.start_soon(session.own, session.watch_connections, "input", input_monitor)  # noqa: ASYNC113 - events queue
                    tasks.start_soon(session.own, session.watch_connections, "output", output_monitor)  # noqa: ASYNC113
                    await _start(session)
                    with session.body_scope:
                        yield session
                except anyio.get_cancelled_exc_class():
                    interrupted = True
                    raise
                except BaseException as exc:  # noqa: BLE001 - raised again below
                    error = exc  # kept outside the group, which would wrap it, and raised below
                finally:
                    await _stop(session)  # noqa: ASYNC102 - shielded and bounded inside
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            error = _unwrapped(group)
        finally:
            if session is not None:
                _release(session)
    assert session is not None
    if error is not None:
        _annotate(error, session.cause)
        raise error
    if session.body_scope.cancelled_caught or interrupted:
        # Interrupted, and the group took it for its own: somebody cancelled one of its tasks natively. The body was cut
        # short, which must not look like its end.
        assert session.cause is not None
        raise session.cause.for_waiter()


async def _start(session: Session) -> None:
    settings, endpoints = session.settings, session.endpoints
    child = launch_engine(settings.engine, handshake_address=endpoints.handshake_address)
    try:
        engine = SupervisedEngine(0, child, settings.on_progress)
    except BaseException:
        # on_progress has been called, and may raise KeyboardInterrupt; nobody else knows the child yet.
        child.reap()
        raise
    session.take_over(engine)
    handshake = FrontendHandshake(
        session.engines, EngineAddresses(inputs=[endpoints.input_address], outputs=[endpoints.output_address])
    )
    failure = await _shake_hands(session, engine, handshake)
    if failure is not None:
        raise failure
    session.registrations = handshake.registrations
    session.connection = Connection(handshake.dialects, call_id_prefix=secrets.randbits(31))
    await session.tasks.start(session.own, session.drain_outputs)
    if session.cause is None:
        session.state = ClientState.READY
    # It died between READY and here, when it was still taken for a start-up failure; or one of its threads did.
    if child.exited.is_set() or session.lost_links:
        symptom = f"its connections are gone: {', '.join(sorted(session.lost_links))}"
        session.tasks.start_soon(session.own, session.bury, engine, symptom)
    await _settle_dialects(session)
    await learn_limits(session)


async def _settle_dialects(session: Session) -> None:
    """Ask the ranks whose release their registration leaves open; warn of those that are newer than we know."""
    connection = session.connection
    for rank, ready in session.registrations.items():
        if (warning := newer_than_known(ready)) is not None:
            _logger.warning("engine %d: %s", rank, warning)
        if (method := connection.dialects[rank].probe) is None:
            continue
        answered = anyio.Event()
        call, frames = connection.utility(method, (), rank, answered.set)
        with suppress(PeerUnreachable):  # it is being buried, which fails the call
            session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        with anyio.move_on_after(_PROBE_LIMIT_S) as limit:
            await answered.wait()
        if limit.cancelled_caught:
            raise session.engines[rank].startup_timeout(_PROBE_LIMIT_S)
        if session.cause is not None:
            raise session.cause.for_waiter()
        connection.dialects.probed(rank, found=call.error is None)


async def _shake_hands(session: Session, engine: SupervisedEngine, handshake: FrontendHandshake) -> EngineError | None:
    """Serve both handshake sockets until every rank is complete; the reason if that cannot be any more."""
    failure: EngineError | None = None
    timeout_s = session.settings.startup_timeout_s

    async def serve(socket: MessageSocket, *, registration: bool) -> None:
        nonlocal failure
        while True:
            for identity, payload, *_ in await socket.drain():
                try:
                    if registration:
                        handshake.receive_registration(identity, payload)
                    elif reply := handshake.receive_handshake(identity, payload):
                        with suppress(PeerUnreachable):  # gone already: its exit, or the deadline, tells more
                            socket.send_nowait([identity, reply])
                except RemoteProtocolError as exc:
                    failure = engine.handshake_error(exc)
                if failure is not None or not handshake.pending:
                    race.cancel_scope.cancel()
                    return

    async def await_exit() -> None:
        nonlocal failure
        await session.wait_unwatched(engine)
        failure = engine.startup_error() if session.cause is None else session.cause.for_waiter()
        race.cancel_scope.cancel()

    with anyio.move_on_after(timeout_s) as deadline:
        async with anyio.create_task_group() as race:
            race.start_soon(lambda: serve(session.endpoints.handshake, registration=False))
            race.start_soon(lambda: serve(session.endpoints.inputs, registration=True))
            race.start_soon(await_exit)
    if deadline.cancelled_caught:
        return engine.startup_timeout(timeout_s)
    return failure


async def _stop(session: Session) -> None:
    """Close admission, tell everyone, stop the processes: SIGTERM, grace, SIGKILL; then see off what they started."""
    grace_s = session.settings.shutdown_grace_s if session.state is ClientState.READY else _STARTUP_GRACE_S
    session.close()
    session.state = ClientState.CLOSING
    engines = list(session.engines.values())
    try:
        # Shielded so that a cancelled block still ends its processes in order; bounded by the grace period.
        with anyio.move_on_after(grace_s, shield=True):
            for engine in engines:
                engine.child.terminate()
            for engine in engines:
                await session.wait_unwatched(engine)
                if not engine.child.exited.is_set():
                    # Its task was cancelled natively (asyncio.run does it to all tasks at its end), which also goes
                    # through shields.
                    await engine.supervise()
    finally:
        for engine in engines:  # native cancellation goes through shields, so this does not await
            engine.child.kill()
    with anyio.CancelScope(shield=True):  # bounded by the children's own grace periods; they are killed when reaped
        async with anyio.create_task_group() as farewells:
            for engine in engines:
                farewells.start_soon(_see_off, session, engine)


async def _see_off(session: Session, engine: SupervisedEngine) -> None:
    await session.wait_unwatched(engine)  # the watch reads the same pipe
    await engine.see_off()


def _release(session: Session) -> None:
    """Reap and close. Synchronous: nothing can interrupt it."""
    for engine in session.engines.values():
        engine.child.reap()
    session.feed.close()
    session.stream.close()
    session.state = ClientState.CLOSED


def _unwrapped(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What left the session's own tasks: KeyboardInterrupt and its like, which may strike in any task."""
    _, serious = group.split(anyio.get_cancelled_exc_class())
    error: BaseException = serious or group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _annotate(error: BaseException, cause: EngineDeadError | None) -> None:
    """Leave a note of a background failure on an error that left the block for a reason of its own."""
    if cause is not None and not isinstance(cause, ClientClosedError) and error.__cause__ is not cause:
        error.add_note(f"meanwhile, in anyengine: {type(cause).__name__}: {cause}")
