"""The embedded engine: requests in, one step at a time, outputs out.

Owns the life of a request between ADD and its last output: admission checks, stop conditions, aborts, pauses and the
counters. It schedules onto a :class:`~anyengine.engine.interfaces.ModelRunner` and knows neither sockets nor torch.
Mirrors ``vllm.v1.engine.core.EngineCore`` of vLLM 0.32/0.33.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from anyengine._wire import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineRequestError,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.controls import EngineControls
from anyengine.engine.core.kv_cache import KVCache
from anyengine.engine.core.pausing import PauseGate
from anyengine.engine.core.preparations import Preparations
from anyengine.engine.core.scheduler import Scheduler
from anyengine.engine.core.statistics import EngineStatistics
from anyengine.engine.core.stopping import Stop, check_stop
from anyengine.engine.core.validation import check_request
from anyengine.engine.interfaces import (
    AdapterRunner,
    FailedSequence,
    ManagedRunner,
    ModelRunner,
    PooledPrompt,
    SampledToken,
    ScheduledSequence,
    SequenceState,
    generates,
)

__all__ = ["DIALECT_VERSION", "EngineCore"]

DIALECT_VERSION = "0.33.0"
"""The vLLM release whose wire layout this engine speaks: clients pick theirs by it."""


_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3  # vLLM's EngineCoreEventType


@dataclass(slots=True)
class _Live:
    """A request in the engine, with what its outputs need beyond the sequence."""

    seq: SequenceState
    client_index: int
    trace_headers: dict[str, str] | None
    events: list[EngineCoreEvent]
    """What has happened to it, until its next output tells."""
    scheduled: bool = False
    """Whether it has been in a batch."""

    def output(self, new_token_ids: list[int], stop: Stop | None) -> EngineCoreOutput:
        return EngineCoreOutput(
            self.seq.request_id,
            new_token_ids,
            finish_reason=stop.finish_reason if stop else None,
            stop_reason=stop.stop_reason if stop else None,
            trace_headers=self.trace_headers,
        )


class EngineCore:
    """Implements :class:`~anyengine.engine.interfaces.Engine`. Every method runs in the busy loop's thread.

    Invariant: a request is in ``_live`` exactly as long as the scheduler has its sequence, or the preparations have.
    """

    needs_coordinator: bool = False

    def __init__(
        self,
        runner: ModelRunner,
        config: EmbeddedEngine,
        *,
        rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._adapters = runner if isinstance(runner, AdapterRunner) and runner.max_loras else None
        self._clock = clock
        self._config = config
        self._rank = rank
        self._cache = KVCache(
            num_blocks=runner.num_kv_blocks,
            block_tokens=runner.kv_block_tokens,
            reuse=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            self._cache, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self._preparations = Preparations()
        self._live: dict[str, _Live] = {}
        self._finished: dict[int, set[str]] = {}
        self._unsent: list[tuple[int, EngineCoreOutput]] = []  # made between steps; they go out with the next one
        self._statistics = EngineStatistics()
        self._gate = PauseGate()
        self._controls = EngineControls(
            self._gate,
            runner,
            abort_all=self.abort_all,
            clear_prefixes=self._clear_prefixes,
            statistics=self._get_engine_statistics,
        )

    def ready_response(self) -> EngineCoreReadyResponse:
        config, max_model_len = self._config, self._runner.max_model_len
        return EngineCoreReadyResponse(
            max_model_len=max_model_len,
            num_gpu_blocks=self._runner.num_kv_blocks,
            block_size=self._runner.kv_block_tokens,
            dtype=self._runner.dtype,
            vllm_version=DIALECT_VERSION,
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_rank=self._rank,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            instance_id=uuid.uuid4().hex,
            supports_lora=self._adapters is not None,
            max_loras=self._adapters.max_loras if self._adapters else 0,
            enable_sleep_mode=isinstance(self._runner, ManagedRunner),
        )

    def add(self, request: EngineCoreRequest) -> None:
        self._statistics.adds_received += 1
        client_index, request_id = request.client_index, request.request_id
        if request_id in self._live:
            self.refuse(client_index, request_id, f"request_id={request_id!r} is already in use")
            return
        if self._gate.refuses_new:
            paused = EngineRequestError("engine_paused", "generation is paused", retryable=True)
            self._fail(client_index, request_id, paused)
            return
        checked = check_request(
            request,
            generates=generates(self._runner),
            vocab_size=self._runner.vocab_size,
            max_model_len=self._runner.max_model_len,
            pooling_tasks=self._runner.pooling_tasks,
            embedding_size=self._runner.embedding_size,
        )
        if isinstance(checked, str):
            self.refuse(client_index, request_id, checked)
            return
        if request.abort_immediately:
            return
        prompt_token_ids, sampling = checked
        seq = SequenceState(
            request_id,
            prompt_token_ids,
            sampling,
            priority=request.priority,
            arrival_order=self._statistics.adds_received,
            pooling=request.pooling_params,
        )
        try:
            self._set_cache_key(seq, request)
            preparation = self._runner.start(seq)
        except Exception as exc:  # noqa: BLE001 - one request's trouble is one request's error
            self._runner.finish(request_id)
            self._fail(client_index, request_id, _error_of(exc))
            return
        events = [EngineCoreEvent(_QUEUED, self._clock())]
        self._live[request_id] = _Live(seq, client_index, request.trace_headers, events)
        if preparation is None:
            self._scheduler.add(seq)
        else:
            self._preparations.add(seq, preparation)

    def _set_cache_key(self, seq: SequenceState, request: EngineCoreRequest) -> None:
        """Load its adapter, if it has one. Raises ValueError where that is not possible."""
        salt, adapter = (request.cache_salt or "").encode(), b""
        if request.lora_request is not None:
            if self._adapters is None:
                raise ValueError("lora_request is not served by this engine: it was started without max_loras")
            adapter = self._adapters.add_lora(request.lora_request)
            seq.lora_id = request.lora_request.lora_int_id
        # The length tells where the one ends and the other begins.
        seq.cache_key = b"%d:%s%s" % (len(adapter), adapter, salt) if salt or adapter else b""

    def refuse(self, client_index: int, request_id: str, reason: str) -> None:
        self._fail(client_index, request_id, EngineRequestError("validation_error", reason, retryable=False))

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._statistics.aborts_received += 1
            if request_id in self._live:
                self._forget(request_id)
            else:
                self._statistics.unknown_aborts += 1
        gone = set(request_ids)
        self._unsent = [(client, output) for client, output in self._unsent if output.request_id not in gone]

    def abort_client(self, client_index: int) -> None:
        for request_id in [id_ for id_, live in self._live.items() if live.client_index == client_index]:
            self._forget(request_id)
        self._unsent = [(client, output) for client, output in self._unsent if client != client_index]

    def abort_all(self) -> None:
        for request_id, live in list(self._live.items()):
            self._forget(request_id)
            self._unsent.append((live.client_index, live.output([], Stop(FinishReason.ABORT))))

    def count_malformed(self) -> None:
        self._statistics.malformed_messages += 1

    def has_work(self) -> bool:
        if (
            self._unsent
            or self._preparations
            or (self._gate.owes_answers and not self._scheduler.has_work(admit=False))
        ):
            return True
        return self._may_run() and self._scheduler.has_work(admit=not self._gate.paused)

    def step(self) -> list[tuple[int, EngineCoreOutput]]:
        self._take_prepared()
        outputs, self._unsent = self._unsent, []
        scheduled = self._scheduler.schedule(admit=not self._gate.paused) if self._may_run() else []
        self._note_events(scheduled)
        if scheduled:
            outputs += self._run(scheduled)
        elif not outputs:
            self._preparations.wait()
        if not self._scheduler.has_work(admit=False):
            self._gate.settle()
        return outputs

    def take_finished(self) -> dict[int, set[str]]:
        finished, self._finished = self._finished, {}
        return finished

    def scheduler_stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running_reqs=self._scheduler.num_running,
            num_waiting_reqs=self._scheduler.num_waiting + len(self._preparations),
            step_counter=self._statistics.num_steps,
            kv_cache_usage=self._cache.usage,
            prefix_cache_stats=self._cache.take_stats(),  # not optional to vLLM's front ends, which fail without it
        )

    def start_wave(self, wave: int) -> bool:
        return False

    def take_coordinator_news(self) -> list[EngineCoreOutputs]:
        return []

    @property
    def weight_version(self) -> str:
        return self._controls.weight_version

    def utility(self, method: str, args: Sequence[Any]) -> Any:
        return self._controls.call(method, args)

    def reset(self) -> None:
        for request_id in list(self._live):
            self._forget(request_id)
        self._finished.clear()
        self._unsent.clear()
        self._controls.call("wake_up", [])

    def close(self) -> None:
        self._runner.close()

    def _may_run(self) -> bool:
        return not self._gate.frozen

    # One step.

    def _take_prepared(self) -> None:
        for seq, error in self._preparations.take_done():
            if error is None:
                self._scheduler.add(seq)
            else:
                self._end_failed(seq.request_id, _error_of(error))

    def _note_events(self, scheduled: list[ScheduledSequence]) -> None:
        now_s = self._clock()
        for seq in self._scheduler.take_preempted():
            self._statistics.num_preemptions += 1
            self._live[seq.request_id].events.append(EngineCoreEvent(_PREEMPTED, now_s))
        for item in scheduled:
            live = self._live[item.seq.request_id]
            if not live.scheduled:
                live.scheduled = True
                live.events.append(EngineCoreEvent(_SCHEDULED, now_s))

    def _run(self, scheduled: list[ScheduledSequence]) -> list[tuple[int, EngineCoreOutput]]:
        tokens = self._runner.step(scheduled)
        self._statistics.num_steps += 1
        outputs: list[tuple[int, EngineCoreOutput]] = []
        for item, token in zip(scheduled, tokens, strict=True):
            seq = item.seq
            if seq.num_computed_tokens < len(seq.prompt_token_ids):
                self._statistics.num_prefill_tokens_computed += item.num_new_tokens
            else:
                self._statistics.num_decode_tokens_computed += item.num_new_tokens
            seq.num_computed_tokens += item.num_new_tokens
            self._cache.publish(seq)
            if isinstance(token, FailedSequence):
                self._end_failed(seq.request_id, EngineRequestError(token.code, token.reason))
            elif token is not None:
                live = self._live[seq.request_id]
                outputs.append((live.client_index, self._take(live, token)))
        return outputs

    def _take(self, live: _Live, result: SampledToken | PooledPrompt) -> EngineCoreOutput:
        return self._take_pooled(live, result) if isinstance(result, PooledPrompt) else self._take_token(live, result)

    def _take_pooled(self, live: _Live, result: PooledPrompt) -> EngineCoreOutput:
        output = live.output([], Stop(FinishReason.STOP))
        output.pooling_output, output.events = result.data, live.events
        output.prefill_stats = _prefill_stats(live.seq)
        self._forget(live.seq.request_id)
        return output

    def _take_token(self, live: _Live, token: SampledToken) -> EngineCoreOutput:
        seq = live.seq
        seq.output_token_ids.append(token.token_id)
        stop = check_stop(seq, self._runner.max_model_len)
        output = live.output([token.token_id], stop)
        output.new_logprobs, output.new_prompt_logprobs_tensors = token.logprobs, token.prompt_logprobs
        output.prompt_token_id_logprobs = token.prompt_token_id_logprobs
        if live.events:
            output.events, live.events = live.events, []
        if len(seq.output_token_ids) == 1:
            output.prefill_stats = _prefill_stats(seq)
        if stop:
            self._forget(seq.request_id)
        return output

    def _fail(self, client_index: int, request_id: str, error: EngineRequestError) -> None:
        self._statistics.requests_failed += 1
        output = EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error)
        self._finished.setdefault(client_index, set()).add(request_id)
        self._unsent.append((client_index, output))

    def _end_failed(self, request_id: str, error: EngineRequestError) -> None:
        """It was taken, and cannot go on. The last output tells, with the next step."""
        client_index = self._live[request_id].client_index
        self._forget(request_id)
        self._fail(client_index, request_id, error)

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id)
        self._preparations.discard(request_id)
        self._finished.setdefault(live.client_index, set()).add(request_id)
        self._scheduler.remove(live.seq)
        self._runner.finish(request_id)

    def _clear_prefixes(self, *, preempt: bool) -> bool:
        """Forget what the cache holds. With ``preempt`` the running requests lose their blocks too, and are computed
        again; without, nothing happens (False) while there are any."""
        if preempt:
            self._scheduler.preempt_all()
        return self._cache.clear_prefixes()

    def _get_engine_statistics(self) -> dict[str, int]:
        scheduler = self._scheduler
        return {
            **self._statistics.as_dict(),
            "num_running_requests": scheduler.num_running,
            "num_waiting_requests": scheduler.num_waiting + len(self._preparations),
        }


def _error_of(exc: BaseException) -> EngineRequestError:
    code = "out_of_memory" if isinstance(exc, MemoryError) else "validation_error"
    return EngineRequestError(code, str(exc) or type(exc).__name__)


def _prefill_stats(seq: SequenceState) -> PrefillStats:
    num_prompt_tokens, num_cached_tokens = len(seq.prompt_token_ids), seq.num_cached_tokens
    return PrefillStats(
        num_prompt_tokens,
        num_computed_tokens=num_prompt_tokens - num_cached_tokens,
        num_cached_tokens=num_cached_tokens,
        num_local_cached_tokens=num_cached_tokens,
    )
