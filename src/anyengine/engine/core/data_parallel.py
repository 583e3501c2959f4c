"""An engine core that is one of several data-parallel ranks which step together, as mixtures of experts need it.

Owns what being in step means for requests, pauses and the coordinator. The rest is the engine core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyengine._wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    SchedulerStats,
)
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.core.waves import Waves
from anyengine.engine.interfaces import CollectiveRunner

__all__ = ["DataParallelCore"]


class DataParallelCore(EngineCore):
    """Implements :class:`~anyengine.engine.interfaces.Engine`. The model runs in waves only.

    Invariant: from the start of a wave to its end, each :meth:`step` is one step of the model, a dummy if need be.
    """

    needs_coordinator = True

    def __init__(self, runner: CollectiveRunner, config: EmbeddedEngine, *, rank: int = 0) -> None:
        super().__init__(runner, config, rank=rank)
        self._collective = runner
        self._waves = Waves()
        self._news: list[EngineCoreOutputs] = []
        self._told_counts = (0, 0)

    def ready_response(self) -> EngineCoreReadyResponse:
        response = super().ready_response()
        response.data_parallel_size = self._collective.data_parallel_size
        return response

    def add(self, request: EngineCoreRequest) -> None:
        super().add(request)
        if self._waves.note_request(request.current_wave):
            self._ask_for_wave()

    def start_wave(self, wave: int) -> bool:
        self._waves.start(wave)
        return True

    def utility(self, method: str, args: Sequence[Any]) -> Any:
        result = super().utility(method, args)
        if not self._waves.running and self._wants_to_run():  # it has been resumed
            self._ask_for_wave()
        return result

    def has_work(self) -> bool:
        return self._waves.running or super().has_work()

    def step(self) -> list[tuple[int, EngineCoreOutput]]:
        steps_before = self._statistics.num_steps
        outputs = super().step()
        if not self._waves.running:
            return outputs
        if self._statistics.num_steps == steps_before:
            self._collective.run_dummy_batch()
        if self._waves.count_step() and not self._collective.any_has_work(self._wants_to_run()):
            over = self._waves.end()
            if self._rank == 0:
                self._news.append(EngineCoreOutputs(wave_complete=over))
        return outputs

    def take_coordinator_news(self) -> list[EngineCoreOutputs]:
        counts = (self._scheduler.num_waiting, self._scheduler.num_running)
        if counts != self._told_counts:
            self._told_counts = counts
            waiting, running = counts
            stats = SchedulerStats(
                num_running_reqs=running,
                num_waiting_reqs=waiting,
                kv_cache_usage=self._cache.usage,
                step_counter=self._waves.step_counter,
                current_wave=self._waves.current,
            )
            self._news.append(EngineCoreOutputs(scheduler_stats=stats))
        news, self._news = self._news, []
        return news

    def reset(self) -> None:
        super().reset()
        self._news.clear()

    def _may_run(self) -> bool:
        return self._waves.running and super()._may_run()

    def _wants_to_run(self) -> bool:
        """Whether there is a request that a step would advance."""
        return super()._may_run() and self._scheduler.has_work(admit=not self._gate.paused)

    def _ask_for_wave(self) -> None:
        self._news.append(EngineCoreOutputs(start_wave=self._waves.current))
