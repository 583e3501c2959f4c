"""What is known of a connected engine, as far as it decides what the engine can be sent.

Owns the record only: whoever opens the connection fills it in.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineLimits"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits of a connected engine; ``None`` where nobody told us: then only what hurts every engine is refused.

    ``max_model_len`` is in tokens, prompt and output together. ``vocab_size`` counts the rows of the embedding,
    ``hidden_size`` its columns. ``tasks`` are what the model can do (``"generate"``, ``"embed"``, ...). ``lora``,
    ``prompt_embeds`` and ``fault_tolerance``: whether the engine was started with it. ``known_methods_only``: the
    engine is vLLM, of a release whose utility methods we know, so that no others are worth a call.
    """

    max_model_len: int
    vocab_size: int | None = None
    hidden_size: int | None = None
    tasks: frozenset[str] | None = None
    lora: bool | None = None
    prompt_embeds: bool | None = None
    fault_tolerance: bool | None = None
    known_methods_only: bool = False

    @classmethod
    def unknown(cls) -> EngineLimits:
        """The limits of an engine that nothing is known of."""
        return cls(max_model_len=1 << 31)
