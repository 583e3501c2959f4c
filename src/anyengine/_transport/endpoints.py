"""The listening side of a client: its bound ZeroMQ sockets in a context of their own.

Owns the private context, the sockets, the addresses and the directory of the ipc files. Does not know what is said over
them. Every address is bound first and advertised afterwards, so two clients can never be given the same one.
"""

from __future__ import annotations

import ipaddress
import os
import socket as socket_module
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import zmq
from anyio import BrokenResourceError

from anyengine._environment import RPC_BASE_PATH
from anyengine._owned_directories import OwnedDirectory
from anyengine._transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Endpoints", "Listeners", "beside", "is_local_address", "open_endpoints"]

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


@dataclass(frozen=True, slots=True)
class Listeners:
    """Where a client listens. Each is an address, or the descriptor of a listening socket that somebody hands over
    (tcp or unix). ``handshake`` is ``None`` where somebody else answers it. ``advertise_host`` replaces the host in the
    tcp addresses that engines are told."""

    inputs: str | int
    outputs: str | int
    handshake: str | None = None
    advertise_host: str | None = None

    @property
    def exposed(self) -> list[str]:
        """The addresses that other hosts can reach."""
        places = (self.handshake, self.inputs, self.outputs)
        return list(dict.fromkeys(place for place in places if isinstance(place, str) and not is_local_address(place)))


class Endpoints:
    """The bound sockets and their addresses, as engines are told them: ``handshake`` (or ``None``) and ``inputs`` are
    ROUTERs, ``outputs`` is a PULL.

    Made by :func:`open_endpoints`. Belongs to the thread that opened it. Lifetime: until ``close``.
    """

    handshake: ZmqSocket | None
    inputs: ZmqSocket
    outputs: ZmqSocket
    handshake_address: str | None
    input_address: str
    output_address: str

    def __init__(self, listeners: Literal["ipc", "tcp"] | Listeners) -> None:
        with ExitStack() as undo:
            places = listeners if isinstance(listeners, Listeners) else _own_places(listeners, undo)
            context = zmq.Context()
            # Closes the sockets too, whatever happened before; with zero linger, so nothing waits for unsent data.
            undo.callback(context.destroy, linger=0)

            def bind(place: str | int, kind: int, options: dict[zmq.SocketOption, int]) -> tuple[ZmqSocket, str]:
                raw = context.socket(kind)
                for option, value in options.items():
                    raw.set(option, value)
                if handed_over := isinstance(place, int):
                    raw.set(zmq.USE_FD, place)
                    place = _address_of(place)
                else:
                    _refuse_taken(place)
                if "[" in place:
                    raw.set(zmq.IPV6, 1)
                socket = undo.enter_context(ZmqSocket(raw))
                address = socket.bind(place)
                if not handed_over and places is listeners:
                    undo.enter_context(_SocketFile(address))
                return socket, _advertised(address, places.advertise_host)

            self.handshake, self.handshake_address = None, None
            if places.handshake is not None:
                self.handshake, self.handshake_address = bind(places.handshake, zmq.ROUTER, _ROUTER_OPTIONS)
            self.inputs, self.input_address = bind(places.inputs, zmq.ROUTER, _ROUTER_OPTIONS)
            self.outputs, self.output_address = bind(places.outputs, zmq.PULL, _PULL_OPTIONS)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Close the sockets, end the context, remove the directory. Idempotent; never waits for unsent data.

        Raises:
            WrongLoopError: called from another thread than the one that opened the endpoints.
        """
        self.inputs.close()  # first, since it raises before anything is touched in the wrong thread
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()


def open_endpoints(listeners: Literal["ipc", "tcp"] | Listeners = "ipc") -> Endpoints:
    """Bind a client's sockets; use it as ``with open_endpoints() as endpoints:``. Needs no event loop.

    ``"ipc"`` listens in a directory that only this user can enter, ``"tcp"`` on ports of the loopback interface that
    the system chooses.

    Raises:
        BrokenResourceError: a socket could not be bound; the cause is attached.
        OSError: no directory for ipc files could be made; or a descriptor is no listening socket.
    """
    return Endpoints(listeners)


def beside(handshake: str, *, inputs: str | None, outputs: str | None, advertise_host: str | None) -> Listeners:
    """Listeners for a handshake at a given address: what is not given is a free port of the same interface, or an
    ``ipc`` socket whose name begins like the handshake's."""

    def default(suffix: str) -> str:
        if handshake.startswith("tcp://"):
            return f"{handshake.rpartition(':')[0]}:*"
        return f"{handshake}.{suffix}"

    return Listeners(inputs or default("i"), outputs or default("o"), handshake, advertise_host)


