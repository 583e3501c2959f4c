"""What a client tells of its engines, and of how they are doing.

Owns the views: nothing here changes anything. What the engines take is :mod:`.engine_limits`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from anyengine._client.session.debugging import DebugSnapshot, take_snapshot
from anyengine._client.session.settings import SessionSettings
from anyengine._wire import EngineCoreReadyResponse
from anyengine.config import EmbeddedEngine, EngineSettings, RunningEngine

from .calls import EngineCalls

if TYPE_CHECKING:
    from anyengine.vllm.arguments import UnderstoodArguments

__all__ = ["EngineInfo"]


class EngineInfo(EngineCalls):
    """The properties of a client. Lifetime: the client's; most of them need its block to have been entered."""

    _settings: SessionSettings

    @property
    def engines(self) -> tuple[EngineSettings, ...]:
        """What was started, one for each rank; or what was joined."""
        return self._settings.engines

    @property
    def registrations(self) -> dict[int, EngineCoreReadyResponse | None]:
        """What each rank reported about itself when it became ready."""
        return dict(self.session.registrations)

    @property
    def running_engine(self) -> RunningEngine:
        """What a later client needs to take over the engines of this one when it is gone: plain data, to be stored.

        Of use where the engines live on (somebody else's), at addresses that the later client can have.
        """
        session = self.session
        return RunningEngine(
            inputs=session.endpoints.input_address,
            outputs=session.endpoints.output_address,
            registrations={
                rank: None if ready is None else dict(ready.received) for rank, ready in session.registrations.items()
            },
            model_dir=self.model_dir,
            args=args if isinstance(args := getattr(self.engines[0], "args", {}), Mapping) else {},
        )

    @property
    def merged_registration(self) -> EngineCoreReadyResponse | None:
        """:attr:`registrations` as if the ranks were one engine: the least ``max_model_len``, the caches' sizes added
        up, and else what all of them agree on. ``None``: their release says nothing."""
        return self.session.merged_registration

    @property
    def model_dir(self) -> str | None:
        """The local directory with the model's tokenizer and configuration, if the engine told."""
        configured = (getattr(engine, "model_dir", None) for engine in self._settings.engines)
        told = (engine.model_dir for engine in self.session.engines.values())
        return next(filter(None, (*configured, *told)), None)

    @property
    def engine_arguments(self) -> UnderstoodArguments | None:
        """What the client understands of the engine's own arguments; ``None``: nobody told, or it has none."""
        first = self._settings.engines[0]
        return None if isinstance(first, EmbeddedEngine) else first.understood

    @property
    def skips_text(self) -> bool:
        """Whether the engine was started for token ids only, and nobody else named a tokenizer."""
        arguments = self.engine_arguments
        told = getattr(self._settings.engines[0], "model_dir", None)
        return arguments is not None and arguments.skip_tokenizer_init and told is None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take requests."""
        return self.session.connection.rota.serving

    def debug_snapshot(self) -> DebugSnapshot:
        """What the client holds at this moment: its tasks, requests and calls by name, bytes and items that wait."""
        return take_snapshot(self.session)

    def statistics(self) -> dict[str, int]:
        """Counters of this session: requests and calls in flight, outputs and replies that came too late, and so on."""
        session = self.session
        connection = session.connection
        return {
            "requests_in_flight": len(connection.requests),
            "unread_bytes": session.send_budget.unread_bytes,
            "utility_calls_in_flight": len(connection.utilities),
            "late_outputs": connection.requests.late_outputs,
            "late_utility_replies": connection.utilities.late_replies,
            "malformed_messages": connection.malformed_messages,
            "restarts": session.restarts.count,
            "notification_failures": session.notifications.failures,
        }
