"""From nothing to engines that take requests: processes started, handshakes served, dialects settled.

Owns the order of a start and what its failures become. Whoever calls it stops what it has started.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import anyio
import msgspec

from anyengine._client.engines.engine_limits import learn_limits
from anyengine._process.attached import AttachedRank
from anyengine._process.launch import launch_engine
from anyengine._process.status import Status
from anyengine._process.supervisor import Child, SupervisedEngine
from anyengine._process.task_child import TaskChild, TaskHost
from anyengine._protocol import Connection, FrontendHandshake, merge_registrations
from anyengine._transport.abc import MessageSocket, PeerUnreachable
from anyengine._transport.endpoints import Listeners, beside
from anyengine._transport.memory import MemoryEndpoints, MemoryLink
from anyengine._wire import EngineAddresses, engine_identity, newer_than_known, rank_of
from anyengine.config import (
    AttachedEngine,
    CommandEngine,
    EngineSettings,
    InheritedEngine,
    InMemoryEngine,
    LaunchedEngine,
    RemoteEngine,
    RunningEngine,
    VLLMEngine,
)
from anyengine.exceptions import EngineError, EngineStartupError, RemoteProtocolError

if TYPE_CHECKING:
    from .session import Session

__all__ = ["listeners_for", "refuse_waves", "settle_dialects", "start_engine", "start_engines"]

_logger = logging.getLogger("anyengine.client")

_PROBE_LIMIT_S = 30.0  # an engine that has just become ready has nothing else to do


def listeners_for(engines: tuple[EngineSettings, ...]) -> Listeners | None:
    """Where the client listens for ``engines``; ``None``: in a place of its own."""
    match engines[0]:
        case RemoteEngine() as engine:
            listeners = beside(
                engine.handshake, inputs=engine.inputs, outputs=engine.outputs, advertise_host=engine.advertised_host
            )
        case RunningEngine() as engine:
            listeners = Listeners(engine.inputs, engine.outputs)
        case InheritedEngine() as engine:
            return Listeners(engine.input_fd, engine.output_fd)
        case _:
            return None
    if exposed := listeners.exposed:
        _logger.warning(
            "listening on a network, where nothing is encrypted and anybody may connect: %s; loopback (127.0.0.1), an "
            "ipc:// address or a trusted network behind a firewall is safe",
            ", ".join(exposed),
        )
    return listeners


async def start_engines(session: Session) -> None:
    """Start or await every engine of the session, until all of them take requests.

    Raises:
        EngineStartupError: one could not be started, or did not become ready (:class:`StartupTimeout`: in time).
        EngineDeadError: one died right behind its handshake.

    Cancellation: at any point; what was started is the session's, which stops it.
    """
    unheard: list[int] = []
    with anyio.move_on_after(session.settings.startup_timeout_s) as deadline:
        handshake = _take_over_engines(session)
        if (failure := await _shake_hands(session, handshake)) is not None:
            raise failure
        session.registrations = handshake.registrations
        session.merged_registration, warning = merge_registrations(session.registrations.values())
        if warning is not None:
            _logger.warning("%s", warning)
        refuse_waves(session)
        prefix = int.from_bytes(os.urandom(4)) >> 1
        session.connection = Connection(handshake.dialects, call_id_prefix=prefix, on_mode=session.life.confirmed)
        session.connection.requests.on_idle = session.note_idle
        await session.tasks.start(session.own, session.drain_outputs)
        if isinstance(session.settings.engines[0], RunningEngine):
            unheard += session.ranks
            while unheard:
                await session.liveness.wait_answering(unheard[0])
                del unheard[0]
        _be_ready(session)
        await settle_dialects(session, session.ranks)
        await learn_limits(session, session.ranks)
    if session.cause is not None:
        raise session.cause.for_waiter()
    if deadline.cancelled_caught:
        raise _too_late(session, handshake.pending or unheard)


def _be_ready(session: Session) -> None:
    if session.cause is None:
        session.life.started()
    # It died between READY and here, when it was still taken for a start-up failure; or one of its threads did.
    for engine in session.children:
        if engine.child.exited.is_set():
            session.burials.bury(engine.rank)
    session.liveness.investigate()
    for rank in session.ranks:
        session.liveness.watch(rank)


# ------------------------------------------------------------------------------ who is expected


def _take_over_engines(session: Session) -> FrontendHandshake:
    """Start what is ours to start, note what is not; the handshake to be served."""
    first = session.settings.engines[0]
    endpoints = session.endpoints
    if isinstance(first, AttachedEngine):
        where = endpoints.handshake_address or endpoints.input_address
        for rank in session.ranks:
            session.engines[rank] = AttachedRank(rank, where)
        _tell_listening(session, where)
    else:
        for rank in session.ranks:
            start_engine(session, rank)
    handshake = FrontendHandshake(
        session.ranks,
        EngineAddresses(inputs=[endpoints.input_address], outputs=[endpoints.output_address]),
        expect_local=not isinstance(first, AttachedEngine),
        answered_elsewhere=endpoints.handshake is None,
    )
    if isinstance(first, RunningEngine):
        _register_again(handshake, first.registrations)
    return handshake


def _tell_listening(session: Session, where: str) -> None:
    """Say where engines are expected: whoever starts them may need a port that the system has chosen."""
    _logger.info("listening at %s for %d engines that someone else starts", where, len(session.ranks))
    if (on_progress := session.settings.on_progress) is not None:
        try:
            on_progress(Status("listening", detail=where))
        except Exception:
            # Rule 5: a user's callback fails alone.
            _logger.exception("the on_progress callback failed; the client goes on listening at %s", where)


def start_engine(session: Session, rank: int) -> None:
    """Start the engine of ``rank``, which is the session's from then on. Synchronous."""
    engine = session.settings.engine_of(rank)
    assert not isinstance(engine, AttachedEngine)
    child: Child
    if session.settings.in_memory:
        child = _task_child(session, rank, engine)
    else:
        assert not isinstance(engine, InMemoryEngine)
        assert session.endpoints.handshake_address is not None
        try:
            child = launch_engine(engine, handshake_address=session.endpoints.handshake_address, rank=rank)
        except OSError as exc:
            raise _not_started(engine, rank, exc) from exc
    try:
        supervised = SupervisedEngine(rank, child, session.settings.on_progress)
    except BaseException:
        # on_progress has been called, and may raise KeyboardInterrupt; nobody else knows the child yet.
        child.reap()
        raise
    session.take_over(supervised)


