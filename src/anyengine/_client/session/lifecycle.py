"""The order in which a session starts and stops.

Owns the one place where a task group is open across a yield: the client's own context manager. Leaving it, in
whatever way, leaves nothing behind: consumers told, processes reaped, sockets closed, ipc files gone, tasks ended, in
that order.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from anyengine._protocol import Life
from anyengine._transport.abc import ClientEndpoints
from anyengine._transport.endpoints import open_endpoints
from anyengine._transport.memory import MemoryEndpoints
from anyengine._transport.monitor import open_monitor
from anyengine.exceptions import ClientClosedError, ClientFailedError, EngineDeadError, EngineStartupError

from .closing import ShutdownReport
from .debugging import leak_error
from .session import Session
from .settings import SessionSettings
from .startup import listeners_for, start_engines

__all__ = ["open_session"]


@asynccontextmanager
async def open_session(
    settings: SessionSettings, life: Life, on_report: Callable[[ShutdownReport], None]
) -> AsyncIterator[Session]:
    """Start the engine and the session's tasks; end all of it when the block ends. ``life`` is told of both, and
    ``on_report`` how it ended.

    Raises:
        EngineStartupError: the engine did not become ready (:class:`StartupTimeout`: in time).
        EngineDeadError: with ``on_death="cancel"``: the block was cancelled because the engine died.

    Cancellation: at any point, start-up included; every process is gone before it propagates.
    """
    error: BaseException | None = None
    interrupted, leak = False, None
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
                        await session.closing.drain()
                except anyio.get_cancelled_exc_class():
                    interrupted = True
                    raise
                except BaseException as exc:  # noqa: BLE001 - raised again below
                    error = exc  # kept outside the group, which would wrap it, and raised below
                finally:
                    await session.closing.stop()  # noqa: ASYNC102 - shielded and bounded inside
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            error = _unwrapped(group)
        finally:
            if session is not None:
                leak = _release(session, on_report)
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
    if settings.strict and leak is not None:
        raise leak


def _listen(settings: SessionSettings) -> ClientEndpoints:
    if settings.in_memory:
        return MemoryEndpoints()
    try:
        return open_endpoints(listeners_for(settings.engines) or "ipc")
    except (anyio.BrokenResourceError, OSError) as exc:
        raise EngineStartupError(f"the client cannot listen for engines: {exc}", stage="listening") from exc


def _release(session: Session, on_report: Callable[[ShutdownReport], None]) -> ClientFailedError | None:
    """Reap and close; the error that names what is left, if anything is. Synchronous: nothing can interrupt it."""
    for engine in session.children:
        engine.child.reap()
    on_report(session.closing.report)
    session.feed.discard()
    for subscription in session.subscriptions:
        subscription.close()
    session.is_released = True
    session.life.closed()
    return leak_error(session)


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
