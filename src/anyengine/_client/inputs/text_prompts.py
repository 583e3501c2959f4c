"""Prompts that are text in some form, on their way to token ids: plain text, chat messages, vLLM's dictionaries.

Owns the forms, what may be said about their tokenizing, and truncation. Blocking: whoever calls decides in which
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, cast

import msgspec

from anyengine._rules import flag, integer, mapping, reject
from anyengine._text import Tokenizer

__all__ = ["ChatPrompt", "TextTokens", "Tokenization", "is_text", "num_chars", "tokenize", "without_dictionary"]


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt of chat messages, which the model's chat template turns into text; see :meth:`EngineClient.chat`."""

    messages: Sequence[Mapping[str, Any]]
    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class TextTokens(list[int]):
    """Token ids that were text: :attr:`text`."""

    __slots__ = ("text",)

    def __init__(self, token_ids: Iterable[int], text: str) -> None:
        super().__init__(token_ids)
        self.text = text


class Tokenization(msgspec.Struct, frozen=True):
    """What ``tokenization_kwargs`` say."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "right"
    add_special_tokens: bool = True

    @classmethod
    def of(cls, given: Any) -> Tokenization:
        """Checked.

        Raises:
            RequestRejected: something is unknown, or of a wrong type.
        """
        if not given:
            return _PLAIN
        values = {name: value for name, value in mapping()("tokenization_kwargs", given).items() if value is not None}
        for name, value in values.items():
            if name not in _RULES:
                reject(f"tokenization_kwargs[{name!r}]", value, "is unknown", f"use {', '.join(_RULES)}")
            _RULES[name](name, value)
        return cls(**values)

    def cut(self, token_ids: Sequence[int], max_prompt_tokens: int) -> Sequence[int]:
        """``token_ids``, truncated as asked; -1 leaves what the model's length allows, ``max_prompt_tokens``."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        limit = max_prompt_tokens if limit == -1 else limit
        if len(token_ids) <= limit:
            return token_ids
        kept = token_ids[len(token_ids) - limit :] if self.truncation_side == "left" else token_ids[:limit]
        return TextTokens(kept, token_ids.text) if isinstance(token_ids, TextTokens) else kept


def _side(name: str, value: Any) -> None:
    if value not in ("left", "right"):
        reject(name, value, "is no side", "use 'left', which keeps the end of the prompt, or 'right'")


_PLAIN: Final = Tokenization()
_RULES: Final[dict[str, Any]] = {
    "truncate_prompt_tokens": integer(-1),
    "truncation_side": _side,
    "add_special_tokens": flag(),
}


def without_dictionary(prompt: Any) -> Any:
    """What is in a prompt of vLLM's forms ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``; others as they are.

    Raises:
        RequestRejected: there is something else in it, which would be lost.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    if others := prompt.keys() - {"prompt_token_ids", "prompt", "type"}:
        reject("prompt", sorted(map(str, others)), "are more than a prompt", "give them as arguments")
    given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if given is None:
        reject("prompt", sorted(map(str, prompt)), "has no prompt in it", "use a str, token ids or an EmbedsPrompt")
    return given


def is_text(prompt: Any) -> bool:
    """Whether ``prompt`` has to be tokenized."""
    return isinstance(prompt, str | ChatPrompt)


def num_chars(prompt: str | ChatPrompt) -> int:
    """About how long its text is."""
    if isinstance(prompt, str):
        return len(prompt)
    return len(str(prompt.messages))


def tokenize(tokenizer: Tokenizer, prompt: str | ChatPrompt, options: Tokenization) -> TextTokens:
    """The token ids of ``prompt``, not truncated. Blocks in proportion to its length.

    Raises:
        RequestRejected: it is not Unicode text, or the chat template refuses it.
    """
    if isinstance(prompt, str):
        return TextTokens(tokenizer.encode(prompt, add_special_tokens=options.add_special_tokens), prompt)
    variables: dict[str, Any] = {"strftime_now": lambda form: datetime.now().astimezone().strftime(form)}
    variables |= cast("dict[str, Any]", prompt.chat_template_kwargs or {})
    if prompt.tools is not None:
        variables["tools"] = list(prompt.tools)
    if prompt.documents is not None:
        variables["documents"] = list(prompt.documents)
    text = tokenizer.render_chat(
        prompt.messages,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template=prompt.chat_template,
        **variables,
    )
    return TextTokens(tokenizer.encode(text, add_special_tokens=False), text)  # the template writes special tokens
