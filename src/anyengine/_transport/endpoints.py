"""The listening side of a client: three bound ZeroMQ sockets in a context of their own.

Owns the private context, the sockets, the addresses and the directory of the ipc files. Does not know what is said over
them. Every address is bound first and advertised afterwards, so two clients can never be given the same one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import zmq

from anyengine._transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Endpoints", "open_endpoints"]

_ROUTER_OPTIONS = {
    zmq.SNDHWM: 0,
    # An engine says two or three short things here, at its start. Nobody reads later on, so what a broken one goes on
    # to send must fill its memory and not ours: sixteen messages, and a connection with an oversized one is cut.
    zmq.RCVHWM: 16,
    zmq.MAXMSGSIZE: 1 << 20,
    # A message for a peer that is not there is an error (PeerUnreachable), not silence.
    zmq.ROUTER_MANDATORY: 1,
    # The newest connection of an identity is the live one. Without this libzmq hides a re-attached engine behind the
    # half-open connection of its predecessor and it would wait in silence; with it, we see its message and can decide.
    zmq.ROUTER_HANDOVER: 1,
}
_PULL_OPTIONS = {zmq.RCVHWM: 0}


class Endpoints:
    """The bound sockets and their addresses: ``handshake`` and ``inputs`` are ROUTERs, ``outputs`` is a PULL.

    Made by :func:`open_endpoints`. Belongs to the thread that opened it. Lifetime: until ``close``.
    """

    handshake: ZmqSocket
    inputs: ZmqSocket
    outputs: ZmqSocket
    handshake_address: str
    input_address: str
    output_address: str

    def __init__(self, transport: Literal["ipc", "tcp"]) -> None:
        with ExitStack() as undo:
            directory = undo.enter_context(_PrivateDirectory()) if transport == "ipc" else None
            context = zmq.Context()
            # Closes the sockets too, whatever happened before; with zero linger, so nothing waits for unsent data.
            undo.callback(context.destroy, linger=0)

            def bind(name: str, kind: int, options: dict[zmq.SocketOption, int]) -> tuple[ZmqSocket, str]:
                raw = context.socket(kind)
                for option, value in options.items():
                    raw.set(option, value)
                socket = undo.enter_context(ZmqSocket(raw))
                return socket, socket.bind(f"ipc://{directory}/{name}" if directory else "tcp://127.0.0.1:*")

            self.handshake, self.handshake_address = bind("h", zmq.ROUTER, _ROUTER_OPTIONS)
            self.inputs, self.input_address = bind("i", zmq.ROUTER, _ROUTER_OPTIONS)
            self.outputs, self.output_address = bind("o", zmq.PULL, _PULL_OPTIONS)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Close the sockets, end the context, remove the directory. Idempotent; never waits for unsent data.

        Raises:
            WrongLoopError: called from another thread than the one that opened the endpoints.
        """
        self.handshake.close()  # first, since it raises before anything is touched in the wrong thread
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()


def open_endpoints(transport: Literal["ipc", "tcp"] = "ipc") -> Endpoints:
    """Bind a client's three sockets; use it as ``with open_endpoints() as endpoints:``. Needs no event loop.

    ``"ipc"`` listens in a directory that only this user can enter, ``"tcp"`` on ports of the loopback interface that
    the system chooses.

    Raises:
        BrokenResourceError: a socket could not be bound; the cause is attached.
        OSError: no directory for ipc files could be made.
    """
    return Endpoints(transport)


class _PrivateDirectory:
    """A directory of mode 0700 whose path is short enough for a socket in it; removed on exit."""

    def __enter__(self) -> Path:
        self._path = _make_private_directory()
        return self._path

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def _make_private_directory() -> Path:
    """Under ``$XDG_RUNTIME_DIR`` if it will do, else under the directory for temporary files, else ``/tmp``."""
    bases = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp")  # noqa: S108 (mkdtemp makes it private)
    trouble = "no base directory"
    for base in filter(None, bases):
        if len(os.fsencode(base)) + len("/anyengine-xxxxxxxx/h") > zmq.IPC_PATH_MAX_LEN:
            trouble = f"{base} is too long for a socket address ({zmq.IPC_PATH_MAX_LEN} bytes)"
            continue
        try:
            return Path(tempfile.mkdtemp(prefix="anyengine-", dir=base))  # 0700
        except OSError as exc:
            trouble = str(exc)
    raise OSError(f"cannot make a directory for ipc sockets: {trouble}; use the tcp transport, or set XDG_RUNTIME_DIR")
