"""The profiler of a model runner: torch's, over some steps, into a file that a trace viewer opens.

Owns when it runs and where its traces go. Must not know what is profiled.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch.profiler import profile

__all__ = ["StepProfiler"]


class StepProfiler:
    """Off, until :meth:`start`. One thread, the one that steps."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._profile: profile | None = None
        self._asked = False
        self._prefix = ""
        self._delay_steps = 0
        self._steps_left: int | None = None
        self._num_traces = 0

    def start(self, prefix: str | None, delay_steps: int | None, max_steps: int | None) -> None:
        """Profile after ``delay_steps`` more steps, and stop by itself after ``max_steps`` of them.

        Raises:
            ValueError: there is no directory for traces, ``prefix`` is no file name, or a count is out of range.
            RuntimeError: it runs already.
        """
        if self._directory is None:
            raise ValueError("there is nowhere to put a trace: start the engine with profile_dir")
        if prefix is not None and (not prefix or Path(prefix).name != prefix):
            raise ValueError(f"profile_prefix={prefix!r} must be the beginning of a file name")
        if (delay_steps or 0) < 0 or (max_steps is not None and max_steps < 1):
            raise ValueError("delay_iterations must be at least 0, and max_iterations at least 1")
        if self._asked:
            raise RuntimeError("the profiler runs already")
        self._asked = True
        self._prefix = prefix or "anyengine"
        self._delay_steps = delay_steps or 0
        self._steps_left = max_steps
        if not self._delay_steps:
            self._begin()

    def stop(self) -> None:
        """Write the trace, if there is one. Without a start, nothing happens: it may have stopped by itself."""
        self._asked = False
        if self._profile is None:
            return
        running, self._profile = self._profile, None
        running.stop()
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        self._num_traces += 1
        name = f"{self._prefix}-{os.getpid()}-{self._num_traces}.pt.trace.json.gz"
        running.export_chrome_trace(str(self._directory / name))

    def end_step(self) -> None:
        """A step has been run."""
        if not self._asked:
            return
        if self._profile is None:
            self._delay_steps -= 1
            if self._delay_steps <= 0:
                self._begin()
        elif self._steps_left is not None:
            self._steps_left -= 1
            if not self._steps_left:
                self.stop()

    def _begin(self) -> None:
        self._profile = profile()  # of the processor, and of the accelerator where there is one
        self._profile.start()
