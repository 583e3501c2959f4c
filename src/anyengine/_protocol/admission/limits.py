"""What is known of a connected engine, as far as it decides what the engine can be sent.

Owns the record, and what several engines have in common. Whoever opens the connection fills it in.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

__all__ = ["EngineLimits"]


class EngineLimits(msgspec.Struct, frozen=True):
    """The limits of a connected engine. ``None`` where nobody told us: then only what hurts every engine is refused.

    ``max_model_len`` is in tokens, prompt and output together. ``vocab_size`` counts the rows of the embedding,
    ``hidden_size`` its columns. ``tasks`` are what the model can do (``"generate"``, ``"embed"``, ...). ``lora``,
    ``prompt_embeds`` and ``fault_tolerance``: whether the engine was started with it. ``mm_cache``: whether it keeps
    multi-modal items. ``priorities``: whether it schedules by priority. ``known_methods_only``: the engine is vLLM, of
    a release whose utility methods we know, so that no others are worth a call. ``max_loras`` adapters stay loaded at
    least. ``max_logprobs`` -1: as many as the vocabulary has. ``pooler`` has the defaults of pooling parameters. These
    last ones and those below have the value of a vLLM engine without arguments of its own where nobody told us; what
    they allow hurts no engine. ``embedded``: it is ours, whose settings are not all vLLM's.
    """

    max_model_len: int
    vocab_size: int | None = None
    hidden_size: int | None = None
    tasks: frozenset[str] | None = None
    lora: bool | None = None
    prompt_embeds: bool | None = None
    fault_tolerance: bool | None = None
    mm_cache: bool | None = None
    known_methods_only: bool = False
    priorities: bool | None = None
    max_loras: int = 1
    max_logprobs: int = 20
    tokenizer: bool = True
    reasoning: bool = False
    trace_replay: bool = False
    structured_outputs_backend: str = "auto"
    pooler: Mapping[str, Any] = {}
    embedded: bool = False

    def enabled_by(self, argument: str) -> str:
        """How to have what vLLM's ``argument`` turns on: the second half of a remedy."""
        if not self.embedded:
            return f"start the engine with {argument}"
        if argument.startswith("enable_lora"):
            return "start the engine with max_loras=1 or more"
        return "use an engine that has it, such as vLLM's: the embedded one does not"

    @classmethod
    def unknown(cls) -> EngineLimits:
        """The limits of an engine that nothing is known of."""
        return cls(max_model_len=1 << 31)

    @classmethod
    def common(cls, engines: Collection[EngineLimits]) -> EngineLimits:
        """What every one of ``engines`` takes, of which there is at least one; they serve one model."""
        first = next(iter(engines))
        merged: dict[str, Any] = {name: all(getattr(one, name) for one in engines) for name in _SWITCHES}
        for name in _KNOWN_SWITCHES:
            told = [getattr(one, name) for one in engines]
            merged[name] = False if False in told else None if None in told else True
        for name in ("max_model_len", "vocab_size", "hidden_size", "max_loras"):
            merged[name] = min((size for one in engines if (size := getattr(one, name)) is not None), default=None)
        tasks = [one.tasks for one in engines if one.tasks is not None]
        merged["tasks"] = frozenset.intersection(*tasks) if len(tasks) == len(engines) else None
        merged["max_logprobs"] = min((one.max_logprobs for one in engines if one.max_logprobs >= 0), default=-1)
        return msgspec.structs.replace(first, **merged)


_SWITCHES: Final = ("known_methods_only", "tokenizer", "reasoning", "trace_replay", "embedded")
_KNOWN_SWITCHES: Final = ("lora", "prompt_embeds", "fault_tolerance", "mm_cache", "priorities")
