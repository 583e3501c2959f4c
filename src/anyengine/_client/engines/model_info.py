"""What the model is, as far as its engines and its files tell.

Owns the record and where each figure comes from: the engine's own word first, then the model's files.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from anyengine._protocol import EngineLimits
from anyengine._text import ModelFacts
from anyengine._wire import EngineCoreReadyResponse

__all__ = ["ModelInfo", "model_info"]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a client's engines serve; ``None`` where nobody tells. Of several ranks the least that all take.

    Attributes:
        directory: the local directory with its tokenizer and configuration.
        engine_version: the release of vLLM whose wire the engine speaks.
        dtype: that of the weights, as the engine names it.
        max_model_len: how many tokens prompt and output may have together.
        vocab_size, hidden_size: rows and columns of the embedding.
        eos_token_ids: what ends an output, besides ``stop_token_ids``.
        is_multimodal: whether it takes more than text.
        has_tokenizer, has_chat_template: whether the client can take text, and chat messages.
        max_num_seqs, max_num_batched_tokens: how many sequences run, and how many tokens a step computes, at most.
        block_size: of the KV cache, in tokens; ``num_gpu_blocks`` and ``kv_cache_size_tokens`` add the ranks up.
        supports_lora, max_loras: whether adapters can be loaded, and how many stay loaded on each rank.
        sampling_defaults: what ``generation_config.json`` says of sampling, by the names of ``SamplingParams``.
    """

    directory: str | None = None
    engine_version: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    vocab_size: int | None = None
    hidden_size: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    is_multimodal: bool | None = None
    has_tokenizer: bool = False
    has_chat_template: bool = False
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    num_gpu_blocks: int | None = None
    kv_cache_size_tokens: int | None = None
    supports_lora: bool | None = None
    max_loras: int | None = None
    sampling_defaults: Mapping[str, float] = {}


def model_info(
    ready: EngineCoreReadyResponse | None, limits: EngineLimits, facts: ModelFacts | None, *, has_tokenizer: bool
) -> ModelInfo:
    """What ``ready`` (of all ranks, merged), ``limits`` and the files' ``facts`` say together."""
    said = {name: getattr(ready, name) for name in _SAID} if ready is not None else {}
    unlimited = EngineLimits.unknown().max_model_len
    return ModelInfo(
        **said,
        engine_version=None if ready is None else ready.vllm_version,
        max_model_len=None if limits.max_model_len == unlimited else limits.max_model_len,
        vocab_size=limits.vocab_size,
        hidden_size=limits.hidden_size,
        supports_lora=limits.lora,
        directory=None if facts is None else facts.directory,
        eos_token_ids=() if facts is None else facts.eos_token_ids,
        is_multimodal=None if facts is None else facts.multimodal,
        has_tokenizer=has_tokenizer,
        has_chat_template=facts is not None and facts.chat_template is not None,
        sampling_defaults={} if facts is None else dict(facts.sampling),
    )


_SAID = (
    "dtype", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks", "kv_cache_size_tokens",
    "max_loras",
)  # fmt: skip
