"""The order in which a session starts and stops.

Owns the one place where a task group is open across a yield: the client's own context manager. Leaving it, in
whatever way, leaves nothing behind: consumers told, processes reaped, sockets closed, ipc files gone, tasks ended, in
that order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel

from anyengine._process.supervisor import SupervisedEngine
from anyengine._protocol import Life
from anyengine._transport.abc import ClientEndpoints, PeerUnreachable
from anyengine._transport.endpoints import open_endpoints
from anyengine._transport.memory import MemoryEndpoints
from anyengine._transport.monitor import open_monitor
from anyengine._wire import engine_identity
from anyengine.config import InMemoryEngine
from anyengine.exceptions import ClientClosedError, EngineDeadError, EngineStartupError

from .liveness import PROBE
from .session import Session
from .settings import SessionSettings
from .startup import listeners_for, start_engines

__all__ = ["open_session"]

_NOTICE_S = 1.0  # for our own tasks to notice that they are cancelled; a loop may have ended them unseen
_STARTUP_GRACE_S = 0.5  # an engine that is still loading has nothing to finish


@asynccontextmanager
async def open_session(settings: SessionSettings, life: Life) -> AsyncIterator[Session]:
    """Start the engine and the session's tasks; end all of it when the block ends. ``life`` is told of both.

    Raises:
        EngineStartupError: the engine did not become ready (:class:`StartupTimeout`: in time).
        EngineDeadError: with ``on_death="cancel"``: the block was cancelled because the engine died.

    Cancellation: at any point, start-up included; every process is gone before it propagates.
    """
    error: BaseException | None = None
    interrupted = False
    session: Session | None = None
    with (
        _listen(settings) as endpoints,
        open_monitor(endpoints.inputs) as input_monitor,
        open_monitor(endpoints.outputs) as output_monitor,
    ):
        try:
            async with anyio.create_task_group() as tasks:
                session = Session(settings, endpoints, tasks, life)
                try:
                    watch = session.liveness.watch_connections
                    tasks.start_soon(session.own, watch, "input", input_monitor)  # noqa: ASYNC113 - events queue up
                    tasks.start_soon(session.own, watch, "output", output_monitor)  # noqa: ASYNC113
                    await start_engines(session)
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
    if isinstance(error, ClientClosedError) or interrupted:
        await anyio.lowlevel.checkpoint_if_cancelled()  # if nobody but the host closed it: its cancellation comes first
    if error is not None:
        _annotate(error, session.cause)
        raise error
    if session.body_scope.cancelled_caught or interrupted:
        # Interrupted, and the group took it for its own: somebody cancelled one of its tasks natively. The body was cut
        # short, which must not look like its end.
        assert session.cause is not None
        raise session.cause.for_waiter()


def _listen(settings: SessionSettings) -> ClientEndpoints:
    if isinstance(settings.engines[0], InMemoryEngine):
        return MemoryEndpoints()
    try:
        return open_endpoints(listeners_for(settings.engines) or "ipc")
    except (anyio.BrokenResourceError, OSError) as exc:
        raise EngineStartupError(f"the client cannot listen for engines: {exc}", stage="listening") from exc


async def _stop(session: Session) -> None:
    """Close admission, tell everyone, stop the processes: SIGTERM, grace, SIGKILL; then see off what they started."""
    was_ready = session.is_ready
    grace_s = session.settings.shutdown_grace_s if was_ready else _STARTUP_GRACE_S
    session.close()
    session.life.closing()
    if was_ready and not session.children:
        await _settle_aborts(session, grace_s)
    try:
        if session.restarts.pending:
            with anyio.move_on_after(_NOTICE_S, shield=True):
                await session.restarts.stop()
        engines = session.children
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
        for engine in session.children:  # native cancellation goes through shields, so this does not await
            engine.child.kill()
    with anyio.CancelScope(shield=True):  # bounded by the children's own grace periods; they are killed when reaped
        async with anyio.create_task_group() as farewells:
            for engine in engines:
                farewells.start_soon(_see_off, session, engine)


async def _settle_aborts(session: Session, grace_s: float) -> None:
    """Wait until engines that live on have taken our aborts: closing the sockets drops what is still under way."""
    with anyio.move_on_after(grace_s, shield=True):
        await session.stop_drain()  # it may have been cancelled already: from here on we read
        unsettled = set(session.connection.rota.serving)
        for rank in tuple(unsettled):
            _, frames = session.connection.utility(PROBE, (), rank, partial(unsettled.discard, rank))
            try:
                session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
            except PeerUnreachable:
                unsettled.discard(rank)
        while unsettled:
            session.receive(await session.endpoints.outputs.drain())


async def _see_off(session: Session, engine: SupervisedEngine) -> None:
    await session.wait_unwatched(engine)  # the watch reads the same pipe
    await engine.see_off()


def _release(session: Session) -> None:
    """Reap and close. Synchronous: nothing can interrupt it."""
    for engine in session.children:
        engine.child.reap()
    session.feed.close()
    session.stream.close()
    session.is_released = True
    session.life.closed()


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
