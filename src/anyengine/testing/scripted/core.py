"""A scripted engine without I/O: a script and messages in, actions out.

Owns the order of everything an engine does. No socket, no clock: whoever drives it performs the actions one after the
other, tells it what came, and wakes it when its deadline has passed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec

from . import messages
from .calls import Calls
from .generation import Generation
from .records import Record
from .script import SPOILS, End, Fault, Script, StartupStage

__all__ = [
    "Acquire",
    "Action",
    "Close",
    "Connect",
    "Ended",
    "Hang",
    "Log",
    "Report",
    "ScriptedCore",
    "Send",
    "Serve",
    "Sleep",
]

SocketName: TypeAlias = Literal["handshake", "input", "output"]
_KINDS = {b"\x00": "add", b"\x01": "abort", b"\x03": "utility"}


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take what the script says of the machine: lock file, shared memory, grandchildren."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect a socket; ``address`` is ``None`` for the handshake, which the driver knows."""

    socket: SocketName
    address: str | None = None


@dataclass(frozen=True, slots=True)
class Send:
    socket: SocketName
    payload: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """What was sent before still arrives."""

    socket: SocketName


@dataclass(frozen=True, slots=True)
class Report:
    """A status line; ``error`` is the type and the text of an exception."""

    stage: str
    error: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Log:
    text: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Neither read nor write for so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Serve:
    """From now on a signal is an orderly end: before READY goes out, since whoever has it may send one at once."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Neither read nor write any more."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end: by ``signal``, at once; or with ``exit_code``, behind everything that was sent."""

    exit_code: int = 0
    signal: str | None = None


Action: TypeAlias = Acquire | Connect | Send | Close | Report | Log | Sleep | Serve | Hang | Ended


