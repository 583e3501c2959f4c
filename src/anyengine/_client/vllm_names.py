"""What users of vLLM's ``AsyncLLM`` look for under its name, and has no better one here.

Owns the translation into what the client knows of itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from anyengine._protocol import ClientState
from anyengine._rules import mapping
from anyengine._wire import EngineCoreRequest, KVEventsConfig, WireSamplingParams
from anyengine.exceptions import EngineError

from .adapters import Adapters
from .core_client import EngineCoreClient
from .engines.kv_events import KVEventStream

__all__ = ["VLLMNames"]

_SERVING = (ClientState.READY, ClientState.PAUSED, ClientState.ASLEEP, ClientState.RESTARTING)


class VLLMNames(Adapters):
    """Part of :class:`EngineClient`. Lifetime: the client's."""

    _core: EngineCoreClient

    @property
    def is_running(self) -> bool:
        """Whether the client serves, or waits for an engine that is started again."""
        return self._core.state in _SERVING

    @property
    def is_stopped(self) -> bool:
        """Whether the client serves no more: it has died, is being closed, or is not entered."""
        return not self.is_running

    @property
    def errored(self) -> bool:
        """Whether the client has died; to be closed is no error."""
        return self._core.state is ClientState.DEAD

    @property
    def dead_error(self) -> EngineError | None:
        """What the client has died of."""
        return self._core.life.cause

    async def is_tracing_enabled(self) -> bool:
        """Whether the engine was started to send spans (``otlp_traces_endpoint``)."""
        args: Any = getattr(self._core.engines[0], "args", {})
        return isinstance(args, Mapping) and args.get("otlp_traces_endpoint") is not None

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        """Which ranks publish KV cache events, and how; see :meth:`EngineCoreClient.get_kv_event_sources`."""
        return self._core.get_kv_event_sources()

    def kv_events(self, rank: int = 0, *, endpoint: str | None = None) -> KVEventStream:
        """What a rank's KV cache takes in and drops; see :meth:`EngineCoreClient.kv_events`."""
        return self._core.kv_events(rank, endpoint=endpoint)

    async def checkpoint_prepare(self) -> None:
        """Have every worker get ready for a checkpoint of its process."""
        await self.collective_rpc("checkpoint_prepare")

    async def checkpoint_restore(self) -> None:
        """Have every worker go on behind a checkpoint of its process."""
        await self.collective_rpc("checkpoint_restore")

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, kv_transfer_params: Mapping[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        """Tell the engine's KV connector that a request which another engine has prepared will not come, so that it
        frees what was kept for it. Nothing is generated, and nothing answers.

        Raises:
            RequestRejected: bad input; nothing was sent.
            EngineDeadError: the engine died, or the client is closed.
        """
        params = mapping()("kv_transfer_params", kv_transfer_params)
        _, wire_id = self._entered_desk().builder.next_ids(request_id)
        request = EngineCoreRequest(
            wire_id,
            [0],
            sampling_params=WireSamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            arrival_time=time.time(),
            data_parallel_rank=data_parallel_rank,
            abort_immediately=True,
        )
        self._core.tell(request)
