"""An engine's connections to sockets that others bind: how they are made, and when they come and go.

Owns socket options and the reading of libzmq's monitor messages. Decides nothing.
"""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

__all__ = ["ConnectionMonitor", "connect"]

_KEEPALIVE = {  # a host that vanished without a word is noticed within a minute; a stopped process is no such host
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 30,  # s
    zmq.TCP_KEEPALIVE_INTVL: 10,  # s
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_EVENTS = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect ``socket``, which libzmq then does again for as long as it is open.

    Raises:
        zmq.ZMQError: the address makes no sense.
    """
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)
    if address.startswith("tcp://["):
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


class ConnectionMonitor:
    """Watches one socket, which must not be connected yet. Belongs to the thread of that socket; close it first."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._watched = socket
        self.socket: zmq.Socket[bytes] = socket.get_monitor_socket(_EVENTS)
        """Readable when there is something to :meth:`read`."""

    def read(self) -> list[bool]:
        """What has happened since the last call, in order: ``True`` for a connection, ``False`` for the loss of it."""
        events: list[bool] = []
        while self.socket.poll(0):
            events.append(recv_monitor_message(self.socket)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return events

    def close(self) -> None:
        """Stop watching."""
        self._watched.disable_monitor()
        self.socket.close(linger=0)
