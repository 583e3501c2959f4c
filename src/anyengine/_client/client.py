"""``EngineClient``: text or token ids in, a stream of outputs out.

Owns the public client: what a prompt becomes before it is sent, and the output processor that feeds the request
streams. Sits on :class:`~anyengine._client.core_client.EngineCoreClient`, which owns the session.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from types import TracebackType
from typing import Literal, Self, Unpack

from anyengine._process.status import Status
from anyengine._protocol import Balancer, ClientState
from anyengine._rules import given
from anyengine._text import Tokenizer
from anyengine.config import EngineSettings
from anyengine.exceptions import ClientClosedError, EngineDeadError
from anyengine.limiters import Limiter
from anyengine.outputs import PoolingOutput
from anyengine.params import PoolingParams, SamplingParams
from anyengine.policies import RestartPolicy, RetryPolicy

from .core_client import EngineCoreClient
from .engines.engine_limits import common_limits
from .engines.health import ClientHealth, HealthLevel, examine
from .engines.model_info import ModelInfo
from .fault_tolerance import FaultHandling
from .inputs.model_files import load_model_files
from .inputs.multimodal import MultiModalPreprocessor, check_hook
from .inputs.prompts import Prompt
from .inputs.request_builder import RequestBuilder
from .inputs.request_fields import GenerateOptions, RequestFields, check_field_names
from .pooling import PoolingShortcuts, encode_once
from .reporting import ClientStatistics, Reports, StatisticsReports, StatisticsSink, take_statistics
from .request_control import RequestControl
from .requests.admission import AdmissionSettings
from .requests.charges import checked_limiter
from .requests.deadlines import time_limits
from .requests.desk import RequestDesk
from .requests.stream import RequestStream
from .session.closing import ShutdownReport
from .session.debugging import DebugSnapshot
from .session.events import ClientEvents
from .session.notifications import Notification
from .session.settings import engine_of
from .shortcuts import RequestShortcuts
from .vllm_names import VLLMNames

__all__ = ["EngineClient"]


class EngineClient(RequestShortcuts, RequestControl, PoolingShortcuts, FaultHandling, VLLMNames, StatisticsReports):
    """A client of one engine core, or of several, in one task group.

    Use it as ``async with EngineClient(...) as client:``, under trio or asyncio. Construction touches no event loop.
    When the block ends, every process, task and file of the client is gone. Entering again starts afresh.

    Args:
        model: what the embedded engine serves: an alias, a local directory, a GGUF file or a Hub id. ``None``: the
            default model, SmolLM2-135M-Instruct.
        engine: a fully described engine instead of ``model``, or several: the data-parallel ranks of one client.
        startup_timeout_s, shutdown_grace_s, drain_timeout_s, liveness_timeout_s, max_unread_bytes, on_death,
            on_progress, on_notification, balancer: see :class:`EngineCoreClient`.
        restart: start an engine again that dies once it was ready, and what becomes of requests. ``None``: never.
        retries: send a request again that failed before its first token with a ``retryable`` error. ``None``: never.
        mm_preprocessor: what makes token ids and features of prompts with images, sounds, ...; see
            :class:`MultiModalPreprocessor`. ``None``: such prompts are refused.
        max_num_queued_reqs: how many sequences may be in flight or on their way; ``None``: what the engine's args say.
        max_num_queued_tokens: how many prompt tokens may wait for their first output; ``None``: as above. A longer
            prompt is taken when no other one waits.
        stats_interval_s: how often to write a line of statistics to the log ``anyengine.statistics``, and to tell the
            sinks; a client that is idle writes none twice. ``None``: when :meth:`do_log_stats` is called.
        stats_sinks: functions that are given the :class:`ClientStatistics`, in worker threads.
        limiter: who may spend how many tokens (by ``tenant``), such as :class:`TokenBuckets`: asked before each request
            is sent, and told what it has used. ``None``: nobody is asked.
        admission: what becomes of a request that one of these limits keeps out, or a pause: ``"reject"`` raises
            :class:`OverloadedError` or :class:`EngineAsleepError` at once, ``"wait"`` has it wait its turn.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineSettings | Sequence[EngineSettings] | None = None,
        startup_timeout_s: float | None = None,
        shutdown_grace_s: float | None = None,
        drain_timeout_s: float = 0.0,
        liveness_timeout_s: float | None = 300.0,
        max_unread_bytes: int = 256 << 20,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        admission: Literal["reject", "wait"] = "reject",
        on_death: Literal["report", "cancel"] = "report",
        on_progress: Callable[[Status], None] | None = None,
        on_notification: Callable[[Notification], Awaitable[None]] | None = None,
        balancer: Balancer | None = None,
        restart: RestartPolicy | None = None,
        retries: RetryPolicy | None = None,
        mm_preprocessor: MultiModalPreprocessor | None = None,
        limiter: Limiter | None = None,
        stats_interval_s: float | None = None,
        stats_sinks: Sequence[StatisticsSink] = (),
        strict: bool = False,
    ) -> None:
        self._core = EngineCoreClient(
            engine_of(model, engine),
            startup_timeout_s=startup_timeout_s,
            shutdown_grace_s=shutdown_grace_s,
            drain_timeout_s=drain_timeout_s,
            strict=strict,
            liveness_timeout_s=liveness_timeout_s,
            max_unread_bytes=max_unread_bytes,
            on_death=on_death,
            on_progress=on_progress,
            on_notification=on_notification,
            balancer=balancer,
            restart=restart,
        )
        if retries is not None and not isinstance(retries, RetryPolicy):
            raise ValueError(f"retries={retries!r} must be a RetryPolicy, or None for no retries")
        self._retries = retries
        check_hook(mm_preprocessor)
        self._mm_preprocessor = mm_preprocessor
        self._limiter = checked_limiter(limiter)
        self._reports = Reports(self._take_statistics, stats_sinks, stats_interval_s)
        self._admission = AdmissionSettings.of(
            self._core.engines, max_num_queued_reqs, max_num_queued_tokens, admission
        )
        self._context: AbstractAsyncContextManager[None] | None = None
        self._desk: RequestDesk | None = None

    async def __aenter__(self) -> Self:
        """Start the engine, wait until it is ready, load its tokenizer.

        Raises:
            EngineStartupError: the engine did not become ready; the error has the child's own exception.
            RequestRejected: a file of the model (tokenizer, configuration) is broken.

        Cancellation: the engine is gone before it propagates.
        """
        if self._context is not None:
            raise RuntimeError("this client is in use already; make another one for another block")
        self._context = context = self._open()
        try:
            await context.__aenter__()
        except BaseException:
            self._context = None
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        context, self._context = self._context, None
        assert context is not None
        return await context.__aexit__(exc_type, exc, traceback)  # noqa: ASYNC102 - the session shields what must not be cut

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        self._desk = None
        self._reports.begin()
        self._core.life.hold()  # whoever follows it may use the client the moment it is told to be ready
        async with self._core:
            session = self._core.session
            session.in_order = True
            self._desk = desk = RequestDesk(self._core, self._admission, self._retries, self._limiter)
            with closing(desk.dropped):
                try:
                    session.tasks.start_soon(desk.feed_streams)
                    session.tasks.start_soon(session.own, desk.abort_dropped)
                    session.tasks.start_soon(session.own, desk.deadlines.run)
                    files = await load_model_files(self._core.model_dir, text=not self._core.skips_text)
                    limits, prefix = common_limits(session), os.urandom(4).hex()
                    desk.open(RequestBuilder(files, limits, prefix, mm_preprocessor=self._mm_preprocessor))
                    session.tasks.start_soon(session.own, self._reports.run)
                    self._core.life.opened()
                    yield
                    await session.closing.drain()
                finally:
                    desk.close()

    @property
    def _caller(self) -> EngineCoreClient:
        return self._core

    async def aclose(self, *, drain_timeout_s: float | None = None) -> None:
        """Close before the block is left; see :meth:`EngineCoreClient.aclose`. Consumers get what is left of their
        output, or a last item with ``finish_reason="abort"``, before this returns.

        Raises:
            ClientClosedError: the client has not been entered.
            WrongLoopError: called from another thread than the one that entered it.

        Cancellation: what is in flight is aborted at once, and the engines are stopped before it propagates.
        """
        await self._core.session.closing.close(drain_timeout_s, self._entered_desk().close)

    @property
    def shutdown_report(self) -> ShutdownReport | None:
        """How the last block ended, or its start failed; ``None`` inside a block, and before the first."""
        return self._core.shutdown_report

    def _take_statistics(self) -> ClientStatistics:
        return take_statistics(self._core.session, self._entered_desk())

    def _entered_desk(self) -> RequestDesk:
        if self._desk is None:
            raise ClientClosedError("the client has not been entered; use it inside `async with`")
        return self._desk

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        timeout_s: float | None = None,
        first_token_timeout_s: float | None = None,
        inter_token_timeout_s: float | None = None,
        nowait: bool = False,
        **fields: Unpack[RequestFields],
    ) -> RequestStream:
        """A request stream for ``prompt``: text, token ids, either with images and such (:class:`MultiModalPrompt`), or
        embeddings (:class:`EmbedsPrompt`, or an array [num_prompt_tokens, hidden_size] by itself). Inert: nothing is
        checked or sent before it is used.

        ``request_id`` is a label, echoed in every output; several live requests may share it. What else a request
        carries is given by vLLM's names: ``priority`` (lower runs first), ``data_parallel_rank``, ``lora_request``,
        ``tokenization_kwargs``, ``cache_salt``, ``trace_headers``, ``session_id``, ``mm_features``, ``kv_hints``,
        ``reasoning_ended``, ``reasoning_parser_kwargs``; and ``prompt_text`` and ``tenant``.

        ``timeout_s``, ``first_token_timeout_s`` (both from the first use) and ``inter_token_timeout_s`` bound what the
        engine may take: the first that passes aborts the request, whether anybody iterates or not, and the stream
        raises :class:`RequestTimeout` behind what had arrived. ``nowait``: raise at once where the request would have
        to wait to be sent.
        """
        check_field_names("generate", fields)
        return RequestStream(
            self._entered_desk,
            prompt,
            given("sampling_params", sampling_params, SamplingParams),
            request_id,
            fields,
            limits_s=time_limits(timeout_s, first_token_timeout_s, inter_token_timeout_s),
            nowait=nowait,
        )

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestStream:
        """:meth:`generate`, and send the request before returning.

        Raises:
            RequestRejected: bad input; nothing was sent.
            OverloadedError: an admission limit is reached, or a quota; nothing was sent.
            EngineAsleepError: the engine is paused or asleep; nothing was sent.
            RequestTimeout: a time limit passed before it could be sent.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: nothing is left in the engine.
        """
        stream = self.generate(prompt, sampling_params, **options)
        await stream.start()
        return stream

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        nowait: bool = False,
        **fields: Unpack[RequestFields],
    ) -> PoolingOutput:
        """What a pooling model makes of ``prompt``: an embedding, a class, a vector for each token.

        ``pooling_params.task`` is one of :meth:`supported_tasks`; by default every token has a vector or a class, as in
        vLLM. The other arguments are those of :meth:`generate`.

        Raises:
            RequestRejected: bad input, or a task that the engine does not have; nothing was sent.
            RequestFailed: the engine ended it with an error, or it was aborted before it had a result.
            OutputProcessingError: the result cannot be read.
            EngineDeadError: the engine died, or the client is closed.

        Cancellation: aborts the request.
        """
        check_field_names("encode", fields)
        return await encode_once(self._entered_desk(), prompt, pooling_params, request_id, fields, nowait=nowait)

    # ----------------------------------------------------------------- utilities

    @property
    def core(self) -> EngineCoreClient:
        """The low-level client: utility calls, death, statistics. Its output batches are consumed here."""
        return self._core

    @property
    def state(self) -> ClientState:
        """Where the client is in its life."""
        return self._core.state

    def events(self) -> ClientEvents:
        """Follow the client's life, and its ranks'; see :meth:`EngineCoreClient.events`."""
        return self._core.events()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestRejected: the engine serves a model without one.
            ClientClosedError: the client has not been entered yet.
        """
        return self._entered_desk().builder.tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """What the model is, as far as its engines and its files tell.

        Raises:
            ClientClosedError: the client has not been entered yet.
        """
        return self._entered_desk().builder.model_info(self._core.merged_registration)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take requests."""
        return self._core.ranks

    async def wait_dead(self, rank: int | None = None) -> EngineDeadError:
        """Wait until the client ends, or until ``rank`` is lost, and return why.

        Cancellation: safe.
        """
        return await self._core.wait_dead(rank)

    async def ping(self, timeout_s: float = 10.0, *, rank: int | None = None) -> float:
        """Ask an engine's main loop for a sign of life; see :meth:`EngineCoreClient.ping`.

        Raises:
            EngineUnresponsiveError: one has not answered within ``timeout_s``; it may be in a long step.
            EngineDeadError: it died, or the client is closed.

        Cancellation: safe.
        """
        return await self._core.ping(timeout_s, rank=rank)

    async def health(self, level: HealthLevel = "rpc", *, timeout_s: float = 5.0) -> ClientHealth:
        """How every rank is, asked side by side, in ``timeout_s`` at most. A bad answer is no death.

        ``"process"`` asks nothing: what is known. ``"rpc"`` asks each main loop for a sign of life: a hung one is
        silent. ``"generate"`` also has each rank that takes requests generate one token: a main loop that answers and
        schedules nothing is wedged. Never raises for an engine: ``raise_unhealthy()`` of the result does.

        Raises:
            ValueError: there is no such level.
            WrongLoopError: called from another thread than the one that entered the client.

        Cancellation: safe; nothing is left in the engines.
        """
        return await examine(self._core, level, timeout_s)

    async def check_health(self, timeout_s: float = 5.0) -> None:
        """Return if every rank answers through its main loop; :meth:`health` tells more.

        Raises:
            EngineUnresponsiveError: ranks are silent; the text names them.
            EngineDeadError: one is dead, or the client is.

        Cancellation: safe.
        """
        (await self.health(timeout_s=timeout_s)).raise_unhealthy()

    def debug_snapshot(self) -> DebugSnapshot:
        """What the client holds at this moment; see :meth:`EngineCoreClient.debug_snapshot`."""
        return self._core.debug_snapshot()

    def statistics(self) -> dict[str, int]:
        """Counters of this session; see :meth:`EngineCoreClient.statistics`. Besides: requests that wait to be sent,
        those that were turned away, by reason, and those that overran a time limit."""
        desk = self._entered_desk()
        return {
            **self._core.statistics(),
            "requests_waiting": desk.admission.num_waiting,
            "request_timeouts": desk.request_timeouts,
            "queued_prompt_tokens": self._core.session.connection.requests.num_queued_tokens,
            "statistics_failures": self._reports.failures,
            "limiter_failures": desk.charges.failures,
            "rejections_quota": desk.charges.refusals,
            **{f"rejections_{reason}": count for reason, count in desk.admission.rejections.items()},
        }