def _not_started(engine: LaunchedEngine, rank: int, exc: OSError) -> EngineStartupError:
    """There is no process: the program is not there, or the system has no room for one."""
    remedy = "the system has no room for a process"
    if isinstance(exc, FileNotFoundError | PermissionError):
        remedy = {
            VLLMEngine: "python must name the interpreter of an environment with vLLM",
            CommandEngine: "argv must begin with a program that can be run",
        }.get(type(engine), "sys.executable must name the interpreter")
    return EngineStartupError(f"engine {rank} cannot be started: {exc}: {remedy}", rank=rank, stage="spawned")


def _task_child(session: Session, rank: int, engine: LaunchedEngine | InMemoryEngine) -> TaskChild:
    endpoints = session.endpoints
    assert isinstance(endpoints, MemoryEndpoints)
    run: Callable[[MemoryLink, int, TaskHost], Awaitable[None]]
    if isinstance(engine, InMemoryEngine):
        run = engine.serve
    else:
        # Found by name, as `python -m anyengine.engine` finds its process: the client does not import engines.
        run = partial(import_module("anyengine.engine.in_process").serve_in_thread, engine)

    async def serve(host: TaskHost) -> None:
        with MemoryLink(endpoints, engine_identity(rank)) as link:
            await run(link, rank, host)

    return TaskChild(serve)


def _register_again(handshake: FrontendHandshake, registrations: Mapping[int, Mapping[str, object] | None]) -> None:
    for rank, registration in registrations.items():
        frame = b"" if registration is None else msgspec.msgpack.encode(dict(registration))
        handshake.receive_registration(engine_identity(rank), frame)


def refuse_waves(session: Session) -> None:
    """Ranks of a mixture-of-experts model step together; without somebody who starts their waves, requests would wait
    for ever. Dense ranks say 1 here, however many there are.

    Raises:
        EngineStartupError: an engine is such a rank.
    """
    for rank, ready in session.registrations.items():
        if ready is not None and (ready.data_parallel_size or 1) > 1:
            raise EngineStartupError(
                f"engine {rank} is one of {ready.data_parallel_size} that step together (data_parallel_size, with a "
                "mixture-of-experts model), which this client does not coordinate: use one rank, or a dense model",
                rank=rank,
                stage="ready",
            )


