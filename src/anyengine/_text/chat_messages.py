"""Chat messages before a template sees them: contents in parts, and a last message that is to be continued.

Owns what becomes of the parts of a content (vLLM's content formats) and of a message that the model goes on with
(transformers' ``continue_final_message``). Renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from anyengine.exceptions import RequestRejected

__all__ = ["cut_after_mark", "mark_last_message", "with_texts"]

_MARK: Final = "⟨⟨continue here⟩⟩ "
"""Stands at the end of the message that is continued; a template that trims contents takes the space off."""
_ITERATES: Final = re.compile(r"for\s+\w+\s+in\s+\w+(?:\.content|\[\s*['\"]content['\"]\s*\])")


def with_texts(messages: Sequence[Any], template: str) -> list[Any]:
    """``messages`` with contents in the form that ``template`` reads: parts stay parts where it goes through them, and
    are one text, line by line, everywhere else.

    Raises:
        RequestRejected: a part is no text.
    """
    keeps_parts = _ITERATES.search(template) is not None
    return [
        {**message, "content": _content(message["content"], messages, keeps_parts=keeps_parts)}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def mark_last_message(messages: Sequence[Any]) -> list[Any]:
    """``messages`` with a mark at the end of the last one, for :func:`cut_after_mark`.

    Raises:
        RequestRejected: there is no text to continue.
    """
    last = messages[-1] if messages else {}
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, list) and content and isinstance(content[-1], Mapping):
        content = [*content[:-1], {**content[-1], "text": content[-1].get("text", "") + _MARK}]
    elif isinstance(content, str):
        content += _MARK
    else:
        _refuse(messages, "the last message has no text to continue", "leave continue_final_message out")
    return [*messages[:-1], {**last, "content": content}]


def cut_after_mark(rendered: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt up to the end of the last message, whatever the template puts behind it.

    Raises:
        RequestRejected: the template does not show the last message.
    """
    position = rendered.rfind(_MARK.strip())
    if position == -1:
        _refuse(messages, "the chat template leaves the last message out", "leave continue_final_message out")
    kept = rendered[:position]
    return kept if rendered.startswith(_MARK, position) else kept.rstrip()


def _content(parts: Sequence[Any], messages: Any, *, keeps_parts: bool) -> str | list[dict[str, Any]]:
    texts = []
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            _refuse(messages, f"a part of a content is {kind!r}, not text", "give what is not text as mm_features")
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if keeps_parts else "\n".join(texts)


def _refuse(messages: Any, problem: str, remedy: str) -> NoReturn:
    raise RequestRejected(f"{problem}; {remedy}", parameter="messages", value=messages, remedy=remedy)
