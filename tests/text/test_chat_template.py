"""Chat templates render as transformers renders them, in a sandbox, and fail as one request's bad input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from built_tokenizers import byte_level, write_model

from anyengine._text import ModelFacts, Tokenizer
from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from pathlib import Path

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

STRICT = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- ' [INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""

TOOLS = """{% set ns = namespace(found=false) %}
{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {% if message.tool_calls is defined %}
        {% set ns.found = true %}
calls {{ message.tool_calls | tojson }}
    {% endif %}
    {% generation %}
{{ message.role }}: {{ message.content if message.content is defined else "nothing" }}
    {% endgeneration %}
    {% if loop.index > 8 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}tools {{ tools | tojson(indent=2) }}{% endif %}
{{ "yes" if ns.found else "no" }} {{ dict(a=1) | tojson }} {{ documents }} {{ extra | default("-") }}
"""

USER = {"role": "user", "content": "  What is <the> capital of Françe?  "}
ASSISTANT = {"role": "assistant", "content": "Paris & 'more'"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "é", "arguments": {"b": 1, "a": "<x>"}}]}


def tokenizer_with(template: str | None) -> Tokenizer:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(byte_level(), ModelFacts(directory="built", chat_template=template, special_tokens=special))


@pytest.mark.parametrize(
    ("template", "messages", "variables"),
    [
        (CHATML, [USER], {}),
        (CHATML, [{"role": "system", "content": "Be brief."}, USER, ASSISTANT], {"add_generation_prompt": False}),
        (STRICT, [USER, ASSISTANT, USER], {}),
        (TOOLS, [USER, CALL, {"role": "tool", "content": "7"}, ASSISTANT], {"extra": "given"}),
        (TOOLS, [USER], {"tools": [{"type": "function", "function": {"name": "f", "description": "<é>"}}]}),
    ],
)
def test_renders_as_transformers_does(template: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    expected = reference.apply_chat_template(
        messages, chat_template=template, tokenize=False, **{"add_generation_prompt": True, **variables}
    )
    assert tokenizer_with(template).render_chat(messages, **variables) == expected


@pytest.mark.feature("R51")
@pytest.mark.parametrize("template", [CHATML, STRICT])
@pytest.mark.parametrize("content", ["The capital is", "It is  ", "a\nb"])
def test_a_last_message_is_continued_as_in_transformers(template: str, content: str) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>")
    messages = [USER, {"role": "assistant", "content": content}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
    assert tokenizer_with(template).render_chat(messages, **options) == expected
    with pytest.raises(RequestRejected, match="contradict"):
        tokenizer_with(template).render_chat(messages, continue_final_message=True)
    for nothing in ([], [{"role": "user", "content": None}]):
        with pytest.raises(RequestRejected):
            tokenizer_with(template).render_chat(nothing, **options)
    with pytest.raises(RequestRejected, match="leaves the last message out"):
        tokenizer_with("nothing").render_chat(messages, **options)


@pytest.mark.feature("R51")
def test_contents_in_parts_are_what_the_template_reads() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    as_text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    as_parts = "{% for m in messages %}{% for c in m['content'] %}<{{ c.type }}:{{ c.text }}>{% endfor %}{% endfor %}"
    assert tokenizer_with(as_text).render_chat(parts) == "a\nb"
    assert tokenizer_with(as_parts).render_chat(parts) == "<text:a><text:b>"
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert tokenizer_with(as_parts).render_chat(parts, **options) == "<text:a><text:b"
    with pytest.raises(RequestRejected, match="image"):
        tokenizer_with(as_parts).render_chat([{"role": "user", "content": [{"type": "image"}]}])


def test_encoding_a_chat_adds_no_special_tokens_of_its_own(tmp_path: Path) -> None:
    write_model(tmp_path, chat_template=CHATML)
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode_chat([USER])
    text = tokenizer.render_chat([USER])
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 2  # <|im_start|> as one token, and no <s> before it
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(RequestRejected, match="no chat template") as refused:
        tokenizer_with(None).render_chat([USER])
    assert refused.value.parameter == "messages"
    assert "raw prompt" in (refused.value.remedy or "")
    assert tokenizer_with(None).render_chat([USER], chat_template="{{ messages | length }}") == "1"


def test_what_the_template_refuses_is_told_with_its_own_words() -> None:
    with pytest.raises(RequestRejected, match="Roles must alternate") as refused:
        tokenizer_with(STRICT).render_chat([USER, USER])
    assert refused.value.parameter == "messages"


@pytest.mark.parametrize("messages", ["Hello", [], USER, [{"content": "no role"}], ["Hello"], [{"role": 1}]])
def test_what_is_no_list_of_messages_is_refused(messages: Any) -> None:
    with pytest.raises(RequestRejected) as refused:
        tokenizer_with(CHATML).render_chat(messages)
    assert (refused.value.parameter, refused.value.value) == ("messages", messages)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append('x') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set x = messages.__init__ %}{{ x('a') }}",
        "{{ range(10**9) | list }}",
        "{{ 1 + 'a' }}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_a_hostile_or_broken_template_is_one_requests_error(attack: str) -> None:
    with pytest.raises(RequestRejected, match="refuses these messages"):
        tokenizer_with(attack).render_chat([USER])


def test_a_template_that_is_no_jinja_is_refused() -> None:
    with pytest.raises(RequestRejected, match="not valid Jinja") as refused:
        tokenizer_with("{% for %}").render_chat([USER])
    assert refused.value.parameter == "chat_template"


def test_a_clock_is_given_by_whoever_has_one() -> None:
    template = "{{ strftime_now('%d') if strftime_now is defined else 'no date' }}"
    assert tokenizer_with(template).render_chat([USER]) == "no date"
    assert tokenizer_with(template).render_chat([USER], strftime_now=lambda _: "05") == "05"