# ------------------------------------------------------------------------------- the handshake


async def _shake_hands(session: Session, handshake: FrontendHandshake) -> EngineError | None:
    """Serve the handshake sockets until every rank is complete; the reason if that cannot be any more."""
    failure: EngineError | None = None

    def settle(reason: EngineError | None) -> None:
        nonlocal failure
        failure = failure or reason
        race.cancel_scope.cancel()

    async def serve(socket: MessageSocket, *, registration: bool) -> None:
        while True:
            for identity, payload, *_ in await socket.drain():
                try:
                    if registration:
                        handshake.receive_registration(identity, payload)
                    elif reply := handshake.receive_handshake(identity, payload):
                        with suppress(PeerUnreachable):  # gone already: its exit, or the deadline, tells more
                            socket.send_nowait([identity, reply])
                except RemoteProtocolError as exc:
                    return settle(_speaker(session, bytes(identity)).handshake_error(exc))
                _note_stages(session, handshake)
                if not handshake.pending:
                    return settle(None)

    async def await_exit(engine: SupervisedEngine) -> None:
        await session.wait_unwatched(engine)
        settle(engine.startup_error() if session.cause is None else session.cause.for_waiter())

    if not handshake.pending:
        return None
    try:
        async with anyio.create_task_group() as race:
            if session.endpoints.handshake is not None:
                race.start_soon(lambda socket: serve(socket, registration=False), session.endpoints.handshake)
            race.start_soon(lambda: serve(session.endpoints.inputs, registration=True))
            for engine in session.children:
                race.start_soon(await_exit, engine)
    finally:
        if handshake.strangers:
            _logger.warning("left alone %d messages of peers that are no engines", handshake.strangers)
    return failure


def _speaker(session: Session, identity: bytes) -> SupervisedEngine | AttachedRank:
    """The engine that said it, or, if its rank is none that is expected, the first one."""
    return session.engines.get(rank_of(identity), session.engines[session.ranks[0]])


def _note_stages(session: Session, handshake: FrontendHandshake) -> None:
    for rank, engine in session.engines.items():
        if isinstance(engine, AttachedRank):
            engine.stage = handshake.stage(rank).value


def _too_late(session: Session, late: Sequence[int]) -> EngineError:
    others = f" ({len(late)} of {len(session.ranks)} are not: {', '.join(map(str, late))})" if session.ranks[1:] else ""
    if not late:
        others = " (it has said that it is ready, and does not answer)"
    first = late[0] if late else session.ranks[0]
    error = session.engines[first].startup_timeout(session.settings.startup_timeout_s, others)
    error.stage_seconds_by_rank = {rank: engine.stage_seconds for rank, engine in session.engines.items()}
    return error


# -------------------------------------------------------------------------------- the dialects


async def settle_dialects(session: Session, ranks: Iterable[int]) -> None:
    """Ask those of ``ranks`` whose release their registration leaves open; warn of those that are newer than we know.

    Raises:
        StartupTimeout: one does not answer.
        EngineDeadError: the session has ended.

    Cancellation: the call is forgotten.
    """
    connection = session.connection
    for rank in ranks:
        ready = session.registrations[rank]
        if (warning := newer_than_known(ready)) is not None:
            _logger.warning("engine %d: %s", rank, warning)
        if (method := connection.dialects[rank].probe) is None or session.is_lost(rank):
            continue
        answered = anyio.Event()
        call, frames = connection.utility(method, (), rank, answered.set)
        try:
            session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        except PeerUnreachable:
            session.burials.bury(rank, "its input connection is gone")  # which fails the call
        try:
            with anyio.move_on_after(_PROBE_LIMIT_S) as limit:
                await answered.wait()
        finally:
            connection.utilities.forget(call.call_id)
        if limit.cancelled_caught:
            raise session.engines[rank].startup_timeout(_PROBE_LIMIT_S)
        if session.cause is not None:
            raise session.cause.for_waiter()
        if not session.is_lost(rank):
            connection.dialects.probed(rank, found=call.error is None)
