"""When data-parallel ranks that step together run: waves.

Owns the number of the present wave, whether it runs, and when the ranks agree that it ends. A wave begins with the
coordinator's START_DP_WAVE and ends when no rank has work; in between every rank takes every step, be it on nothing.
Pure. Mirrors ``vllm.v1.engine.core.DPEngineCoreProc`` (0.32/0.33), with one difference: there a rank that gets a
request begins at once, and blocks until the others come; here it begins with the others.
"""

from __future__ import annotations

__all__ = ["Waves"]

_STEPS_BETWEEN_AGREEMENTS = 32  # vLLM's dp_sync_interval: agreeing is a collective operation of its own


class Waves:
    """One rank's view. Invariant: all ranks of a running wave count the same steps."""

    def __init__(self) -> None:
        self.current: int = 0
        """The wave that runs, or else the next one."""
        self.running: bool = False
        self.step_counter: int = 0
        """Steps of this wave."""

    def note_request(self, wave: int) -> bool:
        """A request has come from a front end that takes ``wave`` for the present one. Whether the coordinator has to
        hear of it from us: the front end has told it nothing, since it believes in a wave that is over."""
        if wave > self.current:
            self.current = wave
        return wave < self.current and not self.running

    def start(self, wave: int) -> None:
        """The coordinator starts ``wave``; one that is over does not run again."""
        if wave >= self.current:
            self.current = wave
            self.running = True

    def count_step(self) -> bool:
        """A step has been taken by all. Whether they agree now on how to go on."""
        self.step_counter += 1
        return self.step_counter % _STEPS_BETWEEN_AGREEMENTS == 0

    def end(self) -> int:
        """Nobody has work. The wave that is over."""
        over = self.current
        self.current += 1
        self.running = False
        self.step_counter = 0
        return over
