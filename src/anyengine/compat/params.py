"""What a program gives to ``AsyncLLM.generate``: vLLM's defaults, and its forms of a prompt.

Owns where vLLM's parameters differ from ours. The rules of their values are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from anyengine import params
from anyengine._client.inputs.prompts import EmbedsPrompt, Prompt
from anyengine._rules import reject

__all__ = ["SamplingParams", "TextPrompt", "TokensPrompt", "split_prompt"]


class SamplingParams(params.SamplingParams, frozen=True, kw_only=True):
    """:class:`anyengine.SamplingParams` with vLLM's default kind of output: everything so far, in each item.

    Unlike vLLM's it is frozen: make another one instead of changing it.
    """

    output_kind: params.OutputKind = params.OutputKind.CUMULATIVE
    skip_clone: bool = False
    """Of no effect: what is frozen needs no copy."""

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """Parameters from those of ``given`` that are not ``None``."""
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

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


def split_prompt(prompt: Any) -> tuple[Prompt, str | None, str | None]:
    """A prompt of any of vLLM's forms: what is sent, its text, and the cache salt that is in it.

    Raises:
        RequestRejected: there is something else in it, which would be lost.
    """
    if not isinstance(prompt, Mapping):
        return prompt, prompt if isinstance(prompt, str) else None, None
    if others := prompt.keys() - {"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "type"}:
        reject("prompt", sorted(map(str, others)), "cannot be given here", "give text, token ids or embeddings")
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    if prompt.get("prompt_embeds") is not None:
        return EmbedsPrompt(prompt_embeds=prompt["prompt_embeds"]), text, salt
    given = prompt.get("prompt_token_ids", text)
    if given is None:
        reject("prompt", sorted(map(str, prompt)), "has no prompt in it", "give text, token ids or embeddings")
    return given, text, salt
