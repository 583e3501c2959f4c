"""One model's tokenizer: text to token ids and back, and its chat template.

Owns the ``tokenizers`` object of a model directory and the choice of detokenizer. Knows nothing of engines or requests.
Blocking and free of I/O once loaded.
"""

from __future__ import annotations

import json
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyengine._text.chat_messages import cut_after_mark, mark_last_message, with_texts
from anyengine._text.chat_template import render_chat_template
from anyengine._text.detokenizer import ByteLevelDetokenizer, BytePieces, TokenKinds, WindowDetokenizer
from anyengine._text.model_facts import ModelFacts
from anyengine._text.panics import calling_rust
from anyengine._text.tight_detokenizer import TightDetokenizer
from anyengine._text.token_texts import TokenTexts
from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from anyengine._text.detokenizer import Detokenizer

__all__ = ["Tokenizer"]


class Tokenizer:
    """The tokenizer of one model. Shared by all requests of a client; its methods keep no state between calls.

    ``vocab_size`` is in rows of the model's embedding (the highest token id it takes is one less); ``eos_token_ids``
    are the ids that end an output, the primary one first; ``max_model_len`` is in tokens, ``None`` when the model says
    none.
    """

    def __init__(self, backend: Any, facts: ModelFacts) -> None:
        backend.no_truncation()  # settings of its training that tokenizer.json may carry along
        backend.no_padding()
        self._backend = backend
        self._facts = facts
        self._decoder_types = _decoder_types(backend.decoder)
        self._vocabularies: dict[bool, BytePieces | TokenKinds] = {}  # by skip_special_tokens
        self.vocab_size: int = facts.vocab_size or backend.get_vocab_size(with_added_tokens=True)
        self.max_model_len: int | None = facts.max_model_len
        self.eos_token_ids: tuple[int, ...] = facts.eos_token_ids or self._eos_of_tokenizer()

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of the model in the directory ``path``. Blocks on the disk: tens of milliseconds and more.

        Raises:
            RequestRejected: a file is missing or broken, or the package ``tokenizers`` is not installed.
        """
        facts = ModelFacts.read(path)
        file = Path(path) / "tokenizer.json"
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise RequestRejected(
                "text prompts and text outputs need the package tokenizers",
                parameter="model",
                value=facts.directory,
                remedy='pip install "anyengine[text]", or send token ids and ask for no text',
            ) from error
        if not file.is_file():
            raise RequestRejected(
                f"there is no tokenizer.json in {facts.directory!r}",
                parameter="model",
                value=facts.directory,
                remedy="put the model's tokenizer.json there, or send token ids and ask for no text",
            )
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception, whatever is wrong with the file
            raise RequestRejected(
                f"tokenizer.json in {facts.directory!r} cannot be read: {error}",
                parameter="model",
                value=facts.directory,
                remedy="fetch the model again, or update the package tokenizers",
            ) from error
        return cls(backend, facts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of ``text``; with those that the model expects around a prompt, unless told otherwise.

        Raises:
            RequestRejected: ``text`` is not a string of Unicode characters, or the tokenizer fails on it.
        """
        try:
            encoded = calling_rust(self._backend.encode, text, add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
        except ValueError as error:
            raise RequestRejected(
                f"the tokenizer cannot take this prompt: {error}",
                parameter="prompt",
                value=text,
                remedy="give token ids, or repair the model's tokenizer.json",
            ) from error
        except TypeError as error:  # not a string, or one with a lone surrogate
            raise RequestRejected(
                f"the prompt is not Unicode text: {text!r:.80}",
                parameter="prompt",
                value=text,
                remedy="give a str without lone surrogates (U+D800 to U+DFFF), or a list of token ids",
            ) from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids`` at once. Ids that are no token add nothing."""
        known = [token_id for token_id in token_ids if 0 <= token_id < 1 << 32]
        text: str = calling_rust(self._backend.decode, known, skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def _added_texts(self) -> dict[int, str]:
        return {token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens, special ones included."""
        return TokenTexts(self._backend, partial(self.decode, skip_special_tokens=False))

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """A detokenizer for one output that follows ``prompt_token_ids``.

        Without ``spaces_between_special_tokens``, added tokens that follow each other (if they are shown) have no space
        between them, whatever the decoder puts there.
        """
        vocabulary = self._vocabularies.get(skip_special_tokens)
        if vocabulary is None:
            vocabulary = self._vocabularies[skip_special_tokens] = self._vocabulary(skip_special_tokens)
        if isinstance(vocabulary, BytePieces):
            return ByteLevelDetokenizer(vocabulary, prompt_token_ids)  # its decoder puts no spaces anywhere
        detokenizer = WindowDetokenizer(self._backend, vocabulary, prompt_token_ids)
        if skip_special_tokens or spaces_between_special_tokens:
            return detokenizer
        return TightDetokenizer(detokenizer, self._added_texts)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_vars: Any,
    ) -> str:
        """``messages`` as the text of one prompt, by the model's chat template or by ``chat_template``.

        With ``continue_final_message`` (and without ``add_generation_prompt``) it ends where the last message does, so
        that the model goes on with that.

        Raises:
            RequestRejected: there is no template, it refuses the messages, or the package ``jinja2`` is not installed.
        """
        template = chat_template or self._facts.chat_template
        if template is None:
            raise RequestRejected(
                f"the model in {self._facts.directory!r} has no chat template",
                parameter="messages",
                value=messages,
                remedy="give a raw prompt, or give a template as chat_template",
            )
        if continue_final_message and add_generation_prompt:
            raise RequestRejected(
                "continue_final_message and add_generation_prompt contradict each other",
                parameter="continue_final_message",
                value=True,
                remedy="give add_generation_prompt=False too, or leave it out",
            )
        if isinstance(messages, list | tuple):  # what else it is, the rendering refuses
            messages = with_texts(messages, template)
            messages = mark_last_message(messages) if continue_final_message else messages
        variables = {"tools": None, "documents": None, **self._facts.special_tokens, **template_vars}
        variables["add_generation_prompt"] = add_generation_prompt
        text = render_chat_template(template, messages, variables)
        return cut_after_mark(text, messages) if continue_final_message else text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **template_vars: Any,
    ) -> list[int]:
        """The token ids of :meth:`render_chat`. The template writes the special tokens; none are added.

        Raises:
            RequestRejected: as :meth:`render_chat` and :meth:`encode`.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **template_vars,
        )
        return self.encode(text, add_special_tokens=False)

    def _vocabulary(self, skip_special_tokens: bool) -> BytePieces | TokenKinds:
        if self._decoder_types == ("ByteLevel",):
            return BytePieces(self._backend, skip_special_tokens=skip_special_tokens)
        byte_fallback = "ByteFallback" in self._decoder_types
        return TokenKinds(self._backend, skip_special_tokens=skip_special_tokens, byte_fallback=byte_fallback)

    def _eos_of_tokenizer(self) -> tuple[int, ...]:
        eos_token = self._facts.special_tokens.get("eos_token")
        eos_token_id = self._backend.token_to_id(eos_token) if isinstance(eos_token, str) else None
        return () if eos_token_id is None else (eos_token_id,)


def _decoder_types(decoder: Any) -> tuple[str, ...]:
    """The types in a decoder, sequences taken apart: ``("ByteLevel",)`` is the decoder that a table can replace."""

    def flatten(state: Mapping[str, Any]) -> tuple[str, ...]:
        if state["type"] == "Sequence":
            return tuple(name for inner in state["decoders"] for name in flatten(inner))
        return (state["type"],)

    # The pickle state of a decoder is its JSON, the only view of what is inside a Sequence.
    return () if decoder is None else flatten(json.loads(decoder.__getstate__()))
