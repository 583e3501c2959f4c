"""Our engine core as a person starts it, and vLLM's two front ends in front of it, each in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["AsyncLLMChild", "RustFrontend", "attached_engine", "free_port"]

DEADLINE_S = 240.0
"""For each thing that is waited for. vLLM takes 10 s to import on an idle machine, and a minute on a busy one."""
GRACE_S = "1"
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def attached_engine(model: Path | str, port: int, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """``anyengine engine``, killed at the end if it is still there."""
    command = [sys.executable, "-m", "anyengine.cli", "engine", str(model), "--handshake", f"tcp://127.0.0.1:{port}"]
    command += ["--num-threads", "1", "--reconnect-grace", GRACE_S, *options]
    with (
        log.open("wb") as stderr,
        _ended(subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)) as process,
    ):
        yield process


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class AsyncLLMChild:
    """vLLM's AsyncLLM (``async_llm_child.py``): commands in, events out."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log
        self._buffer = b""
        self.outputs: dict[str, list[dict[str, Any]]] = defaultdict(list)
        """All outputs of each request, from the first to the last."""

    @classmethod
    @contextmanager
    def started(cls, python: str, model: Path, port: int, log: Path, **args: Any) -> Iterator[AsyncLLMChild]:
        """Waits for an engine at ``port`` of this host."""
        script = Path(__file__).with_name("async_llm_child.py")
        settings = {
            "model": str(model), "data_parallel_size_local": 0, "data_parallel_address": "127.0.0.1",
            "data_parallel_rpc_port": port, "enforce_eager": True, "dtype": "float32", **args,
        }  # fmt: skip
        with log.open("wb") as stderr, tempfile.TemporaryDirectory(prefix="ae-") as private:
            process = subprocess.Popen(
                [python, str(script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **OFFLINE, "VLLM_RPC_BASE_PATH": private, "TMPDIR": private},
            )
            with _ended(process):
                yield cls(process, log)
                assert process.stdin is not None
                process.stdin.close()  # and it shuts down, with its coordinator
                process.wait(DEADLINE_S)

    def send(self, do: str, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}).encode() + b"\n")
        self.process.stdin.flush()

    def generate(self, request_id: str, prompt: list[int], *, leave_after: int = 0, **params: Any) -> None:
        params = {"temperature": 0.0, **params}
        self.send("generate", request_id=request_id, prompt=prompt, params=params, leave_after=leave_after)

    def call(self, name: str, *args: Any) -> Any:
        """The result of a method of AsyncLLM, or what it raised, as text."""
        self.send("call", name=name, args=args)
        while (event := self.next_event())["event"] != "result":
            pass
        return f"{event['type']}: {event['error']}" if "error" in event else event["result"]

    def statistics(self) -> dict[str, int]:
        """Our engine's own counts."""
        counts: dict[str, int] = self.call("core.call_utility_async", "get_engine_statistics")
        return counts

    def next_event(self) -> dict[str, Any]:
        """The next one; outputs are kept in :attr:`outputs`, too."""
        assert self.process.stdout is not None
        deadline_s = time.monotonic() + DEADLINE_S
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, deadline_s - time.monotonic()))
            assert ready, f"AsyncLLM says nothing:\n{self._log.read_text()[-4000:]}"
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            assert chunk, f"AsyncLLM has ended:\n{self._log.read_text()[-4000:]}"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "output":
            self.outputs[event["id"]].append(event)
        return event

    def wait_for(self, kind: str, *request_ids: str) -> dict[str, Any]:
        """Until there has been an event of ``kind`` for all of them (or one without an id); the last of these."""
        pending = set(request_ids)
        while True:
            event = self.next_event()
            if event["event"] == kind:
                pending.discard(event.get("id", ""))
                if not pending:
                    return event
            assert event["event"] not in ("dead", "failed"), event

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output["token_ids"]]


class RustFrontend:
    """``vllm-rs serve`` without engines of its own."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, model: str, log: Path) -> None:
        self.process = process
        self.port = port
        self._model = model
        self._log = log

    @classmethod
    @contextmanager
    def started(cls, executable: str, model: Path, handshake_port: int, log: Path) -> Iterator[RustFrontend]:
        port = free_port()
        command = [executable, "serve", str(model), "--port", str(port), "--data-parallel-size-local", "0"]
        command += ["--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(handshake_port)]
        environment = {**os.environ, **OFFLINE, "VLLM_SERVER_DEV_MODE": "1"}
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr, env=environment)
            with _ended(process):
                yield cls(process, port, str(model), log)

    def wait_until_it_serves(self) -> None:
        """Its port opens when the engine has connected."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                assert self.get("/health")[0] == 200
            except OSError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline_s, self._log.read_text()
                time.sleep(0.1)
            else:
                return

    def get(self, path: str) -> tuple[int, str]:
        return self._request("GET", path, None)

    def post(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        return self._request("POST", path, body)

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        """The answer of ``/v1/completions``."""
        status, text = self.post("/v1/completions", self._body(prompt, options))
        assert status == 200, text
        answer: dict[str, Any] = json.loads(text)
        return answer

    @contextmanager
    def stream(self, prompt: str | list[int], **options: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The events of a streamed completion; the connection is closed at the end of the block."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            body = json.dumps(self._body(prompt, {"stream": True, **options}))
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                assert response.status == 200
                lines = (line.removeprefix(b"data: ").strip() for line in response)
                yield (json.loads(line) for line in lines if line and line != b"[DONE]")
        finally:
            connection.close()

    def running_requests(self) -> float:
        """What our engine last said of its load, as the front end shows it."""
        _status, text = self.get("/metrics")
        (line,) = (line for line in text.splitlines() if line.startswith("vllm:num_requests_running{"))
        return float(line.rpartition(" ")[2])

    def wait_for_running_requests(self, number: int) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.running_requests() != number:
            assert time.monotonic() < deadline_s, f"{self.running_requests()} requests run, not {number}"
            time.sleep(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def _body(self, prompt: str | list[int], options: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "temperature": 0, **options}

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()
