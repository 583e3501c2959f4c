"""What a session is told by its client.

Owns the checks of what a client is told, and what stands for what it is not told (:mod:`.defaults`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from anyengine._environment import ENGINE_READY_TIMEOUT_S
from anyengine._process.status import Status
from anyengine._protocol import Balancer
from anyengine._setting_rules import check_callable, check_count, check_flag, check_seconds
from anyengine.config import AttachedEngine, EmbeddedEngine, EngineSettings, InMemoryEngine, VLLMEngine
from anyengine.policies import RestartPolicy

from .defaults import default_grace_s, warn_of_pickles
from .notifications import Notification

__all__ = ["SessionSettings", "engine_of"]


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What a session is told by its client."""

    engines: tuple[EngineSettings, ...]
    """One for each rank that is started; or one that is joined, with all its ranks."""
    startup_timeout_s: float
    shutdown_grace_s: float
    drain_timeout_s: float
    strict: bool
    liveness_timeout_s: float | None
    max_unread_bytes: int
    on_death: Literal["report", "cancel"]
    on_progress: Callable[[Status], None] | None
    on_notification: Callable[[Notification], Awaitable[None]] | None
    balancer: Balancer | None
    restart: RestartPolicy | None

    @classmethod
    def of(
        cls,
        engine: EngineSettings | Sequence[EngineSettings] | None,
        *,
        startup_timeout_s: float | None,
        shutdown_grace_s: float | None,
        drain_timeout_s: float,
        strict: bool,
        liveness_timeout_s: float | None,
        max_unread_bytes: int,
        on_death: Literal["report", "cancel"],
        on_progress: Callable[[Status], None] | None,
        on_notification: Callable[[Notification], Awaitable[None]] | None,
        balancer: Balancer | None,
        restart: RestartPolicy | None,
    ) -> Self:
        """What :class:`EngineCoreClient` was given, checked and filled in.

        Raises:
            ValueError: a value makes no sense, or an environment variable that stands for one.
        """
        if on_death not in ("report", "cancel"):
            raise ValueError(f"on_death={on_death!r} must be 'report' or 'cancel'")
        check_seconds("liveness_timeout_s", liveness_timeout_s, "above 0", none="for no limit")
        for name, given in (("startup_timeout_s", startup_timeout_s), ("shutdown_grace_s", shutdown_grace_s)):
            check_seconds(name, given, none="for the default")
        check_seconds("drain_timeout_s", drain_timeout_s)
        check_count("max_unread_bytes", max_unread_bytes, 1)
        check_flag("strict", strict)
        for name, function in (("on_progress", on_progress), ("on_notification", on_notification)):
            check_callable(name, function)
        engines = _engines(engine)
        if balancer is not None and (isinstance(balancer, type) or not isinstance(balancer, Balancer)):
            raise ValueError(f"balancer={balancer!r} must be an object with choose(request, loads), or None")
        if restart is not None and not isinstance(restart, RestartPolicy):
            raise ValueError(f"restart={restart!r} must be a RestartPolicy, or None for no restarts")
        if restart is not None and isinstance(engines[0], AttachedEngine):
            raise ValueError(f"restart: {engines[0]!r} is started by someone else, who has to start it again as well")
        warn_of_pickles(engines)
        return cls(
            engines=engines,
            startup_timeout_s=ENGINE_READY_TIMEOUT_S.value() if startup_timeout_s is None else startup_timeout_s,
            shutdown_grace_s=default_grace_s(engines) if shutdown_grace_s is None else shutdown_grace_s,
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

    @property
    def in_memory(self) -> bool:
        """Whether the engines are in this process, and no socket is needed."""
        return _in_memory(self.engines[0])

    def engine_of(self, rank: int) -> EngineSettings:
        """What was started as ``rank``; or what was joined, with all its ranks."""
        first = self.engines[0]
        return first if isinstance(first, AttachedEngine) else self.engines[rank]


def engine_of(
    model: str | None, engine: EngineSettings | Sequence[EngineSettings] | None
) -> EngineSettings | Sequence[EngineSettings]:
    """What is to be started, or joined.

    Raises:
        ValueError: both are given, or one as the other.
    """
    named: object = model
    if named is not None and not isinstance(named, str):
        raise ValueError(f"model must be a str; give the {type(named).__name__} as engine=...")
    if isinstance(engine, str):
        raise ValueError(f"engine={engine!r} is a model's name: give it as model, or in an EmbeddedEngine")
    if model is not None and engine is not None:
        raise ValueError(f"give model={model!r} or an engine, not both: an engine names its own model")
    if engine is not None:
        return engine
    return EmbeddedEngine() if model is None else EmbeddedEngine(model=model)


def _in_memory(engine: EngineSettings) -> bool:
    return isinstance(engine, InMemoryEngine) or (isinstance(engine, EmbeddedEngine) and engine.in_process)


def _engines(engine: EngineSettings | Sequence[EngineSettings] | None) -> tuple[EngineSettings, ...]:
    """The engines, one for each rank.

    Raises:
        ValueError: there is none, or an engine that stands for several ranks is not alone.
    """
    engines = (EmbeddedEngine() if engine is None else engine,) if not isinstance(engine, Sequence) else tuple(engine)
    if not engines:
        raise ValueError("engine=[] starts nothing: give one engine for each rank")
    for given in engines:
        one: object = given
        if not isinstance(one, EngineSettings):
            has_one = isinstance(getattr(one, "engine", None), EngineSettings)  # a ScriptedTwin, for one
            remedy = "give its .engine" if has_one else "give an EmbeddedEngine or another of the engine settings"
            raise ValueError(f"engine={one!r} is nothing that a client can start or join: {remedy}")
    joined = [one for one in engines if isinstance(one, AttachedEngine)]
    if joined and len(engines) > 1:
        raise ValueError(f"{joined[0]!r} stands for all ranks of a client: it cannot be one of {len(engines)} engines")
    if len(set(map(_in_memory, engines))) > 1:
        raise ValueError("an engine in memory can only be the rank of a client whose other engines are in memory too")
    sizes = [one.understood.data_parallel_size for one in engines if isinstance(one, VLLMEngine)]
    if max(sizes, default=1) > 1 and len(engines) > 1:
        raise ValueError(
            f"data_parallel_size={max(sizes)} stands for all ranks of a client: that engine cannot be one of "
            f"{len(engines)}; leave it out"
        )
    return engines * max(sizes, default=1)
