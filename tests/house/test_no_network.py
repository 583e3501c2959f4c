"""Running an engine needs no network: what both processes open, as Python sees it and as the kernel sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Found by every Python process that inherits the path: the host and the engine.
SITE = """
import os, sys

def note(event, arguments):
    internet = event in {"socket.connect", "socket.bind", "socket.sendto"} and isinstance(arguments[1], tuple)
    if internet or event.startswith(("socket.getaddr", "socket.gethost", "urllib.")):
        with open(os.environ["NETWORK_LOG"], "a") as log:
            log.write(f"{os.getpid()} {event} {arguments}\\n")

sys.addaudithook(note)
"""

RUN = """
import anyio, psutil, socket, sys
from anyengine import EmbeddedEngine, EngineClient, SamplingParams

ENGINE = EmbeddedEngine(runner="anyengine.testing.toy_runner:create_runner")

async def main():
    async with EngineClient(engine=ENGINE) as client:
        async for out in client.generate([1, 2, 3], SamplingParams(max_tokens=3)):
            host = psutil.Process()
            processes = [host, *host.children(recursive=True)]
            assert len(processes) > 1
            print([connection for process in processes for connection in process.net_connections("inet")])
    if sys.argv[1:] == ["control"]:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM).bind(("127.0.0.1", 0))

anyio.run(main, backend="trio")
"""


@pytest.mark.feature("F23")
@pytest.mark.parametrize("control", [False, True], ids=["run", "control"])
def test_a_run_opens_no_internet_socket(control: bool, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    log = tmp_path / "network.log"
    log.touch()
    environment = {
        **os.environ,
        "NETWORK_LOG": str(log),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]),
    }
    command = [sys.executable, "-c", RUN, *(["control"] if control else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"[]"}
    assert bool(log.read_text()) is control
