"""What a front end may ask of the engine besides requests: the utility calls, with vLLM's names and signatures.

Owns their meaning here. A call whose purpose is served already (a cache that this engine does not keep) is accepted;
a call that would have to do something that the model runner cannot do fails with the reason. Signatures and
results mirror ``vllm.v1.engine.core.EngineCore`` of 0.32/0.33.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from anyengine._wire import WireLoRARequest
from anyengine.engine.core.pausing import PauseGate, PauseMode
from anyengine.engine.core.utilities import UtilityTable
from anyengine.engine.interfaces import AdapterRunner, ManagedRunner, ModelRunner, ProfiledRunner, generates

__all__ = ["EngineControls"]


class EngineControls:
    """The utilities of one engine core. Called between steps, in the busy loop's thread."""

    def __init__(
        self,
        gate: PauseGate,
        runner: ModelRunner,
        *,
        abort_all: Callable[[], None],
        clear_prefixes: Callable[..., bool],
        statistics: Callable[[], dict[str, int]],
    ) -> None:
        self._gate = gate
        self._abort_all = abort_all
        self._clear_prefixes = clear_prefixes
        self._tasks = (*(["generate"] if generates(runner) else []), *runner.pooling_tasks)
        self._adapters = runner if isinstance(runner, AdapterRunner) and runner.max_loras else None
        self._memory = runner if isinstance(runner, ManagedRunner) else None
        self._profiler = runner if isinstance(runner, ProfiledRunner) else None
        self.weight_version: str = "default"  # vLLM's first one, too
        """A name for the weights, which outputs carry. Whoever changes weights sets it."""
        self._table = UtilityTable(
            {
                "get_supported_tasks": self._get_supported_tasks,
                "get_engine_statistics": statistics,
                "is_scheduler_paused": self._is_paused,
                "is_sleeping": self._is_sleeping,
                "pause_scheduler": self._pause_scheduler,
                "pause_generation": self._pause_generation,
                "resume_scheduler": self._resume_scheduler,
                "sleep": self._sleep,
                "wake_up": self._wake_up,
                "release_kv_cache_memory": self._release_kv_cache_memory,
                "reset_prefix_cache": self._reset_prefix_cache,
                "reset_mm_cache": self._accept,
                "reset_encoder_cache": self._accept,
                "execute_dummy_batch": self._accept,
                "list_loras": self._list_loras,
                "add_lora": self._add_lora,
                "remove_lora": self._remove_lora,
                "pin_lora": self._pin_lora,
                "collective_rpc": self._collective_rpc,
                "profile": self._profile,
                "set_weight_version": self._set_weight_version,
                "get_weight_version": self._get_weight_version,
            }
        )

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Raises:
        Exception: whatever makes it a failure reply.
        """
        return self._table.call(method, args)

    # Tasks and caches.

    def _get_supported_tasks(self) -> list[str]:
        return list(self._tasks)

    def _accept(self) -> None:
        """Nothing is kept that would have to be reset, and no rank waits for another."""

    def _reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Whether the cache is empty now: it is not, without ``reset_running_requests``, while requests use it."""
        return self._clear_prefixes(preempt=reset_running_requests)

    # Pauses. Sleeping is a pause in which memory is given back, too.

    def _is_paused(self) -> bool:
        return self._gate.paused

    def _is_sleeping(self) -> bool:
        """vLLM, too, counts paused as sleeping."""
        return self._gate.paused or self._memory_sleeps()

    def _memory_sleeps(self) -> bool:
        return self._memory is not None and self._memory.is_sleeping

    def _pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None]:
        """New requests wait. The reply comes behind the last output of whatever had to end first."""
        return self._pause(mode, refuse_new=False, clear_cache=clear_cache)

    def _pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[None]:
        """The same, but new requests fail with a retryable error."""
        return self._pause(mode, refuse_new=True, clear_cache=clear_cache)

    def _sleep(self, level: int = 1, mode: PauseMode = "abort") -> Future[None]:
        if not 0 <= level <= 2:
            raise ValueError(f"level={level} must be 0, 1 or 2")
        paused = self._pause(mode, refuse_new=False, clear_cache=level >= 1)
        memory = self._memory
        return paused if memory is None or not level else _then(paused, lambda: memory.sleep(level))

    def _pause(self, mode: PauseMode, *, refuse_new: bool, clear_cache: bool) -> Future[None]:
        """Frozen requests keep their blocks, so with ``"keep"`` clearing means to compute them again afterwards."""
        if mode == "abort":
            self._abort_all()
        answer = self._gate.pause(mode, refuse_new=refuse_new)
        if clear_cache:
            answer.add_done_callback(lambda done: None if done.exception() else self._clear_prefixes(preempt=True))
        return answer

    def _resume_scheduler(self) -> None:
        if self._memory_sleeps():
            raise RuntimeError("the engine has given memory back: it cannot go on before wake_up")
        self._gate.resume()

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        """Whether all memory is there again. Only then anything runs."""
        wanted = None if tags is None else [tag for tag in tags if tag != "scheduling"]
        if self._memory is not None and wanted != []:
            self._memory.wake_up(wanted)
        awake = not self._memory_sleeps()
        if awake:
            self._gate.resume()
        return awake

    def _release_kv_cache_memory(self) -> None:
        if self._memory is None:
            raise NotImplementedError("this engine has no memory to give back")
        if not self._gate.paused or self._gate.owes_answers:
            raise RuntimeError("release_kv_cache_memory needs a pause that is complete")
        if self._memory.is_sleeping:
            raise RuntimeError("release_kv_cache_memory needs an engine that is awake")
        self._clear_prefixes(preempt=True)
        self._memory.release_kv_cache_memory()

    # What only the weights' owner can change.

    def _list_loras(self) -> list[int]:
        return self._adapters.list_loras() if self._adapters else []

    def _add_lora(self, lora_request: WireLoRARequest) -> bool:
        self._loras().add_lora(lora_request)
        return True

    def _remove_lora(self, lora_id: int) -> bool:
        return self._loras().remove_lora(lora_id)

    def _pin_lora(self, lora_id: int) -> bool:
        return self._loras().pin_lora(lora_id)

    def _loras(self) -> AdapterRunner:
        if self._adapters is None:
            raise NotImplementedError("this engine has no LoRA adapters: it was started without max_loras")
        return self._adapters

    def _profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if self._profiler is None:
            raise NotImplementedError("this engine has no profiler")
        if is_start:
            self._profiler.start_profile(profile_prefix, delay_iterations, max_iterations)
        else:
            self._profiler.stop_profile()

    def _collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[None]:
        """One worker, which is this thread."""
        if method == "check_health":
            return [None]  # it answers
        if method == "reload_weights" and self._memory is not None:
            self._reload_weights(self._memory, *(args or []), **(kwargs or {}))
            return [None]
        raise LookupError(f"this engine has no worker method {method!r}; it has check_health, reload_weights")

    def _reload_weights(self, memory: ManagedRunner, weights_path: str | None = None) -> None:
        """Other weights, from files. Requests go on with them, and with nothing that the old ones have computed."""
        if not isinstance(weights_path, str | None):
            raise TypeError(f"weights_path={weights_path!r} must be a path, or None for the weights of the beginning")
        memory.reload_weights(weights_path)
        self._clear_prefixes(preempt=True)

    def _set_weight_version(self, weight_version: str) -> None:
        self.weight_version = weight_version

    def _get_weight_version(self) -> str:
        return self.weight_version


def _then(paused: Future[None], action: Callable[[], None]) -> Future[None]:
    """``action`` when the pause is complete, and the answer behind it."""
    answer: Future[None] = Future()

    def act(done: Future[None]) -> None:
        try:
            done.result()
            action()
        except Exception as exc:  # noqa: BLE001 - the caller is told
            answer.set_exception(exc)
        else:
            answer.set_result(None)

    paused.add_done_callback(act)
    return answer
