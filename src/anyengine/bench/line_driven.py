"""Contestants: programs in processes of their own, asked and answering by lines of JSON.

Owns one conversation. What is asked, and what is started how, is each benchmark's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["Contestant", "ended_at_last"]


class Contestant:
    """A running program: it says a first line (``facts``), and then answers each line that it is given."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process
        self.facts: dict[str, Any] = self._read()

    def ask(self, task: dict[str, Any]) -> dict[str, Any]:
        """Its answer to ``task``.

        Raises:
            RuntimeError: it has ended.
        """
        assert self._process.stdin is not None, "it has a pipe"
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return self._read()

    def rest(self) -> None:
        """Stop its process group, which it leads, until :meth:`go_on`: engines that wait for work in a loop take a
        processor from whose turn it is. (Our own engine is no member, and waits in peace.)"""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo :meth:`rest`."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it has a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def ended_at_last(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """Ends ``process`` with the block: by the end of its input, if that is a pipe, by SIGTERM, at last by SIGKILL."""
    try:
        yield process
    finally:
        _signal(process, signal.SIGCONT)  # it may rest
        if process.stdin is None:
            process.terminate()
        else:
            process.stdin.close()  # no more lines: it ends
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        finally:
            _signal(process, signal.SIGKILL)  # whoever it has left behind
        if process.stdout is not None:
            process.stdout.close()


def _signal(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    """Tell the process group of ``process``, if it leads one."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
