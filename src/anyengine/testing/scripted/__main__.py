"""``python -m anyengine.testing.scripted SCRIPT [LOG]``: a scripted engine that a client starts.

The script is JSON; the launch line comes over standard input. Owns nothing.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from .process import Place, run_process
from .script import Script

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run it to its end; the exit code."""
    script = msgspec.json.decode(arguments[0], type=Script)
    launch = msgspec.json.decode(sys.stdin.buffer.readline())
    place = Place(
        handshake_address=launch["handshake_address"],
        rank=launch["rank"],
        host_fd=sys.stdin.fileno(),
        log=Path(arguments[1]) if arguments[1:] else None,
    )
    return run_process(script, place)


if __name__ == "__main__":
    # At once: whatever else an interpreter does at its end can take longer than a client waits for an exit code.
    os._exit(main(sys.argv[1:]))
