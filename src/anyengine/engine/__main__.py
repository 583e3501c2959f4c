"""``python -m anyengine.engine``: an engine process, from its launch line to its exit code.

Reads one line of JSON (:class:`~anyengine.config.EngineLaunch`) from standard input, writes status lines to standard
output, logs to standard error. Exit codes: 0 after a graceful stop, 1 after any failure. Everything slow is imported
after the lifeline is armed.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from anyengine.engine.serving.lifeline import (
    Lifeline,
    arm_parent_death_signal,
    divert_standard_streams,
    ignore_interrupts,
)


def main() -> int:
    arm_parent_death_signal()
    ignore_interrupts()
    launch_fd, status_fd = divert_standard_streams()
    lifeline = Lifeline(launch_fd)
    launch_line = lifeline.read_launch_line()
    lifeline.watch()
    from anyengine.engine.start import run_engine

    exit_code = run_engine(launch_line, status_fd, on_stop=lifeline.on_stop)
    if exit_code:
        # It has failed, and its host, who knows, waits a moment for how it ended: taking the interpreter and torch
        # apart would take much longer.
        with suppress(OSError):
            sys.stdout.flush()  # standard error is not buffered
        os._exit(exit_code)
    lifeline.close()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
