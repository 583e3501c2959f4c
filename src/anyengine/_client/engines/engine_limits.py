"""What a session learns of its engines, so that nothing hurtful is ever sent.

Owns where each limit comes from: the registration, the arguments, the model's files, the engine's own word. What they
mean is admission's, and the request builder's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import msgspec

from anyengine._protocol import EngineLimits
from anyengine._text import ModelFacts
from anyengine._transport.abc import PeerUnreachable
from anyengine._wire import EngineCoreReadyResponse, engine_identity, newer_than_known
from anyengine.config import CommandEngine, EmbeddedEngine, EngineSettings, InMemoryEngine, VLLMEngine

if TYPE_CHECKING:
    from anyengine._client.session.session import Session

__all__ = ["common_limits", "learn_limits", "learn_tasks", "limits_of"]

_ANSWER_LIMIT_S = 30.0  # an engine that has just become ready has nothing else to do
_UNLIMITED_TOKENS = EngineLimits.unknown().max_model_len


async def learn_limits(session: Session, ranks: Iterable[int]) -> None:
    """Tell the session's connection what each of ``ranks`` can take.

    What cannot be learnt stays unknown, and is no error: a broken directory is reported by whoever needs more of it.

    Cancellation: safe; a disk that hangs keeps only its worker thread.
    """
    facts: dict[str, ModelFacts | None] = {}
    unasked: list[int] = []
    for rank in ranks:
        ready = session.registrations[rank]
        engine = session.settings.engine_of(rank)
        process = session.engines.get(rank)
        model_dir = getattr(engine, "model_dir", None) or (process.model_dir if process is not None else None)
        if model_dir is not None and model_dir not in facts:
            facts[model_dir] = await anyio.to_thread.run_sync(_facts_of, model_dir, abandon_on_cancel=True)
        session.connection.limits[rank] = limits_of(ready, engine, facts[model_dir] if model_dir is not None else None)
        if _is_vllm(engine) and not session.is_lost(rank):  # fragile, so asked at once; others may not answer
            unasked.append(rank)
    async with anyio.create_task_group() as asking:
        for rank in unasked:
            asking.start_soon(_learn_tasks, session, rank, _ANSWER_LIMIT_S)


async def learn_tasks(session: Session) -> None:
    """Ask the ranks that have not told what their model can do; one that does not tell leaves it open.

    Cancellation: what was learnt is kept.
    """

    async def ask(rank: int) -> None:
        # It may have died since this was to be started. A call that is made behind a death is answered by nobody.
        if rank not in session.burials.deaths:
            await _learn_tasks(session, rank, math.inf)

    async with anyio.create_task_group() as asking:
        for rank in session.connection.rota.serving:
            if session.connection.limits[rank].tasks is None:
                asking.start_soon(ask, rank)


def common_limits(session: Session) -> EngineLimits:
    """What every rank that takes requests can take."""
    connection = session.connection
    return EngineLimits.common([connection.limits[rank] for rank in connection.rota.serving or connection.ranks])


def limits_of(
    ready: EngineCoreReadyResponse | None, engine: EngineSettings, facts: ModelFacts | None = None
) -> EngineLimits:
    """What ``engine`` can take, by its registration, its arguments and its model's files."""
    arguments = None if isinstance(engine, EmbeddedEngine) else engine.understood
    registered = EngineCoreReadyResponse(_UNLIMITED_TOKENS) if ready is None else ready

    def started_with(name: str, default: Any = None) -> Any:
        """vLLM's defaults are known of an engine that we start; of others, only what was said."""
        said = isinstance(engine, VLLMEngine) or getattr(engine, "args", {}).get(name) is not None
        return getattr(arguments, name) if said else default

    lora, policy = registered.supports_lora, started_with("scheduling_policy")
    mm_cache = None if started_with("mm_processor_cache_gb") is None else True
    if arguments is not None and not arguments.keeps_mm_items:
        mm_cache = False
    return EngineLimits(
        max_model_len=registered.max_model_len,
        vocab_size=facts.vocab_size if facts else None,
        hidden_size=facts.hidden_size if facts else None,
        tasks=None,
        lora=started_with("enable_lora") if lora is None else lora,
        prompt_embeds=started_with("enable_prompt_embeds"),
        fault_tolerance=started_with("enable_fault_tolerance"),
        mm_cache=mm_cache,
        known_methods_only=_is_vllm(engine) and newer_than_known(ready) is None,
        priorities=None if policy is None else policy == "priority",
        max_loras=registered.max_loras or started_with("max_loras", 1),
        max_logprobs=engine.max_logprobs if isinstance(engine, EmbeddedEngine) else started_with("max_logprobs", 20),
        tokenizer=not started_with("skip_tokenizer_init", False),
        reasoning=arguments is not None and arguments.reasons,
        trace_replay=started_with("enable_trace_replay", False),
        structured_outputs_backend=_structured_outputs_backend(engine),
        pooler=started_with("pooler_config") or {},
        embedded=isinstance(engine, EmbeddedEngine),
    )


def _structured_outputs_backend(engine: EngineSettings) -> str:
    if isinstance(engine, EmbeddedEngine):
        return "guidance"  # the library is the same
    return "auto" if engine.understood is None else engine.understood.structured_outputs_backend


def _is_vllm(engine: EngineSettings) -> bool:
    return not isinstance(engine, EmbeddedEngine | CommandEngine | InMemoryEngine)


def _facts_of(model_dir: str) -> ModelFacts | None:
    try:
        return ModelFacts.read(model_dir)
    except Exception:  # noqa: BLE001 - an engine named the directory: what is in it can make a parser fail in any way
        return None


async def _learn_tasks(session: Session, rank: int, limit_s: float) -> None:
    """Ask what the engine's model can do, and keep what it says."""
    if session.cause is not None:
        return
    connection = session.connection
    answered = anyio.Event()
    call, frames = connection.utility("get_supported_tasks", (), rank, answered.set, unchecked=True)
    try:
        session.endpoints.inputs.send_nowait([engine_identity(rank), *frames])
        with anyio.move_on_after(limit_s):
            await answered.wait()
    except PeerUnreachable:
        pass  # it is being buried, which tells more
    finally:
        connection.utilities.forget(call.call_id)
    if call.error is None and isinstance(call.value, list):
        tasks = frozenset(task for task in call.value if isinstance(task, str))
        connection.limits[rank] = msgspec.structs.replace(connection.limits[rank], tasks=tasks)
