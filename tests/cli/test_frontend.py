"""``anyengine frontend``, started as ``vllm serve`` starts it: sockets by number, engines that register, SIGTERM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from remote_peers import RemotePeers

from anyengine import InheritedEngine
from anyengine.cli.entry import main
from anyengine.cli.frontend import load_application, parse_frontend_arguments
from anyengine.vllm.arguments import UnderstoodArguments

pytestmark = pytest.mark.blocking_ok

LIMIT_S = 60

APPLICATION = """
import json
import anyio
from anyengine import SamplingParams

async def serve(client, listener, args):
    async def answer(connection):
        async with connection:
            question = json.loads(await connection.receive())
            stream = client.generate(question, SamplingParams(max_tokens=10))
            tokens = [token async for output in stream for token in output.token_ids]
            await connection.send(json.dumps({"tokens": tokens, "seed": args["seed"]}).encode())
    try:
        async with await anyio.abc.SocketListener.from_socket(listener) as connections:
            await connections.serve(answer)
    finally:
        print("cancelled", flush=True)

async def fail(client, listener, args):
    raise LookupError("no such customer")

async def leave(client, listener, args):
    pass

def blocking(client, listener, args):
    return 5

def too_few(client):
    pass

word = "serve"
"""


class Parent:
    """Binds three sockets and starts the front end with them, and with engines that have registered or will."""

    def __init__(self, directory: Path, transport: str, undo: ExitStack) -> None:
        self._undo = undo
        self.directory = directory
        (directory / "application.py").write_text(APPLICATION)
        self._sockets = [self._bound(transport, name) for name in ("http", "inputs", "outputs")]
        for zmq_socket in self._sockets[1:]:
            zmq_socket.listen()
        self.peers = undo.enter_context(RemotePeers())

    def _bound(self, transport: str, name: str) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX if transport == "ipc" else socket.AF_INET)
        bound.bind(str(self.directory / name) if transport == "ipc" else ("127.0.0.1", 0))
        return self._undo.enter_context(bound)

    def _address(self, index: int) -> str:
        name = self._sockets[index].getsockname()
        return f"ipc://{name}" if isinstance(name, str) else f"tcp://{name[0]}:{name[1]}"

    def start_engines(self, ranks: int) -> None:
        for rank in range(ranks):
            self.peers.start("serve", rank=rank, inputs=self._address(1), outputs=self._address(2))

    def start(self, *more: str, ranks: int = 1, **environment: str) -> subprocess.Popen[bytes]:
        listen, inputs, outputs = (str(bound.fileno()) for bound in self._sockets)
        command = [sys.executable, "-m", "anyengine.cli", "frontend", "--listen-fd", listen]
        command += ["--input-listener-fd", inputs, "--output-listener-fd", outputs, "--engine-start-index", "0"]
        command += ["--engine-count", str(ranks), "--data-parallel-size", str(ranks), *more]
        command += ["--args-json", '{"seed": 5, "model_tag": "m", "engine_ready_timeout_secs": 20}']
        process = subprocess.Popen(
            command,
            cwd=self.directory,
            env={**os.environ, "ANYENGINE_FRONTEND_APP": "application:serve", **environment},
            pass_fds=[bound.fileno() for bound in self._sockets],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._undo.callback(process.communicate)
        self._undo.callback(process.kill)
        return process

    def ask(self, prompt: list[int]) -> Any:
        """What the application answers: as soon as it listens, which is when the engines are ready."""
        name = self._sockets[0].getsockname()
        deadline_s = time.monotonic() + LIMIT_S
        while True:
            with socket.socket(self._sockets[0].family) as connection:
                connection.settimeout(LIMIT_S)
                try:
                    connection.connect(name)
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)
                    continue
                connection.sendall(json.dumps(prompt).encode())
                return json.loads(connection.recv(10_000))

    def wait_joined(self) -> None:
        """Wait until the front end has taken over a socket: libzmq greets whoever connects."""
        with socket.socket(self._sockets[1].family) as visitor:
            visitor.settimeout(LIMIT_S)
            visitor.connect(self._sockets[1].getsockname())
            assert visitor.recv(1) == b"\xff"


@pytest.fixture(params=["ipc", "tcp"])
def parent(request: pytest.FixtureRequest, private_temp_dir: Path) -> Iterator[Parent]:
    (directory := private_temp_dir / "p").mkdir()
    with ExitStack() as undo:
        yield Parent(directory, request.param, undo)
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


@pytest.mark.feature("D18")
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_application_answers_until_sigterm(parent: Parent, backend: str) -> None:
    more = ["--coordinator-address", "ipc:///nowhere", "--shiny-new-thing", "secret", "--args=secret", "--new=secret"]
    process = parent.start(*more, ranks=2, ANYENGINE_BACKEND=backend)
    parent.start_engines(2)
    answers = [parent.ask([1]) for _ in range(4)]
    assert all(answer["seed"] == 5 for answer in answers)
    assert sorted(answer["tokens"] for answer in answers) == [[0, 7]] * 2 + [[1, 7]] * 2
    process.terminate()
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, b"cancelled\n"), err.decode()
    assert b"--shiny-new-thing, --args, --new" in err
    assert b"secret" not in err
    assert all(peer.poll() is None for peer in parent.peers.processes)


@pytest.mark.parametrize("parent", ["ipc"], indirect=True)
class TestEnds:
    def test_sigterm_while_the_engines_load(self, parent: Parent) -> None:
        process = parent.start()
        parent.wait_joined()
        process.terminate()
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out, err) == (0, b"", b"")

    @pytest.mark.parametrize(
        ("name", "code", "words"),
        [
            ("fail", 1, "LookupError: no such customer"),
            ("leave", 0, ""),
            ("blocking", 1, "must name an async function; the one it names returned 5"),
        ],
    )
    def test_the_exit_code_tells_how_the_application_ended(
        self, parent: Parent, name: str, code: int, words: str
    ) -> None:
        process = parent.start(ANYENGINE_FRONTEND_APP=f"application:{name}")
        parent.start_engines(1)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (code, b"")
        assert words in err.decode()

    @pytest.mark.parametrize(
        ("environment", "words"),
        [
            ({"ANYENGINE_FRONTEND_APP": ""}, "ANYENGINE_FRONTEND_APP='' must name your application as module:function"),
            ({"ANYENGINE_FRONTEND_APP": "application"}, "module:function"),
            ({"ANYENGINE_FRONTEND_APP": "no_such_module:serve"}, "cannot be loaded: No module named 'no_such_module'"),
            ({"ANYENGINE_FRONTEND_APP": "application:none"}, "cannot be loaded: module 'application' has no attribute"),
            ({"ANYENGINE_FRONTEND_APP": "application:word"}, "not a function of (client, listener, args)"),
            ({"ANYENGINE_FRONTEND_APP": "application:too_few"}, "not a function of (client, listener, args)"),
            ({"ANYENGINE_BACKEND": "curio"}, "ANYENGINE_BACKEND='curio' must be asyncio or trio"),
        ],
    )
    def test_what_is_missing_is_said_before_anything_starts(
        self, parent: Parent, environment: dict[str, str], words: str
    ) -> None:
        process = parent.start(**environment)
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (2, b"")
        assert err.startswith(b"error: ")
        assert words in err.decode()


# ------------------------------------------------------------------------------------------------------- what is parsed


def arguments(args_json: Mapping[str, Any] | str) -> list[str]:
    text = args_json if isinstance(args_json, str) else json.dumps(args_json)
    descriptors = ["--listen-fd", "3", "--input-listener-fd", "4", "--output-listener-fd", "5"]
    return [*descriptors, "--engine-start-index", "2", "--engine-count", "3", "--args-json", text]


def test_what_the_parent_says_becomes_an_engine(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = str(tmp_path)
    options = parse_frontend_arguments(arguments({"model_tag": local, "engine_ready_timeout_secs": 7}))
    assert options.listen_fd == 3
    engine = options.engine()
    assert engine == InheritedEngine(input_fd=4, output_fd=5, ranks=3, start_rank=2, model_dir=local, args=engine.args)
    assert engine.understood == UnderstoodArguments(model=local)
    assert options.ready_timeout_s() == 7
    for args, model_dir in (
        ({}, None),
        ({"model_tag": "org/name"}, None),
        ({"model_tag": local, "model": local, "tokenizer": local}, local),
        ({"model": local, "tokenizer": "org/another"}, None),
    ):
        options = parse_frontend_arguments(arguments(args))
        assert options.engine().model_dir == model_dir
        assert options.ready_timeout_s() == 600
    assert "token ids" in caplog.text
    for args, known in (({}, None), ({"max_logprobs": "5"}, None), ({"max_logprobs": 5, "odd": [1]}, 5)):
        understood = parse_frontend_arguments(arguments(args)).engine().understood
        assert (understood and understood.max_logprobs) == known
    assert "max_logprobs='5' cannot be right" in caplog.text


@pytest.mark.parametrize(("args_json", "message"), [("{", "it is no JSON"), ("[]", "it is no JSON object")])
def test_senseless_arguments(args_json: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["frontend", *arguments(args_json)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_help_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in ((["frontend", "--help"], "ANYENGINE_FRONTEND_APP"), (["--help"], "frontend")):
        with pytest.raises(SystemExit) as caught:
            main(command)
        assert caught.value.code == 0
        assert words in capsys.readouterr().out


def test_an_application_may_be_an_attribute_of_an_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_application("os:path.join") is os.path.join
