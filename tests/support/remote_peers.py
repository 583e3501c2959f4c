"""Scripted peers that somebody else than the client starts: here, the test. As a program: one such peer,
with more behaviours than ``scripted_peer.py`` has."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, Self

import zmq
from scripted_peer import BEHAVIOURS, Peer

from anyengine import Status

__all__ = ["RemotePeers"]


class RemotePeers:
    """Peers that end with the block. ``joining`` is an ``on_progress`` that starts one for each behaviour, ranks 0 and
    up, as soon as the client listens. One that is started with ``inputs`` and ``outputs`` needs no handshake."""

    def __init__(self, *behaviours: str | tuple[str, ...], **launch: Any) -> None:
        self._behaviours = [(one,) if isinstance(one, str) else one for one in behaviours]
        self._launch = launch
        self._undo = ExitStack()
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._undo.close()

    def joining(self, status: Status) -> None:
        assert status.stage == "listening"
        for rank, behaviour in enumerate(self._behaviours):
            self.start(*behaviour, rank=rank, handshake_address=status.detail, **self._launch)

    def start(self, *behaviour: str, **launch: Any) -> subprocess.Popen[bytes]:
        line = json.dumps({"local": False, **launch})
        process = subprocess.Popen([sys.executable, __file__, line, *behaviour], stdin=subprocess.DEVNULL)
        self._undo.callback(process.wait)
        self._undo.callback(process.kill)
        self.processes.append(process)
        return process


class _Remote(Peer):
    def _dealer(self, address: str) -> zmq.Socket[bytes]:
        self.context.setsockopt(zmq.IPV6, int("[" in address))  # of the sockets that follow
        return super()._dealer(address)


class _Registered(_Remote):
    """Somebody else has answered its handshake: it knows its addresses and registers."""

    def __init__(self) -> None:
        launch = json.loads(sys.stdin.readline())
        self.rank = launch["rank"]
        self.context = zmq.Context()
        self._connect(launch["inputs"], launch["outputs"])

    def start(self) -> None:
        self.register()


# ----------------------------------------------------------------------------------------------------------- behaviours


def serve(peer: Peer) -> None:
    """Answers each request with its rank and 7, the last. A request for token 9 goes on for ever: a token every 20 ms.
    Answers each call with the ids of those that go on."""
    peer.start()
    endless: list[str] = []
    while True:
        if not peer.inputs.poll(20):
            for request_id in endless:
                peer.send_tokens(request_id, [6])
            continue
        kind, payload = peer.receive()
        if kind == b"\x00" and payload[1] == [9]:
            endless.append(payload[0])
        elif kind == b"\x00":
            peer.send_tokens(payload[0], [peer.rank, 7], 1)
        elif kind == b"\x01":
            endless = [request_id for request_id in endless if request_id not in payload]
        else:
            peer.reply(payload[1], endless)


def says(peer: Peer, hello: str, ready: str = "{}") -> None:
    """A handshake with these fields (JSON)."""
    peer.hello(**json.loads(hello))
    peer.init()
    peer.register()
    peer.ready(**json.loads(ready))
    signal.pause()


def registers_twice(peer: Peer) -> None:
    """Registers once more before it is ready."""
    peer.hello()
    peer.init()
    peer.register()
    peer.register()
    signal.pause()


def stops_after_hello(peer: Peer) -> None:
    """Is never ready."""
    peer.hello()
    signal.pause()


def registers_nonsense(peer: Peer) -> None:
    """A registration that is none."""
    peer.hello()
    peer.init()
    peer.inputs.send(b"\xc1")
    signal.pause()


_OWN = {one.__name__: one for one in (serve, says, registers_twice, stops_after_hello, registers_nonsense)}

if __name__ == "__main__":
    line, behaviour, *rest = sys.argv[1:]
    sys.stdin = io.StringIO(line)  # where a peer that the client has started finds its launch line
    {**BEHAVIOURS, **_OWN}[behaviour](_Registered() if "inputs" in json.loads(line) else _Remote(), *rest)
