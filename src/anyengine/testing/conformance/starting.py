"""Starting (or awaiting) an engine under test, the handshake with it, and its end.

Owns the order of these, the reading tasks and the process. The handshake answers whoever greets, right or wrong, and
writes down what came: whether it was right is for the checks to say. Knows no checks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import anyio
import msgspec
from anyio.abc import TaskGroup

from anyengine._process.launch import launch_engine
from anyengine._process.status import Status
from anyengine._process.supervisor import SupervisedEngine
from anyengine._transport.abc import PeerUnreachable
from anyengine._transport.monitor import PeerMonitor, open_monitor
from anyengine._wire import (
    EngineAddresses,
    HandshakeInit,
    decode_ready,
    encode_handshake,
    select_dialect,
)
from anyengine.config import LaunchedEngine
from anyengine.exceptions import DecodeError, RemoteProtocolError

from .engine_link import EngineLink, StartRecord
from .outcomes import CheckFailed
from .ports import open_ports

__all__ = ["AttachedEngine", "EngineTarget", "open_engine"]


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """An engine that somebody else starts: it connects to ``address`` (``tcp://host:port``, bound by us).

    ``local`` and ``headless`` are what its HELLO must say; ``vllm serve --headless`` says so.
    """

    address: str
    local: bool = False
    headless: bool = True


EngineTarget = LaunchedEngine | AttachedEngine
"""What can be checked."""

_KEPT = 100  # of the messages at the start: more than a good engine sends, and room enough for one that repeats itself
_FAILED_GRACE_S = 0.5  # an engine that is broken, or still loading, has nothing to finish
_KILLED_LIMIT_S = 15.0  # its children's own grace included


@asynccontextmanager
async def open_engine(
    target: EngineTarget,
    *,
    rank: int = 0,
    startup_timeout_s: float = 120.0,
    patience_s: float = 20.0,
    on_progress: Callable[[Status], None] | None = None,
) -> AsyncIterator[EngineLink]:
    """Start ``target``, shake hands, give the link; stop it when the block ends.

    An engine that does not become ready gives a link all the same: ``link.start.failure`` says why.

    Raises:
        OSError: the program cannot be started.
        BrokenResourceError: an address cannot be bound.

    Cancellation: at any point; every process is gone before it propagates.
    """
    attached = isinstance(target, AttachedEngine)
    local, headless = (target.local, target.headless) if isinstance(target, AttachedEngine) else (True, False)
    error: BaseException | None = None
    with open_ports(target.address if isinstance(target, AttachedEngine) else None) as ports:
        monitors = [
            (name, open_monitor(socket))
            for client in ports.clients
            for name, socket in (("input", client.inputs), ("output", client.outputs))
        ]
        link = EngineLink(ports, StartRecord(local, headless), rank, patience_s)
        async with anyio.create_task_group() as tasks:
            try:
                for name, monitor in monitors:
                    tasks.start_soon(_watch_link, link, name, monitor)
                if not attached:
                    assert not isinstance(target, AttachedEngine)
                    child = launch_engine(target, handshake_address=ports.handshake_address, rank=rank)
                    link.process = SupervisedEngine(rank, child, on_progress)
                    tasks.start_soon(_supervise, link, link.process)
                await _shake_hands(link, tasks, startup_timeout_s)
                yield link
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as exc:  # noqa: BLE001 - raised again below: the task group would wrap it
                error = exc
            finally:
                await _stop(link)  # noqa: ASYNC102 - shielded and bounded inside
                tasks.cancel_scope.cancel()
    if error is not None:
        raise error


async def _shake_hands(link: EngineLink, tasks: TaskGroup, timeout_s: float) -> None:
    """Serve the handshake until the engine is ready; the sockets are read on afterwards, since nothing may follow."""
    tasks.start_soon(_serve_handshake, link)
    for client in range(len(link.ports.clients)):
        tasks.start_soon(_read_inputs, link, client)
        tasks.start_soon(_read_outputs, link, client)
    start = link.start

    def ready() -> bool:
        return start.ready_after_init is not None and len(start.registrations) == len(link.ports.clients)

    with anyio.move_on_after(timeout_s) as deadline:
        while not ready() and link.gone is None:
            await link.change()
    if deadline.cancelled_caught:
        start.failure = f"not ready after {timeout_s:g} s: {_progress(start)}"
    elif link.gone is not None:
        start.failure = f"the engine {link.gone}: {_progress(start)}"
    else:
        await _settle_dialect(link)
        if start.failure is None:
            with suppress(CheckFailed):  # a check of calls will say so
                await link.fence()  # what follows READY unasked comes before the answer to a call


def _progress(start: StartRecord) -> str:
    return (
        f"{len(start.handshake)} handshake messages received, {start.inits_sent} INIT sent, registered with"
        f" {len(start.registrations)} clients, READY {'missing' if start.ready_after_init is None else 'received'}"
    )


async def _serve_handshake(link: EngineLink) -> None:
    start = link.start
    addresses = EngineAddresses(
        [client.input_address for client in link.ports.clients],
        [client.output_address for client in link.ports.clients],
    )
    while True:
        for identity, *frames in await link.ports.handshake.drain():
            status = _status_of(frames[0] if frames else b"")
            if len(start.handshake) < _KEPT or (status == "READY" and start.ready_after_init is None):
                start.handshake.append((bytes(identity), [bytes(frame) for frame in frames]))
            if status == "READY":
                start.ready_after_init = start.inits_sent > 0
            elif start.inits_sent == 0:  # whatever a first message says, its sender wants to be told where to go
                with suppress(PeerUnreachable):
                    link.ports.handshake.send_nowait([identity, encode_handshake(HandshakeInit(addresses))])
                    start.inits_sent += 1
        link.wake()


def _status_of(frame: bytes | memoryview) -> object:
    try:
        message = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return message.get("status") if isinstance(message, dict) else None


async def _read_inputs(link: EngineLink, client: int) -> None:
    while True:
        for identity, *frames in await link.ports.clients[client].inputs.drain():
            link.identity = link.identity or bytes(identity)  # the first to come is the engine, whoever else does
            received = link.start.registrations.setdefault(client, [])
            if len(received) < _KEPT:
                received.append((bytes(identity), [bytes(frame) for frame in frames]))
        link.wake()


async def _read_outputs(link: EngineLink, client: int) -> None:
    while True:
        for frames in await link.ports.clients[client].outputs.drain():
            link.take_message(client, frames)
        link.wake()


async def _settle_dialect(link: EngineLink) -> None:
    """Choose the dialect by the registration; ask the engine where its registration leaves that open."""
    _, frames = link.start.registrations[0][0]
    try:
        link.registration = decode_ready(frames[0])
    except DecodeError:
        return  # the newest dialect stays; the check of the registration says what is wrong
    try:
        dialect = select_dialect(link.registration)
    except RemoteProtocolError as exc:
        link.start.failure = str(exc)
        return
    link.settle_dialect(dialect)
    if dialect.probe is not None:
        try:
            link.settle_dialect(dialect.probed(found=await link.failure_of(dialect.probe) is None))
        except CheckFailed as exc:
            link.start.failure = f"its release cannot be told: {exc}"


async def _watch_link(link: EngineLink, name: str, monitor: PeerMonitor) -> None:
    async for event in monitor:
        if event.kind == "disconnected":
            link.lost_links.add(name)
            if link.process is None and {"input", "output"} <= link.lost_links:
                link.note_end("closed its connections")
            link.wake()


async def _supervise(link: EngineLink, process: SupervisedEngine) -> None:
    await process.supervise()
    error, tail = process.status.error, process.child.stderr_tail(8)
    cause = f": {error.type}: {error.message}" if error else ""
    link.note_end(f"{process.child.poll()}{cause}" + (f"; last on stderr: {' | '.join(tail)}" if tail else ""))


async def _stop(link: EngineLink) -> None:
    """SIGTERM, grace, SIGKILL; then what it started has its own grace. What we did not start is left alone."""
    process = link.process
    if process is None:
        return
    healthy = link.start.failure is None and not link.lost_links and not link.dead_clients
    try:
        # Shielded, so that a cancelled run still ends its process in order; bounded by the grace period.
        with anyio.move_on_after(link.patience_s if healthy else _FAILED_GRACE_S, shield=True):
            process.child.terminate()
            await process.child.exited.wait()
    finally:
        process.child.kill()  # native cancellation goes through shields, so this does not await
    try:
        with anyio.move_on_after(_KILLED_LIMIT_S, shield=True):  # bounded: what has been killed goes in a moment
            await process.child.exited.wait()
            await process.see_off()
    finally:
        process.child.reap()