def is_local_address(address: str) -> bool:
    """Whether only this host can reach the address."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if address.startswith("ipc://") or host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # every interface ("*"), or one by its name
        return False


def _own_places(transport: Literal["ipc", "tcp"], undo: ExitStack) -> Listeners:
    if transport == "tcp":
        return Listeners(*["tcp://127.0.0.1:*"] * 3)
    directory = undo.enter_context(_PrivateDirectory())
    return Listeners(handshake=f"ipc://{directory}/h", inputs=f"ipc://{directory}/i", outputs=f"ipc://{directory}/o")


def _address_of(fd: int) -> str:
    """The ZeroMQ address of a listening socket that was handed over.

    Raises:
        OSError: it is no socket.
    """
    duplicate = os.dup(fd)
    try:
        handed = socket_module.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with handed:
        name = handed.getsockname()
        if handed.family == socket_module.AF_UNIX:
            # An abstract name starts with a null byte, which ZeroMQ spells "@".
            path = name.decode() if isinstance(name, bytes) else name
            return f"ipc://{path.replace(chr(0), '@', 1)}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"tcp://{host}:{name[1]}"


def _refuse_taken(address: str) -> None:
    """libzmq would take the path of an ``ipc`` socket from somebody who listens there, and both would go deaf.

    Raises:
        BrokenResourceError: somebody does.
    """
    if not address.startswith("ipc:///"):
        return
    with socket_module.socket(socket_module.AF_UNIX) as visitor:
        visitor.setblocking(False)
        try:
            visitor.connect(address.removeprefix("ipc://"))
        except BlockingIOError:
            pass  # there is a queue
        except OSError:
            return  # nothing there, or what is left of a dead one
    raise BrokenResourceError(f"somebody listens there already (addr={address!r})")


def _advertised(address: str, host: str | None) -> str:
    if host is None or not address.startswith("tcp://"):
        return address
    return f"tcp://{f'[{host}]' if ':' in host else host}:{address.rpartition(':')[2]}"


class _SocketFile:
    """The file of an ``ipc`` socket that is bound, which libzmq leaves behind; removed on exit."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        if self._address.startswith("ipc:///"):
            Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)


class _PrivateDirectory:
    """A directory of mode 0700 whose path is short enough for a socket in it; removed on exit."""

    def __enter__(self) -> Path:
        self._owned = _make_private_directory()
        return self._owned.path

    def __exit__(self, *exc: object) -> None:
        self._owned.remove()


def _make_private_directory() -> OwnedDirectory:
    """Under ``$VLLM_RPC_BASE_PATH``, or ``$XDG_RUNTIME_DIR``, or the directory for temporary files, or ``/tmp``: the
    first that will do."""
    chosen = RPC_BASE_PATH.value(), os.environ.get("XDG_RUNTIME_DIR")
    import tempfile  # loads hashlib, and is needed once

    bases = (*chosen, tempfile.gettempdir(), "/tmp")  # noqa: S108 (it is made private)
    trouble = "no base directory"
    for base in filter(None, bases):
        if len(os.fsencode(base)) + len("/anyengine-xxxxxxxx/h") > zmq.IPC_PATH_MAX_LEN:
            trouble = f"{base} is too long for a socket address ({zmq.IPC_PATH_MAX_LEN} bytes)"
            continue
        try:
            return OwnedDirectory(base)
        except OSError as exc:
            trouble = str(exc)
    raise OSError(f"cannot make a directory for ipc sockets: {trouble}; use the tcp transport, or set XDG_RUNTIME_DIR")
