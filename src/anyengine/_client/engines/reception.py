"""The handshake of engines that are started again, while others serve.

Owns the reading of the two sockets over which an engine greets and registers, for as long as somebody is expected
there. Who is started, and what becomes of one that fails, is :mod:`.restarts`'s.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from anyengine._protocol import FrontendHandshake
from anyengine._transport.abc import Message, MessageSocket, PeerUnreachable
from anyengine._wire import EngineAddresses, engine_identity, rank_of
from anyengine.exceptions import RemoteProtocolError

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["Reception"]

_logger = logging.getLogger("anyengine.client")


class _Guest:
    """One engine that is expected, until it is ``settled``: complete, or in ``trouble``."""

    def __init__(self, handshake: FrontendHandshake) -> None:
        self.handshake = handshake
        self.settled = anyio.Event()
        self.trouble: RemoteProtocolError | None = None


class Reception:
    """See the module. Lifetime: one session, whose tasks read.

    Invariants: one task reads each socket at most, and one does exactly while somebody is expected; what is said by
    anybody else is dropped.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._expected: dict[int, _Guest] = {}
        self._scope: anyio.CancelScope | None = None  # of the present readers
        self._gone = anyio.Event()  # set when the latest readers have ended
        self._gone.set()

    async def admit(self, rank: int) -> FrontendHandshake:
        """Wait until the engine of ``rank`` has greeted and registered; what it said.

        Raises:
            RemoteProtocolError: what it says makes no sense.

        Cancellation: it is expected no more.
        """
        endpoints = self._session.endpoints
        addresses = EngineAddresses(inputs=[endpoints.input_address], outputs=[endpoints.output_address])
        guest = self._expected[rank] = _Guest(FrontendHandshake([rank], addresses))
        self._open()
        try:
            await guest.settled.wait()
        finally:
            del self._expected[rank]
            if not self._expected:
                self._close()
        if guest.trouble is not None:
            raise guest.trouble
        return guest.handshake

    async def clear(self) -> None:
        """Read what former engines have left in the sockets, so that nobody takes it for their successors' words.

        Cancellation: safe; no message of somebody who is expected is lost.
        """
        self._close()
        await self._gone.wait()
        for socket in self._sockets():
            while messages := socket.drain_nowait():
                for message in messages:
                    self._take(socket, message)
        if self._expected:
            self._open()

    # ------------------------------------------------------------------ internals

    def _sockets(self) -> list[MessageSocket]:
        handshake, inputs = self._session.endpoints.handshake, self._session.endpoints.inputs
        return [inputs] if handshake is None else [handshake, inputs]

    def _open(self) -> None:
        if self._scope is None:
            former, self._gone, self._scope = self._gone, anyio.Event(), anyio.CancelScope()
            self._session.tasks.start_soon(self._session.own, self._read, self._scope, former, self._gone)

    def _close(self) -> None:
        if self._scope is not None:
            self._scope.cancel()
            self._scope = None

    async def _read(self, scope: anyio.CancelScope, former: anyio.Event, gone: anyio.Event) -> None:
        try:
            with scope:
                await former.wait()
                async with anyio.create_task_group() as readers:
                    for socket in self._sockets():
                        readers.start_soon(self._read_one, socket)
        finally:
            gone.set()

    async def _read_one(self, socket: MessageSocket) -> None:
        while True:
            for message in await socket.drain():
                self._take(socket, message)

    def _take(self, socket: MessageSocket, message: Message) -> None:
        identity, payload, *_ = message
        guest = self._expected.get(rank_of(identity)) if len(identity) == len(engine_identity(0)) else None
        if guest is None or guest.settled.is_set():
            _logger.debug("left alone a message of %r, who is not expected", bytes(identity))
            return
        try:
            if socket is self._session.endpoints.inputs:
                guest.handshake.receive_registration(identity, payload)
            elif reply := guest.handshake.receive_handshake(identity, payload):
                with suppress(PeerUnreachable):  # gone already: its exit tells more
                    socket.send_nowait([identity, reply])
        except RemoteProtocolError as exc:
            guest.trouble = exc
            guest.settled.set()
        if not guest.handshake.pending:
            guest.settled.set()
