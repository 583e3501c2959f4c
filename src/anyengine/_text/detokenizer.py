"""Incremental detokenizing: token ids in, the text that is now certain out.

Owns the two ways to do it. Knows nothing of requests, stop strings or the wire.

The text of an output is *what it adds to its prompt*: decode prompt and output together, take away what both that and
the prompt alone begin with. So a leading space that a model puts after its prompt is kept, a character whose bytes are
split between prompt and output belongs to the output, and no text of the prompt ever appears. Whatever the chunks, the
pieces of :meth:`Detokenizer.push` and :meth:`Detokenizer.finish` together are exactly that text.

``tokenizers.decoders.DecodeStream`` is not used: it fails for good when a later byte changes how an earlier one
decodes, and it emits text of the prompt when that ends inside a character.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from anyengine._text.panics import calling_rust

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ByteLevelDetokenizer", "BytePieces", "Detokenizer", "TokenKinds", "WindowDetokenizer"]

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The detokenizer of one output. Owned by one task; ``push`` any number of times, then ``finish`` once."""

    @property
    def holding(self) -> bool:
        """Whether some of the tokens pushed last have text that is not certain yet."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` made certain: never half a character. Ids that are no token add nothing."""

    def peek(self) -> str:
        """What more would be certain if the output ended here, save for an unfinished character. Changes nothing."""

    def finish(self) -> str:
        """The text that was held back, U+FFFD for bytes that make no character."""


class _Vocabulary(dict[int, Any]):
    """Something for each token id, worked out on first use: nobody waits for a table of the whole vocabulary.

    Shared by all requests of a tokenizer: the value of an id never changes, so filling it twice does no harm.
    """

    __slots__ = ("_skipped", "_tokenizer")

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._skipped = frozenset(token.content for token in added if token.special)

    def _visible(self, token_id: int) -> str | None:
        """The token, or ``None`` when it adds no text: skipped, or not in the vocabulary."""
        try:
            token: str | None = self._tokenizer.id_to_token(token_id)
        except OverflowError:  # negative, or beyond 32 bits
            return None
        return None if token in self._skipped else token


class BytePieces(_Vocabulary):
    """The bytes of each token, for tokenizers whose decoder is ``ByteLevel`` and nothing else."""

    __slots__ = ("texts",)

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self.texts: dict[int, str] = {}
        """The tokens seen so far that are whole characters: one look-up for nearly every token of real text."""

    def __missing__(self, token_id: int) -> bytes:
        token = self._visible(token_id)
        if token is None:
            return b""  # not kept: ids outside the vocabulary are without bound
        try:
            piece = bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:  # an added token with characters outside the byte alphabet stands for itself
            piece = token.encode()
        self[token_id] = piece
        with suppress(UnicodeDecodeError):
            self.texts[token_id] = piece.decode()
        return piece


