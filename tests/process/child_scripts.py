"""Small children for the process tests: scripts for a bare interpreter, and how to wait for the end of any process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import anyio

from anyengine._process.child import ChildProcess

__all__ = ["FORK", "PATIENCE_S", "Start", "Transcript", "wait_gone", "watching"]

PATIENCE_S = 30.0

Start: TypeAlias = Callable[..., ChildProcess]

FORK = """
import os, signal, sys
def fork(run):  # a grandchild that runs `run`; its id goes out on standard output, once it is there
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(w, b"x")
        run()
        os._exit(0)
    os.read(r, 1)
    os.write(1, b"%d\\n" % pid)
def flood():
    while True:
        os.write(2, b"grandchild\\n" * 100)
"""


class Transcript:
    """What a child said, line by line."""

    def __init__(self) -> None:
        self.stdout: list[bytes] = []
        self.stderr: list[str] = []
        self._more = anyio.Event()

    def take_stdout(self, line: bytes) -> None:
        self.stdout.append(line)
        self._more.set()

    def take_stderr(self, line: str) -> None:
        self.stderr.append(line)
        self._more.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._more = anyio.Event()
            await self._more.wait()

    async def watch(self, child: ChildProcess) -> None:
        with anyio.fail_after(PATIENCE_S):
            await child.watch(self.take_stdout, self.take_stderr)


@contextmanager
def watching() -> Iterator[Start]:
    """Starts children that run a script; whatever the test does, they are gone afterwards."""
    children: list[ChildProcess] = []

    def start(script: str, **options: object) -> ChildProcess:
        settings: dict[str, object] = {"stdin_line": b"hello\n", **options}
        child = ChildProcess([sys.executable, "-S", "-E", "-c", script], **settings)  # type: ignore[arg-type]
        children.append(child)
        return child

    try:
        yield start
    finally:
        for child in children:
            child.reap()


async def wait_gone(pid: int) -> None:
    """Wait until a process that need not be our child has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with anyio.fail_after(PATIENCE_S):
            await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)
