"""What an engine can do, as far as requests depend on it.

Owns what is known of an engine beyond its model: from its registrations, and from the arguments it was started with,
since a registration says little. Decides nothing about requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self

import msgspec

from anyengine._wire import EngineCoreReadyResponse
from anyengine.config import EmbeddedEngine, EngineSettings, VLLMEngine

__all__ = ["EngineFacts"]

_MAX_LOGPROBS: Final = 20  # vLLM's default
_SWITCHES: Final = ("prompt_embeds", "tokenizer", "reasoning", "trace_replay", "priorities", "lora")


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Each field has the value of a vLLM engine without arguments of its own.

    ``max_logprobs`` -1: as many as the vocabulary has. ``priorities`` ``None``: nobody knows. ``lora``: ``False`` if a
    rank says that it has none. ``tasks`` ``None``: the engine must be asked.
    """

    max_logprobs: int = _MAX_LOGPROBS
    prompt_embeds: bool = False
    tokenizer: bool = True
    reasoning: bool = False
    trace_replay: bool = False
    structured_outputs_backend: str = "auto"
    priorities: bool | None = None
    lora: bool = True
    max_loras: int = 1
    pooler: Mapping[str, Any] = {}
    tasks: frozenset[str] | None = None

    @classmethod
    def of(
        cls,
        engines: Sequence[EngineSettings],
        registrations: Iterable[EngineCoreReadyResponse | None],
        tasks: frozenset[str] | None = None,
    ) -> Self:
        """What all of several running engines can do; ``tasks`` is what they said, if they were asked."""
        ready = [response for response in registrations if response is not None]
        first, *others = [cls._of_one(engine, ready) for engine in engines]
        for other in others:
            first = first._and(other)
        return first if tasks is None else msgspec.structs.replace(first, tasks=tasks)

    def _and(self, other: Self) -> Self:
        """What both can do."""
        both = {name: getattr(self, name) and getattr(other, name) for name in _SWITCHES}
        counts = [facts.max_logprobs for facts in (self, other) if facts.max_logprobs >= 0]
        return msgspec.structs.replace(
            self,
            **both,
            max_logprobs=min(counts, default=-1),
            max_loras=min(self.max_loras, other.max_loras),
            tasks=None if self.tasks is None or other.tasks is None else self.tasks & other.tasks,
        )

    @classmethod
    def _of_one(cls, engine: EngineSettings, ready: list[EngineCoreReadyResponse]) -> Self:
        given = getattr(engine, "args", {})
        args: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        structured = _section(args, "structured_outputs_config")
        slots = [response.max_loras for response in ready if response.max_loras]
        return cls(
            max_logprobs=int(args.get("max_logprobs", _MAX_LOGPROBS)),
            prompt_embeds=bool(args.get("enable_prompt_embeds")),
            tokenizer=not args.get("skip_tokenizer_init"),
            reasoning=bool(
                args.get("reasoning_parser") or args.get("reasoning_config") or structured.get("reasoning_parser")
            ),
            trace_replay=bool(args.get("enable_trace_replay")),
            structured_outputs_backend=structured.get("backend", "auto"),
            priorities=_priorities(engine, args),
            lora=all(response.supports_lora is not False for response in ready),
            max_loras=min(slots, default=1),
            pooler=_section(args, "pooler_config"),
            tasks=frozenset(("generate",)) if isinstance(engine, EmbeddedEngine) else None,
        )


def _section(args: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = args.get(name)
    return section if isinstance(section, Mapping) else {}


def _priorities(engine: EngineSettings, args: Mapping[str, Any]) -> bool | None:
    policy = args.get("scheduling_policy", "fcfs" if isinstance(engine, VLLMEngine) else None)
    return None if policy is None else policy == "priority"
