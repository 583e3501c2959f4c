"""What a client has written to its engines: every ADD and every ABORT, at the moment when it goes to the socket.

Owns the counting, on the client's side of every transport, and the rule: an id that was sent, and that its engine has
not ended, is aborted exactly once; one that its engine has ended, or taken with it, once at most (the two may cross).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Self

import msgspec

from anyengine._protocol import RequestRegistry
from anyengine._transport.abc import PeerUnreachable
from anyengine._transport.socket_base import SocketBase

__all__ = ["Ledger"]


class Ledger:
    """Watches all clients of the process for the length of its block."""

    def __init__(self) -> None:
        self.added: Counter[str] = Counter()
        self.aborted: Counter[str] = Counter()
        self.ended: set[str] = set()  # whose end has come from the engine, or was its engine's

    def __enter__(self) -> Self:
        self._send = send = SocketBase.send_nowait
        self._dispatch = dispatch = RequestRegistry.dispatch
        self._fail_all = fail_all = RequestRegistry.fail_all

        def spy(socket: SocketBase, parts: Sequence[Any]) -> None:
            is_message = len(parts) > 2 and len(parts[0]) == 2  # an engine's identity comes first
            try:
                send(socket, parts)  # what is refused was not written
            except PeerUnreachable:
                if is_message and parts[1] == b"\x01":  # nor is it missed: the engine has gone, with all that it ran
                    self.ended.update(msgspec.msgpack.decode(parts[2]))
                raise
            if is_message:
                if parts[1] == b"\x00":
                    self.added[msgspec.msgpack.decode(parts[2])[0]] += 1
                elif parts[1] == b"\x01":
                    self.aborted.update(msgspec.msgpack.decode(parts[2]))

        def spy_on_ends(registry: RequestRegistry, outputs: Sequence[Any]) -> Any:
            self.ended.update(output.request_id for output in outputs if output.finish_reason is not None)
            return dispatch(registry, outputs)

        def spy_on_deaths(registry: RequestRegistry, *args: Any, only: Collection[str] | None = None) -> Any:
            self.ended.update(only or ())
            return fail_all(registry, *args, only=only)

        SocketBase.send_nowait = spy  # type: ignore[method-assign]
        RequestRegistry.dispatch = spy_on_ends  # type: ignore[method-assign]
        RequestRegistry.fail_all = spy_on_deaths  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        SocketBase.send_nowait = self._send  # type: ignore[method-assign]
        RequestRegistry.dispatch = self._dispatch  # type: ignore[method-assign]
        RequestRegistry.fail_all = self._fail_all  # type: ignore[method-assign]

    def settle(self, finished: Collection[str]) -> list[str]:
        """What is wrong with everything that was sent since the last time, when nothing of it lives any more. Engines
        may know of more ends (``finished``) than the clients have heard of."""
        faults = [f"{wire_id} was sent {times} times" for wire_id, times in self.added.items() if times > 1]
        for wire_id in self.added.keys() | self.aborted.keys():
            times = self.aborted[wire_id]
            if times > 1:
                faults.append(f"{wire_id} was aborted {times} times")
            elif times and not self.added[wire_id]:
                faults.append(f"{wire_id} was aborted and never sent")
            elif not times and wire_id not in finished and wire_id not in self.ended:
                faults.append(f"{wire_id} was left running in its engine")
        self.added.clear()
        self.aborted.clear()
        self.ended.clear()
        return faults
