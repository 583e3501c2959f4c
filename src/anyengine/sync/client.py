"""``SyncEngineClient``: the client for threads.

Owns which methods there are, and the block. Each does what the method of :class:`EngineClient` does by which it is
decorated, and raises the same; a test sees to it that none is missing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

from anyengine._client.client import EngineClient
from anyengine._client.engines.model_info import ModelInfo
from anyengine._client.inputs.multimodal import MultiModalPreprocessor
from anyengine._client.inputs.prompts import Prompt
from anyengine._client.inputs.request_fields import GroupOptions
from anyengine._client.reporting import StatisticsSink
from anyengine._client.request_control import RequestName
from anyengine._client.requests.stream import RequestStream
from anyengine._client.session.closing import ShutdownReport
from anyengine._client.session.notifications import Notification
from anyengine._process.status import Status
from anyengine._protocol import Balancer, ClientState
from anyengine._setting_rules import check_flag
from anyengine._text import Tokenizer
from anyengine.config import EngineSettings
from anyengine.exceptions import ClientClosedError, EngineError
from anyengine.limiters import Limiter
from anyengine.outputs import RequestOutput
from anyengine.params import LoRARequest, SamplingParams
from anyengine.policies import RestartPolicy, RetryPolicy

from .client_thread import Backend, ClientThread
from .groups import SyncRequestGroup
from .methods import blocking, calling, conversing, following, gathering, streaming, submitting, subscribing
from .operations import SyncEngineOperations
from .streams import SyncRequestStream

__all__ = ["ClientOptions", "SyncEngineClient"]

P = ParamSpec("P")
R = TypeVar("R")


class ClientOptions(TypedDict, total=False):
    """The keyword arguments of :class:`EngineClient`, but for ``engine``."""

    startup_timeout_s: float | None
    shutdown_grace_s: float | None
    drain_timeout_s: float
    liveness_timeout_s: float | None
    max_unread_bytes: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    admission: Literal["reject", "wait"]
    on_death: Literal["report", "cancel"]
    on_progress: Callable[[Status], None] | None
    on_notification: Callable[[Notification], Awaitable[None]] | None
    balancer: Balancer | None
    restart: RestartPolicy | None
    retries: RetryPolicy | None
    mm_preprocessor: MultiModalPreprocessor | None
    limiter: Limiter | None
    stats_interval_s: float | None
    stats_sinks: Sequence[StatisticsSink]
    strict: bool


class SyncEngineClient(SyncEngineOperations):
    """:class:`EngineClient` for scripts, notebooks and programs of threads: its methods block, and any number of
    threads may call them at once.

    Use it as ``with SyncEngineClient(...) as client:``. The client runs in an event loop of its own, in a thread of its
    own, which ends with the block, as all else does. Entering again starts afresh.

    Ctrl-C, or any exception of a signal handler, ends the call that waits: its request is aborted. At the end of the
    block it ends the waiting for requests in flight. Callbacks (``on_progress``, ...) and lazy iterables of prompts run
    in the client's thread: they must not block, nor call the client.

    Every call raises :class:`WrongLoopError` in the client's own thread, in a forked process, and in a thread that runs
    an event loop, which would stand still.

    Args:
        model, engine: see :class:`EngineClient`.
        backend, backend_options: the event loop: see ``anyio.run``.
        allow_running_loop: allow calls in a thread that runs an event loop, where nothing else needs it: in a notebook.
        options: all other arguments of :class:`EngineClient`. There is no body to be cancelled: with
            ``on_death="cancel"`` the client closes, and the end of the block raises the cause.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        engine: EngineSettings | Sequence[EngineSettings] | None = None,
        backend: Backend = "asyncio",
        backend_options: Mapping[str, Any] | None = None,
        allow_running_loop: bool = False,
        **options: Unpack[ClientOptions],
    ) -> None:
        check_flag("allow_running_loop", allow_running_loop)
        if backend_options is not None and not isinstance(backend_options, Mapping):
            raise ValueError(f"backend_options={backend_options!r} must be a mapping of names to values, or None")
        self._client = EngineClient(model, engine=engine, **options)
        self._backend: Backend = backend
        self._backend_options = backend_options
        self._allow_running_loop = allow_running_loop
        self._thread: ClientThread | None = None

    def __enter__(self) -> Self:
        """Start the engine, and wait until it is ready.

        Raises: see :meth:`EngineClient.__aenter__`; ``LookupError``: there is no such backend.
        """
        if self._thread is not None and not self._thread.has_ended:
            raise RuntimeError("this client is in use already; make another one for another block")
        thread = ClientThread(
            self._client,
            backend=self._backend,
            backend_options=self._backend_options,
            allow_running_loop=self._allow_running_loop,
        )
        thread.start()
        self._thread = thread
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._thread.stop(in_hurry=exc is not None)

    def _running(self) -> ClientThread:
        if self._thread is None:
            raise ClientClosedError("the client has not been entered; use it inside `with`")
        return self._thread

    def run(self, func: Callable[Concatenate[EngineClient, P], Awaitable[R]], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``await func(client, ...)`` in the client's loop, with the asynchronous client: for what is not here.

        Raises: what it raises.
        """
        thread = self._running()
        return thread.call(lambda: func(thread.client, *args, **kwargs))

    @blocking(EngineClient.aclose)
    def close(self) -> None:
        """Close before the block is left; see :meth:`EngineClient.aclose`."""

    # ------------------------------------------------------------------ requests

    @streaming(EngineClient.generate)
    def generate(self) -> None:
        """A stream of outputs; inert until it is used. See :meth:`EngineClient.generate`."""

    @streaming(EngineClient.chat)
    def chat(self) -> None:
        """:meth:`generate` for chat messages; see :meth:`EngineClient.chat`."""

    @blocking(EngineClient.complete)
    def complete(self) -> None:
        """The whole answer to a prompt; see :meth:`EngineClient.complete`."""

    @overload
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[GroupOptions],
    ) -> SyncRequestGroup[RequestOutput]: ...
    @overload
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_error: Literal["raise", "collect"],
        **options: Unpack[GroupOptions],
    ) -> SyncRequestGroup[RequestOutput | EngineError]: ...
    @gathering(EngineClient.generate_many)  # type: ignore[misc] # of several signatures it hands on the first alone
    def generate_many(self) -> None:
        """One answer for each prompt, as they are ready or in order; see :meth:`EngineClient.generate_many`."""

    @blocking(EngineClient.encode)
    def encode(self) -> None:
        """What a pooling model makes of a prompt; see :meth:`EngineClient.encode`."""

    @blocking(EngineClient.embed)
    def embed(self) -> None:
        """The embedding of a prompt; see :meth:`EngineClient.embed`."""

    @blocking(EngineClient.classify)
    def classify(self) -> None:
        """The classes of a prompt; see :meth:`EngineClient.classify`."""

    @blocking(EngineClient.score)
    def score(self) -> None:
        """How near documents are to a query; see :meth:`EngineClient.score`."""

    @blocking(EngineClient.rerank)
    def rerank(self) -> None:
        """The documents that are nearest to a query; see :meth:`EngineClient.rerank`."""

    @submitting(EngineClient.submit)
    def submit(self) -> None:
        """:meth:`generate`, and send the request before returning; see :meth:`EngineClient.submit`."""

    def abort(
        self,
        request: RequestName | SyncRequestStream | Iterable[RequestName | SyncRequestStream],
        *,
        timeout_s: float | None = None,
    ) -> tuple[str, ...]:
        """Abort requests by label, wire id or stream, or several of these; see :meth:`EngineClient.abort`."""
        if isinstance(request, str | RequestStream | SyncRequestStream) or not isinstance(request, Iterable):
            request = [request]
        names = [one.asynchronous if isinstance(one, SyncRequestStream) else one for one in request]
        thread = self._running()
        return thread.call(lambda: thread.client.abort(names, timeout_s=timeout_s))

    @blocking(EngineClient.beam_search)
    def beam_search(self) -> None:
        """The likeliest answers as a whole; see :meth:`EngineClient.beam_search`."""

    @conversing(EngineClient.input_session)
    def input_session(self) -> None:
        """A request whose prompt comes in parts; see :meth:`EngineClient.input_session`."""

    @blocking(EngineClient.abort_all)
    def abort_all(self) -> None:
        """:meth:`abort` for every request; see :meth:`EngineClient.abort_all`."""

    @blocking(EngineClient.drain)
    def drain(self) -> None:
        """Wait until what is in flight has ended; see :meth:`EngineClient.drain`."""

    @calling(EngineClient.check_admission)
    def check_admission(self) -> None:
        """Whether a request would be taken now; see :meth:`EngineClient.check_admission`."""

    @blocking(EngineClient.tokenize)
    def tokenize(self) -> None:
        """The token ids of a prompt; see :meth:`EngineClient.tokenize`."""

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """The model's own parameters; see :meth:`EngineClient.default_sampling_params`."""
        self._running().check_caller()
        return self._client.default_sampling_params(**given)

    # ----------------------------------------------------------------- utilities

    @blocking(EngineClient.health)
    def health(self) -> None:
        """How every rank is; see :meth:`EngineClient.health`."""

    @blocking(EngineClient.check_health)
    def check_health(self) -> None:
        """Raise if a rank is not healthy; see :meth:`EngineClient.check_health`."""

    @blocking(EngineClient.ping)
    def ping(self) -> None:
        """Ask an engine's main loop for a sign of life; see :meth:`EngineClient.ping`."""

    @blocking(EngineClient.wait_dead)
    def wait_dead(self) -> None:
        """Wait until the client ends, or a rank is lost; why. See :meth:`EngineClient.wait_dead`."""

    @following(EngineClient.events)
    def events(self) -> None:
        """Follow the client's life; see :meth:`EngineClient.events`."""

    @subscribing(EngineClient.kv_events)
    def kv_events(self) -> None:
        """What a rank's KV cache takes in and drops; see :meth:`EngineClient.kv_events`."""

    @calling(EngineClient.get_kv_event_sources)
    def get_kv_event_sources(self) -> None:
        """Which ranks publish KV cache events; see :meth:`EngineClient.get_kv_event_sources`."""

    @calling(EngineClient.statistics)
    def statistics(self) -> None:
        """Counters of this block; see :meth:`EngineClient.statistics`."""

    @calling(EngineClient.stats)
    def stats(self) -> None:
        """The client's figures as they stand; see :meth:`EngineClient.stats`."""

    @blocking(EngineClient.do_log_stats)
    def do_log_stats(self) -> None:
        """Log the figures now; see :meth:`EngineClient.do_log_stats`."""

    @calling(EngineClient.debug_snapshot)
    def debug_snapshot(self) -> None:
        """What the client holds at this moment; see :meth:`EngineClient.debug_snapshot`."""

    @property
    def state(self) -> ClientState:
        """Where the client is in its life."""
        return self._client.state

    @property
    def is_running(self) -> bool:
        """Whether the client serves; see :attr:`EngineClient.is_running`."""
        return self._client.is_running

    @property
    def is_stopped(self) -> bool:
        """Whether the client serves no more; see :attr:`EngineClient.is_stopped`."""
        return self._client.is_stopped

    @property
    def errored(self) -> bool:
        """Whether the client has died; see :attr:`EngineClient.errored`."""
        return self._client.errored

    @property
    def dead_error(self) -> EngineError | None:
        """What the client has died of; see :attr:`EngineClient.dead_error`."""
        return self._client.dead_error

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take requests."""
        return self._client.ranks

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; see :attr:`EngineClient.tokenizer`."""
        return self._client.tokenizer

    @property
    def loras(self) -> Mapping[str, LoRARequest]:
        """The adapters that this client has had loaded; see :attr:`EngineClient.loras`."""
        return self._client.loras

    @property
    def model_info(self) -> ModelInfo:
        """What is known of the model; see :attr:`EngineClient.model_info`."""
        return self._client.model_info

    @property
    def shutdown_report(self) -> ShutdownReport | None:
        """How the last block ended; see :attr:`EngineClient.shutdown_report`."""
        return self._client.shutdown_report
