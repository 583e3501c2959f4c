"""``AsyncLLM``: vLLM's asynchronous front end, over our client.

Owns the object's life. vLLM's is made outside of any block, by a constructor that blocks until the engine is ready, and
ended by ``shutdown()`` or the last reference. So the client lives in a thread of its own, which the object owns; its
methods are awaited in the caller's loop, whichever that is, one after the other if the program has several.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from anyengine import params
from anyengine._client.client import EngineClient
from anyengine._client.inputs.prompts import is_embeddings
from anyengine._client.inputs.request_fields import GenerateOptions
from anyengine._protocol import ClientState
from anyengine._rules import reject
from anyengine._text import Tokenizer
from anyengine._wire import KVEventsConfig, KvHintsEnvelope
from anyengine.config import EngineSettings
from anyengine.exceptions import EngineDeadError
from anyengine.params import LoRARequest, PoolingParams
from anyengine.sync.client_thread import ClientThread

from .engine_args import AsyncEngineArgs, QueueLimits
from .outputs import PoolingRequestOutput, pooled
from .params import split_prompt
from .relays import relayed
from .streams import OutputStream, PoolingStream, check_limits

__all__ = ["AsyncLLM"]

_running: set[ClientThread] = set()


@atexit.register
def _stop_all() -> None:
    """The interpreter ends: so do the engines, in order."""
    threads, failures = list(_running), list[BaseException]()
    for thread in threads:
        thread.leave_soon()
    for thread in threads:
        try:
            thread.stop(in_hurry=True)
        except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised below, when all have ended
            failures.append(exc)
    if failures:
        raise failures[0] if len(failures) == 1 else BaseExceptionGroup("engines have ended with errors", failures)


class AsyncLLM:
    """An engine, and a client of it, from the constructor to :meth:`shutdown`.

    ``engine`` is what the client starts or joins: the arguments of an embedded engine, or engine settings of any kind
    (``AsyncLLM(anyengine.VLLMEngine("facebook/opt-125m"))``). The constructor returns when it is ready. A program that
    forgets :meth:`shutdown` loses nothing: the engine ends with the last reference to this object, and with the
    interpreter at the latest.

    Raises:
        EngineStartupError: the engine did not become ready; the error has the child's own exception.
        TypeError: ``engine`` is the name of a model.
    """

    def __init__(self, engine: AsyncEngineArgs | EngineSettings | Sequence[EngineSettings]) -> None:
        limits = QueueLimits()
        if isinstance(engine, AsyncEngineArgs):
            limits = engine.queue_limits()
            engine = engine.engines()
        elif isinstance(engine, str):
            raise TypeError(
                f"engine={engine!r} is no engine: a model's name goes into AsyncLLM(AsyncEngineArgs(model={engine!r}))"
            )
        # As vLLM does: requests that come during a pause wait for its end.
        client = EngineClient(engine=engine, admission="wait", **limits)
        self._limited = bool(limits)
        self._thread = thread = ClientThread(client, allow_running_loop=True)
        thread.start()
        _running.add(thread)
        thread.on_end(lambda: _running.discard(thread))
        self._finalizer = weakref.finalize(self, thread.leave_soon)
        self._finalizer.atexit = False  # _stop_all waits, too

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Sequence[Any] | None = None,
    ) -> AsyncLLM:
        """Start an embedded engine. ``usage_context`` and ``start_engine_loop`` have no effect.

        Raises:
            ValueError: ``stat_loggers`` are given, which nobody would call.
            EngineStartupError: see :class:`AsyncLLM`.
        """
        if stat_loggers:
            raise ValueError("stat_loggers would not be called: leave them out, and read get_statistics()")
        return cls(engine_args)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine and everything else; requests in flight may go on for ``timeout`` seconds, then they are
        aborted. Blocks until all has ended. Idempotent."""
        if timeout and not self._thread.has_ended:
            self._thread.call(lambda: self._thread.client.aclose(drain_timeout_s=timeout))
        self._thread.stop(in_hurry=True)

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Any,
        sampling_params: params.SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: KvHintsEnvelope | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> OutputStream:
        """The outputs of one request: text, token ids, or vLLM's dictionaries of these. See :class:`OutputStream`.

        Raises:
            RequestRejected: the prompt or the parameters are of no kind that can be sent.
        """
        if not isinstance(sampling_params, params.SamplingParams):
            reject("sampling_params", sampling_params, "is no SamplingParams", "give SamplingParams(...)")
        given, text, salt = split_prompt(prompt)
        options: GenerateOptions = {
            "request_id": request_id,
            "lora_request": lora_request,
            "tokenization_kwargs": tokenization_kwargs,
            "trace_headers": trace_headers,
            "priority": priority,
            "data_parallel_rank": data_parallel_rank,
            "session_id": session_id,
            "cache_salt": salt,
            "kv_hints": kv_hints,
            "reasoning_ended": reasoning_ended,
            "reasoning_parser_kwargs": reasoning_parser_kwargs,
        }
        text = prompt_text if text is None else text
        return OutputStream(self._thread, given, text, sampling_params, options, owner=self, limited=self._limited)

    def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> PoolingStream:
        """What a pooling model makes of ``prompt``: one item. See :class:`PoolingStream`.

        Raises:
            RequestRejected: the prompt or the parameters are of no kind that can be sent.
        """
        if not isinstance(pooling_params, PoolingParams):
            reject("pooling_params", pooling_params, "is no PoolingParams", "give PoolingParams(...)")
        given, _, salt = split_prompt(prompt)

        async def compute() -> PoolingRequestOutput:
            client, token_ids = self._thread.client, list[int]()
            if self._limited:
                check_limits(client, 1)
            if not is_embeddings(given):
                token_ids = await client.tokenize(given, tokenization_kwargs=tokenization_kwargs)
            output = await client.encode(
                token_ids or given,
                pooling_params,
                request_id=request_id,
                lora_request=lora_request,
                trace_headers=trace_headers,
                priority=priority,
                cache_salt=salt,
                reasoning_ended=reasoning_ended,
            )
            return pooled(output, token_ids)

        return PoolingStream(self._thread, compute)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests by id: each yields its last item, with ``finish_reason="abort"``. ``internal`` has no effect.

        Raises: see :meth:`EngineClient.abort`.

        Cancellation: the aborts have been sent.
        """
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._thread.call_async(lambda: self._thread.client.abort(names))

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until everything that is in flight has ended.

        Raises:
            DrainTimeout: something has not; a ``TimeoutError``.

        Cancellation: safe.
        """
        await self._thread.call_async(lambda: self._thread.client.drain(timeout_s=drain_timeout))

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Whether a request of ``n`` sequences would be taken now. ``request_id`` has no effect.

        Raises:
            OverloadedError: one of the limits that were given is reached.
            EngineDeadError: see :attr:`errored`.
        """
        self._thread.call_now(lambda: check_limits(self._thread.client, n))

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        """Which ranks publish KV cache events; see :meth:`EngineClient.get_kv_event_sources`."""
        return self._thread.call_now(lambda: self._thread.client.get_kv_event_sources())

    def get_num_unfinished_requests(self) -> int:
        """How many requests are in flight; each completion counts.

        Raises:
            EngineDeadError: see :attr:`errored`.
        """
        return self._thread.call_now(self._thread.client.stats).in_flight

    def get_num_queued_tokens(self) -> int:
        """How many prompt tokens wait for their first output.

        Raises:
            EngineDeadError: see :attr:`errored`.
        """
        return self._thread.call_now(self._thread.client.stats).queued_prompt_tokens

    # --------------------------------------------------------------------- state

    @property
    def is_running(self) -> bool:
        """Whether the engine is there, and the object was not shut down."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """The opposite of :attr:`is_running`."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._thread.has_ended or self._thread.client.state in (ClientState.DEAD, ClientState.CLOSED)

    @property
    def dead_error(self) -> BaseException:
        """Why :attr:`errored` is true."""
        cause = self._thread.client.core.session.cause
        return EngineDeadError("the engine lives") if cause is None else cause.for_waiter()

    @relayed(EngineClient.check_health)
    def check_health(self) -> None:
        """See :meth:`EngineClient.check_health`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: ours, with ``encode`` and ``decode``."""
        return self._thread.client.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """:attr:`tokenizer`."""
        return self.tokenizer

    async def get_statistics(self) -> dict[str, int]:
        """The client's counters; see :meth:`EngineClient.statistics`. Not in vLLM.

        Raises:
            EngineDeadError: see :attr:`errored`.

        Cancellation: safe.
        """
        return await self._thread.call_now_async(self._thread.client.statistics)

    @relayed(EngineClient.do_log_stats)
    def do_log_stats(self) -> None:
        """See :meth:`EngineClient.do_log_stats`."""

    @relayed(EngineClient.is_tracing_enabled)
    def is_tracing_enabled(self) -> None:
        """See :meth:`EngineClient.is_tracing_enabled`."""

    # ---------------------------------------------------------------- operations

    @relayed(EngineClient.supported_tasks)
    def get_supported_tasks(self) -> None:
        """See :meth:`EngineClient.supported_tasks`."""

    @relayed(EngineClient.pause_generation)
    def pause_generation(self) -> None:
        """See :meth:`EngineClient.pause_generation`."""

    @relayed(EngineClient.resume_generation)
    def resume_generation(self) -> None:
        """See :meth:`EngineClient.resume_generation`."""

    @relayed(EngineClient.is_paused)
    def is_paused(self) -> None:
        """See :meth:`EngineClient.is_paused`."""

    @relayed(EngineClient.sleep)
    def sleep(self) -> None:
        """See :meth:`EngineClient.sleep`."""

    @relayed(EngineClient.wake_up)
    def wake_up(self) -> None:
        """See :meth:`EngineClient.wake_up`."""

    @relayed(EngineClient.is_sleeping)
    def is_sleeping(self) -> None:
        """See :meth:`EngineClient.is_sleeping`."""

    @relayed(EngineClient.release_kv_cache_memory)
    def release_kv_cache_memory(self) -> None:
        """See :meth:`EngineClient.release_kv_cache_memory`."""

    @relayed(EngineClient.reset_prefix_cache)
    def reset_prefix_cache(self) -> None:
        """See :meth:`EngineClient.reset_prefix_cache`."""

    @relayed(EngineClient.reset_mm_cache)
    def reset_mm_cache(self) -> None:
        """See :meth:`EngineClient.reset_mm_cache`."""

    @relayed(EngineClient.reset_encoder_cache)
    def reset_encoder_cache(self) -> None:
        """See :meth:`EngineClient.reset_encoder_cache`."""

    @relayed(EngineClient.add_lora)
    def add_lora(self) -> None:
        """See :meth:`EngineClient.add_lora`."""

    @relayed(EngineClient.remove_lora)
    def remove_lora(self) -> None:
        """See :meth:`EngineClient.remove_lora`."""

    @relayed(EngineClient.list_loras)
    def list_loras(self) -> None:
        """See :meth:`EngineClient.list_loras`."""

    @relayed(EngineClient.pin_lora)
    def pin_lora(self) -> None:
        """See :meth:`EngineClient.pin_lora`."""

    @relayed(EngineClient.collective_rpc)
    def collective_rpc(self) -> None:
        """See :meth:`EngineClient.collective_rpc`."""

    @relayed(EngineClient.start_profile)
    def start_profile(self) -> None:
        """See :meth:`EngineClient.start_profile`."""

    @relayed(EngineClient.stop_profile)
    def stop_profile(self) -> None:
        """See :meth:`EngineClient.stop_profile`."""

    @relayed(EngineClient.checkpoint_prepare)
    def checkpoint_prepare(self) -> None:
        """See :meth:`EngineClient.checkpoint_prepare`."""

    @relayed(EngineClient.checkpoint_restore)
    def checkpoint_restore(self) -> None:
        """See :meth:`EngineClient.checkpoint_restore`."""

    @relayed(EngineClient.notify_kv_transfer_request_rejected)
    def notify_kv_transfer_request_rejected(self) -> None:
        """See :meth:`EngineClient.notify_kv_transfer_request_rejected`."""

    @relayed(EngineClient.compute_weight_checksums)
    def compute_weight_checksums(self) -> None:
        """See :meth:`EngineClient.compute_weight_checksums`."""

    @relayed(EngineClient.update_weight_version)
    def update_weight_version(self) -> None:
        """See :meth:`EngineClient.update_weight_version`."""

    @relayed(EngineClient.get_weight_version)
    def get_weight_version(self) -> None:
        """See :meth:`EngineClient.get_weight_version`."""