class ByteLevelDetokenizer:
    """For byte-level tokenizers: joins bytes, decodes UTF-8, keeps an unfinished character for the next call."""

    __slots__ = ("_pending", "_pieces", "_prompt_tail", "_texts")

    def __init__(self, pieces: BytePieces, prompt_token_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._texts = pieces.texts
        self._pending = _unfinished_character(pieces, prompt_token_ids)
        self._prompt_tail = self._pending.decode(errors="replace")

    @property
    def holding(self) -> bool:
        return bool(self._pending)

    def push(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 and not self._pending:
            text = self._texts.get(token_ids[0])
            if text is not None:
                return text
        return self._decode(b"".join([self._pieces[token_id] for token_id in token_ids]), final=False)

    def peek(self) -> str:
        return ""  # a whole character is never held back

    def finish(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", final)
        self._pending = data[used:]
        if self._prompt_tail and text:
            # The prompt's broken character, when the output does not complete it, is U+FFFD in the prompt's own text.
            text = text[_common_length(self._prompt_tail, text) :]
            self._prompt_tail = ""
        return text


def _unfinished_character(pieces: BytePieces, prompt_token_ids: Sequence[int]) -> bytes:
    """The bytes at the end of the prompt that may yet become a character: at most three."""
    tail = b""
    for token_id in reversed(prompt_token_ids):
        tail = pieces[token_id] + tail
        if len(tail) >= 3:
            break
    tail = tail[-3:]
    # UTF-8 decoding restarts at every leading byte, whatever stands before it.
    start = max((index for index, byte in enumerate(tail) if byte >= 0xC0), default=len(tail))
    _, used = utf_8_decode(tail[start:], "replace", False)
    return tail[start + used :]


class TokenKinds(_Vocabulary):
    """What each token is to :class:`WindowDetokenizer`: ``HIDDEN``, ``TEXT`` or ``BYTE``."""

    __slots__ = ("_byte_fallback",)
    HIDDEN, TEXT, BYTE = 0, 1, 2

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool, byte_fallback: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens=skip_special_tokens)
        self._byte_fallback = byte_fallback

    def __missing__(self, token_id: int) -> int:
        token = self._visible(token_id)
        if token is None:
            return self.HIDDEN  # not kept: ids outside the vocabulary are without bound
        kind = self.BYTE if self._byte_fallback and _BYTE_TOKEN.fullmatch(token) else self.TEXT
        self[token_id] = kind
        return kind


class WindowDetokenizer:
    """For every other tokenizer: decodes a short window of the latest tokens and gives what is new at its end.

    A run of byte tokens (``<0xE2>``) is one unit: the decoder turns all of it into characters, or every byte into
    U+FFFD, so nothing of it is certain before it ends. Invariant: ``_held`` is such a run, not yet at its end;
    ``_window`` is what stands before it, and ``_given`` is the part of its text that was given or is the prompt's.
    """

    __slots__ = ("_cut", "_given", "_held", "_kinds", "_tokenizer", "_window")

    _KEEP = 4
    """Tokens kept as context: more than the pieces of one character, so that all of an unfinished one is among them."""
    _LIMIT = 8
    """Tokens after which the window is cut; each push decodes the whole of it."""

    def __init__(self, tokenizer: Any, kinds: TokenKinds, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._kinds = kinds
        self._held: list[int] = []
        self._cut = False  # whether the text ends inside a character
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            kind = kinds[token_id]
            if kind:
                tail.append(token_id)
            if len(tail) >= self._KEEP and kind == TokenKinds.TEXT:
                break
        self._window = tail[::-1]
        self._given = self._text()

    @property
    def holding(self) -> bool:
        return self._cut or bool(self._held)

    def push(self, token_ids: Sequence[int]) -> str:
        kinds = self._kinds
        held = self._held
        held.extend([token_id for token_id in token_ids if kinds[token_id]])
        certain = len(held)
        while certain and kinds[held[certain - 1]] == TokenKinds.BYTE:
            certain -= 1
        if not certain:
            return ""
        self._window.extend(held[:certain])
        del held[:certain]
        text = self._text()
        # A character cut short is one U+FFFD at the very end, in whichever decoder works on bytes.
        self._cut = text.endswith(_REPLACEMENT)
        return self._advance(text.removesuffix(_REPLACEMENT))

    def peek(self) -> str:
        if not self._held:
            return ""
        text: str = calling_rust(self._tokenizer.decode, self._window + self._held, skip_special_tokens=False)
        return self._new_part(text).rstrip(_REPLACEMENT)

    def finish(self) -> str:
        self._window.extend(self._held)
        self._held.clear()
        self._cut = False
        return self._advance(self._text())

    def _text(self) -> str:
        text: str = calling_rust(self._tokenizer.decode, self._window, skip_special_tokens=False)
        return text

    def _new_part(self, text: str) -> str:
        given = self._given
        return text[len(given) :] if text.startswith(given) else text[_common_length(given, text) :]

    def _advance(self, text: str) -> str:
        new = self._new_part(text)
        if new:  # else the text may be the shorter one, while a broken character at the end of the prompt is still open
            self._given = text
        if len(self._window) > self._LIMIT:
            del self._window[: -self._KEEP]
            self._given = self._text().removesuffix(_REPLACEMENT)
        return new


def _common_length(first: str, second: str) -> int:
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
