"""An engine core that someone else started: what is known of it, and the errors that its end becomes.

Owns nothing of the operating system: the process is not ours to watch, signal or reap. The counterpart of
:class:`~anyengine._process.supervisor.SupervisedEngine` for engines that a client has only joined.
"""

from __future__ import annotations

import anyio

from anyengine.exceptions import EngineDeadError, EngineStartupError, StartupTimeout

__all__ = ["AttachedRank"]


class AttachedRank:
    """One rank of somebody else's. ``where`` says at which address it was expected."""

    def __init__(self, rank: int, where: str) -> None:
        self.rank = rank
        self.model_dir: str | None = None
        self.stage = "expected"
        """How far it has come; kept up to date by whoever shakes hands."""
        self._where = where
        self._since_s = anyio.current_time()

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Seconds since it is expected, under the stage that it has come to."""
        return {self.stage: anyio.current_time() - self._since_s}

    def startup_timeout(self, timeout_s: float, also_late: str = "") -> StartupTimeout:
        """The deadline passed before it was ready; ``also_late`` says who else was not."""
        return StartupTimeout(
            f"engine {self.rank}, which someone else starts, is not ready after startup_timeout_s={timeout_s:g}"
            f"{also_late}; stage reached: {self.stage!r}. It must connect to {self._where}",
            rank=self.rank,
            stage=self.stage,
            stage_seconds=self.stage_seconds,
        )

    def handshake_error(self, trouble: Exception) -> EngineStartupError:
        """It said something, on its way to ready, that makes no sense."""
        error = EngineStartupError(
            f"an engine at {self._where}, expected to be rank {self.rank}: its handshake makes no sense: {trouble}",
            rank=self.rank,
            stage=self.stage,
        )
        error.__cause__ = trouble
        return error

    def death(self, symptom: str | None = None, kind: type[EngineDeadError] = EngineDeadError) -> EngineDeadError:
        """It is gone, or of no use any more; ``symptom`` is how that was noticed."""
        return kind(f"engine {self.rank}, which someone else started, is lost: {symptom}", rank=self.rank)

    async def wait_ended(self) -> None:
        """Nobody tells of its end: whatever is known of it is known already."""
        await anyio.lowlevel.checkpoint()
