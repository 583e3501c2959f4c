"""The sockets of an engine under test: one handshake ROUTER, and two clients with a ROUTER and a PULL each.

Owns the binding, for engines that we start (ipc) and for those that come by themselves (at a given TCP address). Two
clients, because an engine must register with each and answer each on its own socket. Knows no messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import zmq

from anyengine._transport.endpoints import open_endpoints
from anyengine._transport.zmq_socket import ZmqSocket

__all__ = ["ClientPorts", "Ports", "open_ports", "split_tcp_address"]

NUM_CLIENTS = 2


@dataclass(frozen=True, slots=True)
class ClientPorts:
    """Where one client listens."""

    inputs: ZmqSocket
    outputs: ZmqSocket
    input_address: str
    output_address: str


@dataclass(frozen=True, slots=True)
class Ports:
    """All sockets of one start."""

    handshake: ZmqSocket
    handshake_address: str
    clients: tuple[ClientPorts, ...]


def split_tcp_address(address: str) -> tuple[str, str]:
    """Host and port of ``tcp://host:port``.

    Raises:
        ValueError: it is something else, or an address that nobody can connect to.
    """
    match = re.fullmatch(r"tcp://(.+):(\d{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536 or match[1] in ("*", "0.0.0.0", "[::]"):  # noqa: S104 - refused, not bound
        raise ValueError(
            f"attach={address!r} must be tcp://HOST:PORT, where HOST is this machine's address as the engine sees it"
        )
    return match[1], match[2]


@contextmanager
def open_ports(attach: str | None) -> Iterator[Ports]:
    """Bind everything; ``attach`` is the handshake address for an engine that somebody else starts.

    Raises:
        BrokenResourceError: an address cannot be used; the cause is attached.
        ValueError: ``attach`` is no such address.
    """
    with ExitStack() as stack:
        if attach is None:
            endpoints = [stack.enter_context(open_endpoints()) for _ in range(NUM_CLIENTS)]
            handshake, handshake_address = endpoints[0].handshake, endpoints[0].handshake_address
            assert handshake is not None and handshake_address is not None
            yield Ports(
                handshake,
                handshake_address,
                tuple(ClientPorts(e.inputs, e.outputs, e.input_address, e.output_address) for e in endpoints),
            )
            return
        host, port = split_tcp_address(attach)
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)

        def bind(kind: int, address: str) -> tuple[ZmqSocket, str]:
            raw = context.socket(kind)
            raw.set_hwm(0)
            raw.set(zmq.IPV6, "[" in host)
            if kind == zmq.ROUTER:
                raw.set(zmq.ROUTER_MANDATORY, 1)
                raw.set(zmq.ROUTER_HANDOVER, 1)
            socket = stack.enter_context(ZmqSocket(raw))
            return socket, socket.bind(address)

        handshake, handshake_address = bind(zmq.ROUTER, f"tcp://{host}:{port}")
        clients = []
        for _ in range(NUM_CLIENTS):
            (inputs, input_address), (outputs, output_address) = (
                bind(kind, f"tcp://{host}:*") for kind in (zmq.ROUTER, zmq.PULL)
            )
            clients.append(ClientPorts(inputs, outputs, input_address, output_address))
        yield Ports(handshake, handshake_address, tuple(clients))