class ScriptedCore:
    """See the module. Lifetime: one engine. Each method returns what is to be done now, in order."""

    def __init__(
        self, script: Script, rank: int, *, local: bool = True, headless: bool = False, log: Callable[[Record], None]
    ) -> None:
        self._script = script
        self._rank = rank
        self._says = {"local": local, "headless": headless}
        self._log = log
        self._actions: list[Action] = []
        self._received: dict[str | None, int] = {}
        self._sent: dict[str | None, int] = {}
        self._connected: set[SocketName] = set()
        self._timers: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_timers = 0
        self._deaf = self._mute = self._stopped = self._stopping = False
        self._read_after_s = -math.inf
        self._now_s = 0.0
        registration = messages.registration(script.version, rank, script.registration)
        self._registration = messages.pack(registration)
        self._generation = Generation(script, registration.get("max_model_len", 2048), self._note_scheduled)
        self._calls = Calls(script, self._generation, self._abort_all)

    # ----------------------------------------------------------------------------------------- for the driver

    def start(self, now_s: float) -> list[Action]:
        """Everything up to HELLO."""
        self._now_s = now_s
        for name in ("importing", "configuring"):
            self._enter(name)
        self._act(Acquire())
        self._enter("hello", reported="handshake")
        self._act(Connect("handshake"))
        self._send("handshake", "hello", messages.pack({"status": "HELLO", **self._says}))
        return self._done()

    def receive(self, socket: SocketName, frames: Sequence[bytes], now_s: float) -> list[Action]:
        """One message."""
        self._now_s = now_s
        self._read_after_s = now_s + self._script.read_interval_s
        kind = "init" if socket == "handshake" else _KINDS.get(bytes(frames[0]), "unknown")
        body = _decoded(frames[-1] if socket == "handshake" else frames[1] if len(frames) > 1 else b"\xc0")
        method = body[2] if kind == "utility" and isinstance(body, list) and len(body) > 2 else kind
        number = self._count(self._received, {kind, method})
        self._log(Record("in", number, kind, body, now_s, self._rank))
        faults = self._faults("in", self._received, {kind, method})
        self._apply(faults, "before")
        if not self._deaf and not self._stopped:
            self._take(kind, body)
        self._apply(faults, "after")
        return self._done()

    def wake(self, now_s: float) -> list[Action]:
        """Whatever is due."""
        self._now_s = now_s
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2](now_s)
        outputs = self._generation.step(now_s)
        strays = [messages.token_output(f"stray-{number}", [1]) for number in range(self._script.stray_outputs)]
        if outputs:
            self._send_outputs(outputs + strays)
            self._answer(self._calls.settled())
        return self._done()

    def terminate(self, now_s: float) -> list[Action]:
        """SIGTERM, or the end of the host."""
        self._now_s = now_s
        if not self._script.ignore_sigterm and not self._stopping:
            self._stopping = True
            self._at(now_s + self._script.shutdown_delay_s, self._shut_down)
        return self._done()

    def deadline_s(self) -> float:
        """When :meth:`wake` is due; infinite: not before something comes."""
        due_s = self._generation.due_s()
        return min(due_s, self._timers[0][0]) if self._timers else due_s

    def reads_after_s(self) -> float:
        """From when on it reads its input; infinite: never again."""
        return math.inf if self._deaf else self._read_after_s

    # ------------------------------------------------------------------------------------------------ start-up

    def _enter(self, name: str, *, reported: str | None = None) -> None:
        stage = next((stage for stage in self._script.startup if stage.name == name), None)
        if stage is not None or reported is not None:
            self._act(Report(reported or name))
        if stage is not None:
            self._pass(stage)

    def _pass(self, stage: StartupStage) -> None:
        if stage.delay_s:
            self._act(Sleep(stage.delay_s))
        if stage.log:
            self._act(Log(stage.log))
        if stage.hang:
            self._stop(Hang())
        if stage.end is not None:
            self._end(stage.end)

    def _take_init(self, body: Any) -> None:
        addresses = body["addresses"]
        self._enter("loading")
        self._enter("register")
        self._act(Connect("input", addresses["inputs"][0]))
        self._act(Connect("output", addresses["outputs"][0]))
        self._send("input", "registration", self._registration)
        self._enter("ready")
        self._act(Serve())
        self._send("handshake", "ready", messages.pack({"status": "READY", **self._says}))
        self._act(Report("ready"))

    # ------------------------------------------------------------------------------------------------- serving

    def _take(self, kind: str, body: Any) -> None:
        if kind == "init":
            self._take_init(body)
        elif kind == "add" and self._stopping:
            self._send_outputs([messages.token_output(body[0], [], "abort")])
        elif kind == "add":
            self._generation.add(body, self._now_s)
        elif kind == "abort" and self._script.aborts == "obey":
            self._at(self._now_s + self._script.abort_delay_s, lambda now_s: self._abort(body, now_s))
        elif kind == "utility":
            _, call_id, method, args = body
            if self._stopping:
                self._answer([(0.0, [call_id, "Server shutting down", None])])
            else:
                self._answer(self._calls.answer(call_id, method, args, self._now_s))

    def _abort(self, request_ids: Sequence[str], now_s: float) -> None:
        found = self._generation.remove(request_ids, now_s)
        for _ in range(self._script.outputs_after_abort):
            self._send_outputs([messages.token_output(one, [1]) for one in found])
        for _ in range(self._script.abort_answers):
            self._send_outputs([messages.token_output(one, [], "abort") for one in found])
        self._answer(self._calls.settled())

    def _abort_all(self, now_s: float) -> None:
        found = self._generation.remove(self._generation.live, now_s)
        self._send_outputs([messages.token_output(one, [], "abort") for one in found])

    def _shut_down(self, now_s: float) -> None:
        self._abort_all(now_s)
        self._stop(Ended())

    def _answer(self, answers: Sequence[tuple[float, Sequence[Any]]]) -> None:
        for delay_s, output in answers:
            if delay_s:
                self._at(self._now_s + delay_s, partial(self._send_reply, output))
            else:
                self._send_reply(output, self._now_s)

    def _send_reply(self, output: Sequence[Any], now_s: float) -> None:
        self._send("output", "reply", messages.reply(self._rank, output, now_s))

    def _send_outputs(self, outputs: Sequence[Any]) -> None:
        groups = [outputs] if self._script.merge_requests else [[output] for output in outputs]
        for group in filter(None, groups):
            load, weights = self._generation.load(), self._calls.weights
            self._send("output", "outputs", messages.batch(self._rank, group, self._now_s, load, weights))

    def _at(self, due_s: float, action: Callable[[float], None]) -> None:
        if due_s <= self._now_s:
            action(self._now_s)
        else:
            self._num_timers += 1
            heapq.heappush(self._timers, (due_s, self._num_timers, action))

    def _note_scheduled(self, request_id: str) -> None:
        self._log(Record("event", 0, "scheduled", request_id, self._now_s, self._rank))

    # ------------------------------------------------------------------------------------- messages and faults

    def _send(self, socket: SocketName, kind: str, payload: bytes) -> None:
        if self._stopped:
            return
        number = self._count(self._sent, {kind})
        if self._script.log_outputs:
            self._log(Record("out", number, kind, _decoded(payload), self._now_s, self._rank))
        faults = self._faults("out", self._sent, {kind})
        self._apply(faults, "before")
        for one in _spoilt(payload, faults, self._rank):
            if not self._mute:
                self._act(Send(socket, one))
        self._apply(faults, "after")

    @staticmethod
    def _count(counts: dict[str | None, int], kinds: set[str]) -> int:
        for name in (None, *kinds):
            counts[name] = counts.get(name, 0) + 1
        return counts[None]

    def _faults(self, direction: str, counts: dict[str | None, int], kinds: set[str]) -> list[Fault]:
        found = [
            fault
            for fault in self._script.faults
            if fault.direction == direction and fault.kind in (None, *kinds) and counts[fault.kind] == fault.nth
        ]
        for fault in found:
            self._log(Record("event", 0, "fault", fault.do, self._now_s, self._rank))
        return found

    def _apply(self, faults: Sequence[Fault], when: str) -> None:
        for fault in faults:
            if fault.when == when and fault.do not in SPOILS:
                self._suffer(fault)

    def _suffer(self, fault: Fault) -> None:
        match fault.do:
            case "kill":
                self._stop(Ended(signal=fault.signal))
            case "exit":
                self._stop(Ended(fault.exit_code))
            case "hang":
                self._stop(Hang())
            case "sleep":
                self._act(Sleep(fault.seconds))
            case "deaf":
                self._deaf = True
            case "mute":
                self._mute = True
            case "close_input":
                self._deaf = True
                self._act(Close("input"))
            case "close_output":
                self._mute = True
                self._act(Close("output"))
            case "dead" | "dead_exit":
                self._act(Send("output", messages.ENGINE_CORE_DEAD))
                self._stop(Hang() if fault.do == "dead" else Ended(fault.exit_code))

    def _end(self, end: End) -> None:
        if end.log:
            self._act(Log(end.log))
        if end.error is not None:
            kind, _, text = end.error.partition(": ")
            self._act(Report("failed", (kind, text)))
        self._stop(Ended(end.exit_code, end.signal))

    def _stop(self, action: Action) -> None:
        self._act(action)
        self._stopped = True

    def _act(self, action: Action) -> None:
        if self._stopped:
            return
        if isinstance(action, Connect):
            self._connected.add(action.socket)
        elif isinstance(action, Close | Send) and action.socket not in self._connected:
            return
        elif isinstance(action, Close):
            self._connected.remove(action.socket)
        self._actions.append(action)

    def _done(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions


def _spoilt(payload: bytes, faults: Sequence[Fault], rank: int) -> list[bytes]:
    """The messages that go out in place of this one."""
    sent = [payload]
    for fault in faults:
        match fault.do:
            case "garbage":
                sent = [b"\xc1garbage"]
            case "truncate":
                sent = [payload[: len(payload) // 2]]
            case "mistype":
                sent = [messages.pack([rank, "outputs", 5, "now", {}])]
            case "empty":
                sent = [b""]
            case "drop":
                sent = []
            case "duplicate":
                sent = sent * 2
            case "huge":
                sent = [messages.batch(rank, [["huge", [1] * fault.size_bytes]], 0.0), *sent]
            case _:
                pass
    return sent


def _decoded(payload: bytes) -> Any:
    """What a message says, as far as it can be read."""
    try:
        return messages.unpack(payload)
    except (msgspec.DecodeError, RecursionError):
        return bytes(payload)
