"""Our engine core with a toy model and one fault at a time: ``mutant_engine.py [FAULT OF START OR END]``.

The utility call ``mutate`` chooses a fault of ``mutations.py`` (``""``: none).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from engines import RUNNER
from mutations import FRAMES, INCOMING, OUTGOING, UTILITY, Message, memory

from anyengine._protocol.handshake import EngineHandshake
from anyengine._wire import Dialect, EngineCoreOutput
from anyengine.config import EmbeddedEngine
from anyengine.engine import __main__ as engine_main
from anyengine.engine import start as engine_start
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.core.pausing import PauseGate
from anyengine.engine.serving import busy_loop, io_threads, lifeline, server
from anyengine.engine.serving.malformed import Malformed

active = ""


def _hook_traffic() -> None:
    decode, send, encode = io_threads.decode_command, io_threads.OutputThread.send, io_threads.encode_outputs

    def decode_input(dialect: Any, frames: list[bytes], *, input_index: int) -> Any:
        if active in INCOMING:
            try:
                raw = msgspec.msgpack.decode(frames[1])
            except (msgspec.DecodeError, IndexError):
                raw = None
            changed = INCOMING[active](frames[0], raw, frames)
            if changed is None:
                changed = [b"\x01", b"\x90"]  # an abort of nobody
            frames = changed
        return decode(dialect, frames, input_index=input_index)

    def send_output(self: Any, client: int, message: Message, *, method: str = "") -> None:
        outgoing = OUTGOING.get(active, lambda client, message: None)(client, message)
        for target, item in [(client, message)] if outgoing is None else outgoing:
            send(self, target, item, method=method)

    def encode_frames(dialect: Any, message: Message, method: str) -> list[Any]:
        frames = encode(dialect, message, method)
        if active == "surplus frame":
            return [*frames, b"surplus"]
        if active in FRAMES:
            return [msgspec.msgpack.encode(FRAMES[active](msgspec.msgpack.decode(frames[0]))), *frames[1:]]
        return frames

    io_threads.decode_command = decode_input
    io_threads.OutputThread.send = send_output  # type: ignore[method-assign]
    io_threads.encode_outputs = encode_frames


def _hook_core() -> None:
    add, utility, abort, pause = EngineCore.add, EngineCore.utility, EngineCore.abort, PauseGate.pause

    def add_request(self: EngineCore, request: Any) -> None:
        if active == "an error ends all" and request.sampling_params and request.sampling_params.max_tokens is None:
            self.abort_all()
        add(self, request)

    def call(self: EngineCore, method: str, args: Sequence[Any]) -> Any:
        global active
        if method == "mutate":
            memory.clear()
            (active,) = args
            return None
        fault = UTILITY.get(active, lambda called, args, proceed: proceed())
        return fault(method, args, lambda: utility(self, method, args))

    def abort_requests(self: EngineCore, request_ids: Sequence[str]) -> None:
        if active == "aborts are answered":
            for request_id in request_ids:
                if request_id in self._live:
                    live = self._live[request_id]
                    self._unsent.append((live.client_index, EngineCoreOutput(request_id, [], finish_reason=2)))
                    self._forget(request_id)
        elif active == "aborts end the batch" and any(request_id in self._live for request_id in request_ids):
            self.abort_all()
        elif active == "waiting is not aborted":
            abort(self, [i for i in request_ids if i not in self._live or self._live[i].scheduled])
        else:
            abort(self, request_ids)

    def pause_gate(self: PauseGate, mode: Any, *, refuse_new: bool) -> Any:
        if (active, mode) in {("keep is wait", "keep"), ("wait is keep", "wait")}:
            mode = active.split()[-1]
        return pause(self, mode, refuse_new=refuse_new or active == "a pause refuses")

    EngineCore.add = add_request  # type: ignore[method-assign]
    EngineCore.utility = call  # type: ignore[method-assign]
    EngineCore.abort = abort_requests  # type: ignore[method-assign]
    PauseGate.pause = pause_gate  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------------------- start and end


def _registration(*missing: str, **changes: Any) -> None:
    """Register with these keys left out, and these changed."""
    encode = Dialect.encode_ready

    def changed(self: Dialect, response: Any) -> bytes:
        fields = {**msgspec.msgpack.decode(encode(self, response)), **changes}
        return msgspec.msgpack.encode({name: value for name, value in fields.items() if name not in missing})

    Dialect.encode_ready = changed  # type: ignore[method-assign]


def _hello(**fields: Any) -> None:
    greet = EngineHandshake.hello

    def hello(self: EngineHandshake) -> bytes:
        greet(self)
        return msgspec.msgpack.encode({"status": "HELLO", **fields})

    EngineHandshake.hello = hello  # type: ignore[method-assign]


def _greet_with(before: bytes | None, after: bytes | None) -> None:
    """Say more on the handshake socket, before HELLO or after INIT."""
    greet, send = server._greet, zmq.Socket.send

    def say(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None and b"HELLO" in bytes(data):
            send(self, before)
        return send(self, data, *args, **kwargs)

    def greet_more(socket: Any, *args: Any, **kwargs: Any) -> Any:
        greeted = greet(socket, *args, **kwargs)
        if after is not None:
            socket.send(after)
        return greeted

    server._greet, zmq.Socket.send = greet_more, say


def _registers(*, twice: bool) -> None:
    work = io_threads.InputThread._work

    def changed(self: Any, sockets: list[Any]) -> None:
        for index, socket in enumerate(sockets):
            if twice:
                socket.send(self._registration)
            elif index:
                socket.send(self._registration.replace(b"toy", b"yot"))
        work(self, sockets)

    io_threads.InputThread._work = changed  # type: ignore[method-assign]


def _on_malformed(how: str) -> None:
    """Deaf: the input thread ends. Dead: the main loop raises."""
    decode, work = io_threads.decode_command, io_threads.InputThread._work

    class Deaf(BaseException):
        pass

    def decode_or_end(dialect: Any, frames: list[bytes], *, input_index: int) -> Any:
        command = decode(dialect, frames, input_index=input_index)
        if isinstance(command, Malformed) and how == "dead":
            return io_threads.ThreadFailed(RuntimeError("malformed input"))
        if isinstance(command, Malformed):
            raise Deaf
        return command

    def work_until_deaf(self: Any, sockets: list[Any]) -> None:
        with contextlib.suppress(Deaf):
            work(self, sockets)

    io_threads.decode_command = decode_or_end
    io_threads.InputThread._work = work_until_deaf  # type: ignore[method-assign]


def _mute_on_bad_client() -> None:
    loop = busy_loop.BusyLoop

    def reply_to_anyone(self: Any, client_index: int) -> bool:
        if client_index > 1:
            self._output._commands = type("Nowhere", (), {"put": lambda self, item: None})()
        return True

    loop._is_client = reply_to_anyone  # type: ignore[method-assign]


def _leave_a_child() -> None:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(60)
        os._exit(0)


def _end_with(code: int) -> None:
    run = engine_start.run_engine
    engine_start.run_engine = lambda *args, **kwargs: run(*args, **kwargs) or code


def _last_word() -> None:
    stop = io_threads.OutputThread.stop

    def changed(self: Any) -> None:
        self.send_dead()
        stop(self)

    io_threads.OutputThread.stop = changed  # type: ignore[method-assign]


def _no_ready() -> None:
    EngineHandshake.ready = lambda self: msgspec.msgpack.encode({"status": "BUSY"})  # type: ignore[method-assign]


def _forget_all(core: EngineCore) -> None:
    for request_id in list(core._live):
        core._forget(request_id)


READY = msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False})
FAULTS = {
    "": lambda: None,
    "wrong identity": lambda: setattr(server, "engine_identity", lambda rank: b"\x00\x01"),
    "hello without headless": lambda: _hello(local=True),
    "not local": lambda: setattr(server, "EngineHandshake", lambda **_: EngineHandshake(local=False, headless=True)),
    "early ready": lambda: _greet_with(READY, None),
    "surplus handshake": lambda: _greet_with(None, msgspec.msgpack.encode({"status": "LOADING"})),
    "registers twice": lambda: _registers(twice=True),
    "misses keys": lambda: _registration("block_size", "dtype"),
    "max_model_len 0": lambda: _registration(max_model_len=0),
    "torch.float32": lambda: _registration(dtype="torch.float32"),
    "wrong rank": lambda: _registration(data_parallel_rank=5),
    "no ready": _no_ready,
    "exit": lambda: os._exit(3),
    "deaf": lambda: _on_malformed("deaf"),
    "dead": lambda: _on_malformed("dead"),
    "mute": _mute_on_bad_client,
    "exit code 3": lambda: _end_with(3),
    "last word": _last_word,
    "leaves a child": _leave_a_child,
    "no last outputs": lambda: setattr(EngineCore, "abort_all", _forget_all),
    "ignores the end of its host": lambda: setattr(lifeline.Lifeline, "_host_is_gone", lambda self: time.sleep(60)),
}


def main() -> int:
    _hook_traffic()
    _hook_core()
    config = EmbeddedEngine(runner=RUNNER, runner_options={"step_delay_s": 0.0005}, max_num_seqs=64)
    engine_start.EmbeddedEngine = lambda: config  # type: ignore[assignment,misc]
    FAULTS[sys.argv[1] if len(sys.argv) > 1 else ""]()
    return engine_main.main()


if __name__ == "__main__":
    sys.exit(main())
