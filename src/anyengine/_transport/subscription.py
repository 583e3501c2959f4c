"""A subscription to a publisher: a SUB socket in a context of its own, and where the publisher is found.

Owns the socket, its context and its limits. Does not know what is published.
"""

from __future__ import annotations

import errno
import re
from typing import Final, Self

import zmq
from anyio import BrokenResourceError

from anyengine._transport.endpoints import is_local_address
from anyengine._transport.zmq_socket import ZmqSocket

__all__ = ["MAX_QUEUED", "Subscription", "publisher_address"]

MAX_QUEUED: Final = 1000
"""Messages that wait to be read. When there are more, libzmq reads no further: the publisher's own queue fills, and
then it drops what does not fit."""

_MAX_MESSAGE_BYTES: Final = 8 << 20  # a connection with a larger one is cut: a publisher must not fill our memory
_LOOPBACK: Final = {"*": "127.0.0.1", "0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "[::1]", "[::]": "[::1]"}  # noqa: S104


def publisher_address(endpoint: str, *, is_local: bool) -> tuple[str, bool]:
    """Where a publisher that is set to ``endpoint`` can be reached, and whether it waits for us to listen there: vLLM's
    publisher binds what has a wildcard, and connects to the rest. ``is_local``: it is on this host.

    Raises:
        ValueError: it cannot be reached; the text says why.
    """
    if endpoint.startswith("ipc://"):
        if not is_local:
            raise ValueError("is a socket file of another host")
        return endpoint, False
    named = re.fullmatch(r"tcp://(?P<host>.+):(?P<port>[0-9]+)", endpoint)
    if named is None:
        raise ValueError("is no address that another process can reach")
    address = f"tcp://{_LOOPBACK.get(named['host'], named['host'])}:{named['port']}"
    if is_local_address(address) and not is_local:
        raise ValueError("is an address on the engine's host, and where that is nobody has told this client")
    return address, "*" not in endpoint and "::" not in endpoint


class Subscription:
    """Subscribed to ``topic`` (all topics that begin like it) at ``address``; connects again by itself.

    ``listens``: the publisher connects to us, as a rule: if nobody listens there, we do. It learns of the subscription
    while the socket is read, since libzmq sends it in the reader's call.

    Belongs to the thread that made it. Lifetime: until ``close``.

    Raises:
        BrokenResourceError: the address cannot be used; the cause is attached.
    """

    def __init__(self, address: str, topic: bytes = b"", *, listens: bool = False) -> None:
        self.address: str = address
        self.is_dropped: bool = False
        """Nobody reads it any more, and whoever did could not close it: it was collected."""
        self._context = zmq.Context()
        try:
            raw = self._context.socket(zmq.SUB)
            raw.set(zmq.RCVHWM, MAX_QUEUED)
            raw.set(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            raw.set(zmq.IPV6, int("[" in address))
            raw.set(zmq.SUBSCRIBE, topic)
            self.socket = ZmqSocket(raw)
            self.listens: bool = listens and self._bind(address)
            if not self.listens:
                self.socket.connect(address)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _bind(self, address: str) -> bool:
        try:
            self.socket.bind(address)
        except BrokenResourceError as exc:
            if isinstance(exc.__cause__, zmq.ZMQError) and exc.__cause__.errno == errno.EADDRINUSE:
                return False
            raise
        return True

    def close(self) -> None:
        """Close the socket and end its context. Idempotent; waits for nothing.

        Raises:
            WrongLoopError: called from another thread than the one that made it.
        """
        self.socket.close()
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
