"""``vllm serve`` itself, unmodified, as somebody else starts it: beside the client, or as the parent of a front end."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from vllm_engines import MAX_MODEL_LEN

__all__ = ["Launcher", "headless", "serving"]

_ARGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "64", "--max-model-len", str(MAX_MODEL_LEN))
_NO_WORKERS = ("--distributed-executor-backend", "uni")  # an engine that is its own worker starts in half the time
_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_PROGRAM = "from vllm.entrypoints.cli.main import main; main()"
_GRACE_S = 20.0
_END_S = 90.0  # on an idle machine: 10


class Launcher:
    """One ``vllm serve`` with all that it starts: a process group of its own, a directory of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def engines(self) -> list[psutil.Process]:
        """The engine cores, in the order of their ranks."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        named = {_title(child): child for child in children}
        return [named[title] for title in sorted(named) if title.startswith("VLLM::EngineCore")]

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]

    def freeze(self) -> None:
        """Let it not notice what becomes of its engines: it would end all when one dies."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """SIGTERM to the launcher, which ends the others; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"vllm serve does not end:\n{self.tail()}") from None


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.cmdline()[0]
    return ""


@contextmanager
def headless(python: str, model: Path, handshake: str, ranks: int = 1) -> Iterator[Launcher]:
    """``vllm serve --headless``: engine cores that connect to ``handshake``."""
    host, _, port = handshake.removeprefix("tcp://").rpartition(":")
    args = ["--headless", "--data-parallel-address", host, "--data-parallel-rpc-port", port]
    if ranks > 1:
        args += ["--data-parallel-size", str(ranks), "--data-parallel-size-local", str(ranks)]
    with serving(python, model, *args) as launcher:
        yield launcher


@contextmanager
def serving(python: str, model: Path, *args: str, env: Mapping[str, str] | None = None) -> Iterator[Launcher]:
    """``vllm serve MODEL``; everything of it is gone afterwards, whatever happened."""
    with tempfile.TemporaryDirectory(prefix="serve-", dir="/tmp", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        environment = {
            **os.environ,
            **_ENV,
            "TORCHINDUCTOR_CACHE_DIR": name,
            "TMPDIR": name,
            "VLLM_RPC_BASE_PATH": name,
            "PYTHONPATH": str(_metadata_of_cpu_build(python, directory / "meta")),
            **(env or {}),
        }
        log = directory / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [python, "-c", _PROGRAM, "serve", str(model), *_ARGS, *_NO_WORKERS, *args],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        try:
            yield Launcher(process, log)
        finally:
            _end(process)


def _metadata_of_cpu_build(python: str, directory: Path) -> Path:
    """The build for CPUs is a package of another name, and ``vllm serve`` asks for the version of ``vllm``; the suffix
    is how vLLM knows what it was built for."""
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    version = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True).stdout.strip()
    info = directory / f"vllm-{version}+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return directory


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the launcher and time for all of them to end, then SIGKILL; the resource trackers last: they remove
    the shared memory of the others."""
    launcher.terminate()
    launcher.send_signal(signal.SIGCONT)
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(timeout=_GRACE_S)
    for grace_s, kill_trackers in ((5.0, False), (2.0, True), (5.0, True)):
        if not _wait_gone(launcher.pid, grace_s):
            for process in _members(launcher.pid):
                with suppress(psutil.Error):
                    if kill_trackers or "resource_tracker" not in " ".join(process.cmdline()):
                        process.kill()
    launcher.wait(timeout=5)


def _wait_gone(group: int, grace_s: float) -> bool:
    deadline_s = time.monotonic() + grace_s
    while left := bool(_members(group)):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    return not left


def _members(group: int) -> list[psutil.Process]:
    """Who still runs of the process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
