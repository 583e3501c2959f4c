"""Chat templates: other people's Jinja programs, run in a sandbox.

Owns the environment that templates expect, which is the one of ``transformers``' ``apply_chat_template`` (5.x), save
for ``strftime_now``: this package reads no clock, so whoever wants a date in a prompt passes the function or the date
as a variable. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["render_chat_template"]


def render_chat_template(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """``messages`` as the text of one prompt.

    Raises:
        RequestRejected: ``messages`` is not a list of messages, the template refuses them or is broken, or ``jinja2``
            is not installed.
    """
    conversation = _checked(messages)
    compiled = _compile(template)
    try:
        text: str = compiled.render(messages=conversation, **variables)
    except Exception as error:  # the template is a foreign program: it can fail in any way
        raise RequestRejected(
            f"the model's chat template refuses these messages: {_reason(error)}",
            parameter="messages",
            value=messages,
            remedy="follow the order of roles and the kinds of content that this model's template asks for",
        ) from error
    return text


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Plain dictionaries without ``None``: OpenAI clients send ``content=None``, which templates print as "None"."""
    if isinstance(messages, str | Mapping) or not all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in messages
    ):
        what = 'every message must be a mapping with a "role"'
    elif not messages:
        what = "there is no message"
    else:
        return [{key: value for key, value in message.items() if value is not None} for message in messages]
    raise RequestRejected(
        what, parameter="messages", value=messages, remedy='give a list such as [{"role": "user", "content": "Hello"}]'
    )


@lru_cache(maxsize=32)
def _compile(template: str) -> Any:
    """The compiled template. Cached for the process: a server renders the same one for every request."""
    try:
        import jinja2
    except ImportError as error:
        raise RequestRejected(
            "chat templates need the package jinja2",
            parameter="messages",
            remedy='pip install "anyengine[text]", or give a raw prompt',
        ) from error
    try:
        return _environment().from_string(template)
    except jinja2.TemplateError as error:
        raise RequestRejected(
            f"the chat template is not valid Jinja: {_reason(error)}",
            parameter="chat_template",
            value=template,
            remedy="repair the template, give another one as chat_template, or give a raw prompt",
        ) from error


def _environment() -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlocks(Extension):  # type: ignore[misc] # mypy does not follow jinja2, so its classes are Any
        """``{% generation %}`` marks the assistant's part for training; here its body is rendered and no more."""

        tags = {"generation"}  # noqa: RUF012 - the name and the type are Jinja's

        def parse(self, parser: Any) -> Any:
            line_number = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line_number)

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter escapes for HTML and sorts the keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
