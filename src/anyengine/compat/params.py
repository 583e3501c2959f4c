"""What a program gives to ``AsyncLLM.generate``: vLLM's defaults, and its forms of a prompt.

Owns where vLLM's parameters differ from ours. The rules of their values are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

from anyengine import params
from anyengine._client.inputs import prompts
from anyengine._client.inputs.prompts import Prompt
from anyengine._rules import reject

__all__ = ["EmbedsPrompt", "SamplingParams", "TextPrompt", "TokensPrompt", "split_prompt"]


class SamplingParams(params.SamplingParams, frozen=True, kw_only=True):
    """:class:`anyengine.SamplingParams` with vLLM's default kind of output: everything so far, in each item.

    Unlike vLLM's it is frozen: make another one instead of changing it.
    """

    output_kind: params.OutputKind = params.OutputKind.CUMULATIVE
    skip_clone: bool = False
    """Of no effect: what is frozen needs no copy."""

    def clone(self) -> SamplingParams:
        """Itself."""
        return self


class TextPrompt(TypedDict, total=False):
    """A prompt that is text."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt that is token ids; ``prompt`` is its text, which comes back in the outputs."""

    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt that is embeddings [num_prompt_tokens, hidden_size]; the positions that ``prompt_is_token_ids`` marks
    take the embedding of the token in ``prompt_token_ids`` instead."""

    prompt_embeds: Any
    prompt: str
    prompt_token_ids: Sequence[int]
    prompt_is_token_ids: Sequence[bool]
    cache_salt: str


_KNOWN: Final = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "cache_salt", "type"})


def split_prompt(prompt: Any) -> tuple[Prompt, str | None, str | None]:
    """A prompt of any of vLLM's forms: what is sent, its text, and the cache salt that is in it.

    Raises:
        RequestRejected: there is something else in it, which would be lost.
    """
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None, None
    if others := [name for name, value in prompt.items() if name not in _KNOWN and not _says_nothing(value)]:
        reject("prompt", sorted(map(str, others)), "cannot be given here", "give text, token ids or embeddings")
    text, token_ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
    if (embeds := prompt.get("prompt_embeds")) is not None:
        marks = prompt.get("prompt_is_token_ids")
        ids = None if marks is None else token_ids  # without marks, every position has its row
        return prompts.EmbedsPrompt(prompt_embeds=embeds, prompt_token_ids=ids, prompt_is_token_ids=marks), text, salt
    given = text if token_ids is None else token_ids
    if given is None:
        reject("prompt", sorted(map(str, prompt)), "has no prompt in it", "give text, token ids or embeddings")
    return given, text, salt


def _says_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and not value)
