"""What a session learns of its engines before it sends the first request, so that nothing hurtful is ever sent.

Owns where each limit comes from: the registration, the settings, the model's files, the engine's own word. What they
mean is admission's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread

from anyengine._protocol import EngineLimits
from anyengine._text import ModelFacts
from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import EngineCoreReadyResponse, engine_identity, newer_than_known
from anyengine.config import CommandEngine, EmbeddedEngine, EngineSettings, VLLMEngine

from .session import Session

__all__ = ["learn_limits"]

_ANSWER_LIMIT_S = 30.0  # an engine that has just become ready has nothing else to do
_UNLIMITED_TOKENS = EngineLimits.unknown().max_model_len


async def learn_limits(session: Session) -> None:
    """Tell the session's connection what each rank can take.

    What cannot be learnt stays unknown, and is no error: a broken directory is reported by whoever needs more of it.

    Cancellation: safe; a disk that hangs keeps only its worker thread.
    """
    facts: dict[str, ModelFacts | None] = {}
    for rank, ready in session.registrations.items():
        engine = session.settings.engine_of(rank)
        process = session.engines.get(rank)
        model_dir = getattr(engine, "model_dir", None) or (process.model_dir if process is not None else None)
        if model_dir is not None and model_dir not in facts:
            facts[model_dir] = await anyio.to_thread.run_sync(_facts_of, model_dir, abandon_on_cancel=True)
        # Only vLLM's are fragile, and are asked: ours refuses one request at a time, others may not answer.
        is_vllm = not isinstance(engine, EmbeddedEngine | CommandEngine)
        tasks = await _ask_tasks(session, rank) if is_vllm else None
        session.connection.limits[rank] = _limits_of(
            ready, engine, facts[model_dir] if model_dir is not None else None, tasks, is_vllm=is_vllm
        )


def _facts_of(model_dir: str) -> ModelFacts | None:
    try:
        return ModelFacts.read(model_dir)
    except Exception:  # noqa: BLE001 - an engine named the directory: what is in it can make a parser fail in any way
        return None


def _limits_of(
    ready: EngineCoreReadyResponse | None,
    engine: EngineSettings,
    facts: ModelFacts | None,
    tasks: frozenset[str] | None,
    *,
    is_vllm: bool,
) -> EngineLimits:
    given = engine.args if isinstance(engine, VLLMEngine) else None
    args: Mapping[str, Any] | None = given if isinstance(given, Mapping) else None

    def started_with(name: str) -> bool | None:
        return None if args is None else bool(args.get(name))

    lora = ready.supports_lora if ready is not None else None
    return EngineLimits(
        max_model_len=_UNLIMITED_TOKENS if ready is None else ready.max_model_len,
        vocab_size=facts.vocab_size if facts else None,
        hidden_size=facts.hidden_size if facts else None,
        tasks=tasks,
        lora=started_with("enable_lora") if lora is None else lora,
        prompt_embeds=started_with("enable_prompt_embeds"),
        fault_tolerance=started_with("enable_fault_tolerance"),
        known_methods_only=is_vllm and newer_than_known(ready) is None,
    )


async def _ask_tasks(session: Session, rank: int) -> frozenset[str] | None:
    """What the engine's model can do; ``None`` if it does not say."""
    answered = anyio.Event()
    call, frames = session.connection.utility("get_supported_tasks", (), rank, answered.set)
    try:
        session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        with anyio.move_on_after(_ANSWER_LIMIT_S):
            await answered.wait()
    except PeerUnreachable:
        pass  # it is being buried, which tells more
    finally:
        session.connection.utilities.forget(call.call_id)
    if call.error is not None or not isinstance(call.value, list):
        return None
    return frozenset(task for task in call.value if isinstance(task, str))
