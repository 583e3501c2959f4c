"""A ZeroMQ socket under AnyIO: synchronous, non-blocking calls; only the wait for readiness is awaited.

Owns one plain ``zmq.Socket`` and the one subtle thing about it: its edge-triggered descriptor. Does not know what
messages mean, and uses no task, thread, future or timer of its own.

How libzmq signals (``socket_base.cpp``, ``mailbox.cpp``, ``ypipe.hpp`` of 4.3.5), and what follows:

* The descriptor belongs to the socket's command mailbox; "readable" means "commands are waiting", for sends too.
* It fires only for somebody who has *seen* "empty" (or "full"). So a task may park only right after a call said so.
* Any call may process the commands and so clear the descriptor: recv, send, bind, connect, reading EVENTS itself. So
  whoever makes a call while a task is parked reads EVENTS afterwards and wakes that task if it can go on
  (``_recheck``), and an older "nothing there" (``_dry``) is void after it.
* One task can wait on a descriptor. Others queue behind it; when it leaves, also by cancellation, they all try again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import zmq
from anyio import BrokenResourceError, ClosedResourceError, Event, WouldBlock, notify_closing, wait_readable

from anyengine._transport.abc import PeerUnreachable
from anyengine._transport.socket_base import DRAIN_BYTES, IN, OUT, SocketBase

if TYPE_CHECKING:
    from anyengine._transport.abc import Message, ReceivedPart, SendablePart

__all__ = ["ZmqSocket"]

_NOWAIT = int(zmq.DONTWAIT)
_NOWAIT_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)
_COPY_BELOW_BYTES = 1024
"""Smaller parts become ``bytes``: 0.15 us cheaper than a view at 200 B, dearer above 1 KiB (0.4 us at 4 KiB)."""


class ZmqSocket(SocketBase):
    """Takes over a plain (synchronous) socket, sets its linger to zero and closes it in the end.

    Nobody else may call into the socket meanwhile, or rule three above is broken and a parked task may sleep for ever.
    Lifetime: until ``close``, which never waits for unsent data.

    Raises:
        TypeError: not a plain ``zmq.Socket``.
        ValueError: a ROUTER with a high-water mark. Its "writable" means that *some* peer has room, so nobody could
            wait for the one that is full; ``SNDHWM=0`` never blocks.
    """

    __slots__ = ("_descriptor", "_monitor", "_others", "_socket", "_watcher")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        if type(socket) is not zmq.Socket:
            raise TypeError(f"expected a plain zmq.Socket, got {type(socket).__qualname__}")
        if socket.get(zmq.TYPE) == zmq.ROUTER and socket.get(zmq.SNDHWM) != 0:
            raise ValueError("a ROUTER needs SNDHWM=0")
        super().__init__()
        socket.set(zmq.LINGER, 0)
        self._socket = socket
        self._descriptor = cast(int, socket.get(zmq.FD))
        self._monitor: ZmqSocket | None = None
        self._watcher = 0  # what the one task inside wait_readable() waits for; 0: nobody is there
        self._others: dict[Event, int] = {}  # tasks queued behind it, and what they wait for

    # ------------------------------------------------------------------------------------------- connections
    def bind(self, address: str) -> str:
        """Listen, and return the address as resolved (a wildcard port has become a number).

        Raises:
            BrokenResourceError: the address cannot be used; the cause is attached.
        """
        self._check_open()
        self._dry = False
        try:
            self._socket.bind(address)
            resolved = cast(bytes, self._socket.get(zmq.LAST_ENDPOINT))
        except zmq.ZMQError as exc:
            raise _translated(exc) from exc
        finally:
            self._recheck()
        return resolved.rstrip(b"\0").decode()

    def connect(self, address: str) -> None:
        """Connect now or as soon as somebody listens there.

        Raises:
            BrokenResourceError: the address cannot be used; the cause is attached.
        """
        self._check_open()
        self._dry = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as exc:
            raise _translated(exc) from exc
        finally:
            self._recheck()

    def attach_monitor(self, events: int) -> ZmqSocket:
        """A socket from which libzmq's connection ``events`` of this one can be read, until this one is closed."""
        self._check_open()
        self._dry = False
        address = f"inproc://monitor-{self._descriptor}"
        try:
            self._socket.monitor(address, events)
        except zmq.ZMQError as exc:
            raise _translated(exc) from exc
        finally:
            self._recheck()
        self._monitor = ZmqSocket(self._socket.context.socket(zmq.PAIR))
        self._monitor.connect(address)
        return self._monitor

    # ------------------------------------------------------------------------------------------------- calls
    def _take(self, limit: int) -> list[Message]:
        recv = self._socket.recv
        batch: list[Message] = []
        size_bytes = 0
        self._dry = False
        try:
            while len(batch) < limit and size_bytes < DRAIN_BYTES:
                frame = recv(_NOWAIT, copy=False)
                size_bytes += len(frame)
                message = [_part(frame)]
                while frame.more:  # all parts are there: libzmq delivers messages whole
                    frame = recv(_NOWAIT, copy=False)
                    size_bytes += len(frame)
                    message.append(_part(frame))
                batch.append(message)
                # One message per wake-up is the common case. Asking for EVENTS (4 us) then costs less than the
                # zmq.Again that would end the loop (10 us: the exception formats strerror()).
                if len(batch) == 1 and not self._events() & IN:
                    self._dry = True
                    break
        except zmq.Again:
            self._dry = True
        except zmq.ZMQError as exc:
            if not batch:  # else the next call meets it again: what was read is delivered first
                raise _translated(exc) from exc
        finally:
            self._recheck()
        return batch

    def _put(self, parts: list[SendablePart]) -> None:
        send = self._socket.send
        last = len(parts) - 1
        index = 0
        self._dry = False
        try:
            for index, part in enumerate(parts):
                send(part, _NOWAIT if index == last else _NOWAIT_MORE)
        except zmq.Again:
            # The high-water mark stops a message at its first part. Later on it means that the connection went away
            # in between: libzmq has dropped the message, and drops what follows up to a last part (lb.cpp).
            if 0 < index < last:
                send(parts[last], _NOWAIT)
            raise WouldBlock from None
        except zmq.ZMQError as exc:
            if exc.errno == zmq.EHOSTUNREACH:
                raise PeerUnreachable(bytes(parts[0])) from None
            raise _translated(exc) from exc
        finally:
            self._recheck()

    def _events(self) -> int:
        return cast(int, self._socket.get(zmq.EVENTS))

    def _writable(self) -> bool:
        return bool(self._poll() & OUT)

    # ----------------------------------------------------------------------------------------------- waiting
    def _recheck(self) -> None:
        """To be called after every libzmq call: it may have swallowed the signal that a parked task sleeps for."""
        if self._watcher or self._others:
            self._poll()

    def _poll(self) -> int:
        """Read EVENTS and wake the parked tasks if one of them can go on."""
        try:
            ready = self._events()
        except zmq.ZMQError:
            ready = IN | OUT  # closed or terminated behind our back: let everybody find out
        self._dry = not ready & IN
        wanted = self._watcher
        for flag in self._others.values():
            wanted |= flag
        if ready & wanted:
            self._rescues += 1
            self._wake()
        return ready

    async def _park(self, flag: int) -> None:
        if self._closed:
            raise ClosedResourceError
        self._waits += 1
        if self._watcher:
            await self._queue_up(flag)
        else:
            self._watcher = flag
            try:
                await wait_readable(self._descriptor)
            except ClosedResourceError:
                pass  # closed, or only woken: told apart below
            finally:
                self._watcher = 0
                self._dry = False
                self._wake_others()  # one of them takes over the descriptor
        if self._closed:  # wait_readable() may also return normally after a close (trio #3520)
            raise ClosedResourceError

    async def _queue_up(self, flag: int) -> None:
        turn = Event()
        self._others[turn] = flag
        try:
            await turn.wait()
        finally:
            del self._others[turn]
            self._dry = False

    def _wake(self) -> None:
        self._wake_others()
        if self._watcher:
            notify_closing(self._descriptor)  # closes nothing: it makes wait_readable() raise

    def _wake_others(self) -> None:
        for turn in self._others:
            turn.set()

    def _shut(self) -> None:
        if self._monitor is not None:
            self._monitor.close()  # else ending the context would take the descriptor from under its reader
        self._socket.close(linger=0)


def _part(frame: zmq.Frame) -> ReceivedPart:
    return frame.bytes if len(frame) < _COPY_BELOW_BYTES else frame.buffer


def _translated(exc: zmq.ZMQError) -> Exception:
    if exc.errno in (zmq.ENOTSOCK, zmq.ETERM):
        return ClosedResourceError()
    return BrokenResourceError(str(exc))
