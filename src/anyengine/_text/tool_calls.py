"""Tool calls in JSON, read one character after the other: a name, and the text of the arguments as it comes.

Owns the reading of one object, and of an array of them. Checks no more than it needs to know where things end: the
arguments are the model's own text.
"""

from __future__ import annotations

import json
from typing import Final

__all__ = ["CallScanner", "JsonCallScanner"]

_SPACE: Final = " \t\r\n"
_ARGUMENTS: Final = ("arguments", "parameters")


class CallScanner:
    """One object with a ``name`` and ``arguments`` (or ``parameters``), in any order, among other keys.

    Invariant: the state depends on the characters taken, and not on how they came. What grows is kept in lists: a
    character costs the same however many have come before it.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.is_open = True
        self.is_broken = False
        self.was_named = False
        self._state = "start"
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = False
        self._early: list[str] = []  # arguments that came before the name
        self._out: list[tuple[str | None, str]] = []

    @property
    def raw(self) -> str:
        """Everything that was taken, as long as it is no call."""
        return "".join(self._raw)

    def takes_more(self) -> bool:
        """Whether its end has not been taken."""
        return self.is_open

    def push(self, text: str) -> str:
        """Take ``text`` up to the end of the object; what is behind it."""
        for position, char in enumerate(text):
            if not self.is_open:
                return text[position:]
            if not self.was_named:
                self._raw.append(char)
            self._take(char)
        return ""

    def take(self) -> list[tuple[str | None, str]]:
        """What has come since the last call: the name, and pieces of the arguments."""
        out, self._out = self._out, []
        if not out:
            return []
        name = next((name for name, _ in out if name is not None), None)
        return [(name, "".join(piece for _, piece in out))]

    # ---------------------------------------------------------------------- states

    def _take(self, char: str) -> None:
        match self._state:
            case "key" | "string" | "container" | "scalar":
                self._go_on(char)
            case _ if char in _SPACE:
                pass
            case "start" if char == "{":
                self._state = "first key"
            case "first key" | "next key" if char == '"':
                self._state, self._value, self._quoted = "key", [char], True
            case "colon" if char == ":":
                self._state = "value"
            case "value" if char not in ",:}]":
                self._begin_value(char)
            case "behind" if char == ",":
                self._state = "next key"
            case "behind" | "first key" if char == "}":
                self._end()
            case _:
                self.is_open, self.is_broken = False, True

    def _begin_value(self, char: str) -> None:
        self._value, self._depth, self._quoted = [], 0, False
        if char == '"':
            self._state, self._quoted = "string", True
            self._add(char)
        else:
            self._state = "container" if char in "{[" else "scalar"
            self._go_on(char)

    def _go_on(self, char: str) -> None:
        """One more character of a key or a value."""
        if self._state == "scalar" and (char in ",}]" or char in _SPACE):
            self._end_value()
            self._take(char)
            return
        self._add(char)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._quoted = False
                if self._state != "container":
                    self._end_value()
        elif self._state == "container":
            self._quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")
            if not self._depth:
                self._end_value()

    def _add(self, char: str) -> None:
        if self._state == "key" or self._key not in _ARGUMENTS:
            self._value.append(char)
        elif self.was_named:
            self._out.append((None, char))
        else:
            self._early.append(char)

    def _end_value(self) -> None:
        if self._state == "key":
            self._state, self._key = "colon", _text_of("".join(self._value)) or ""
            return
        self._state = "behind"
        if self._key == "name" and not self.was_named:
            name = _text_of("".join(self._value))
            if name is None:
                self.is_open, self.is_broken = False, True
            else:
                self.was_named = True
                self._raw.clear()
                self._out.append((name, "".join(self._early)))
        self._key = ""

    def _end(self) -> None:
        """Its closing brace. An object without a name is no call."""
        self.is_open, self.is_broken = False, not self.was_named


class JsonCallScanner:
    """One object, or an array of them."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self.is_broken = False
        self.num_calls = 0
        self._state = "start"
        self._in_array = False
        self._call = CallScanner()
        self._out: list[tuple[int, str | None, str]] = []

    @property
    def raw(self) -> str:
        """Everything that was taken, as long as there is no call."""
        return "".join(self._raw)

    def push(self, text: str) -> str:
        """Take ``text``, all of it unless it turns out to be no call: then what is behind."""
        for position, char in enumerate(text):
            if self.is_broken:
                return text[position:]
            if not self.num_calls:
                self._raw.append(char)
            self._take(char)
        return ""

    def take(self) -> list[tuple[int, str | None, str]]:
        """What has come since the last call: the number of a call, its name, and pieces of its arguments."""
        out, self._out = self._out, []
        names: dict[int, str | None] = {}
        pieces: dict[int, list[str]] = {}
        for index, name, piece in out:
            names[index] = names.get(index) if name is None else name
            pieces.setdefault(index, []).append(piece)
        return [(index, name, "".join(pieces[index])) for index, name in names.items()]

    def _take(self, char: str) -> None:
        match self._state:
            case "call":
                self._go_on(char)
            case _ if char in _SPACE:
                pass
            case "start" if char == "[":
                self._state, self._in_array = "next", True
            case "start" | "next" if char == "{":
                self._state, self._call = "call", CallScanner()
                self._go_on(char)
            case "behind" if self._in_array and char == ",":
                self._state = "next"
            case "behind" if self._in_array and char == "]":
                self._state = "over"
            case "over":
                pass  # a model that talks on behind its calls is not listened to
            case _:
                self.is_broken = True

    def _go_on(self, char: str) -> None:
        call = self._call
        was_named = call.was_named
        call.push(char)
        index = self.num_calls - was_named
        self._out += [(index, name, piece) for name, piece in call.take()]
        if call.was_named and not was_named:
            self.num_calls += 1
            self._raw.clear()
        if not call.is_open:
            if call.is_broken and not call.was_named and not self.num_calls:
                self.is_broken = True
            else:
                self._state = "behind" if self._in_array and not call.is_broken else "over"


def _text_of(value: str) -> str | None:
    """What a JSON string says; ``None`` if it is none."""
    try:
        text = json.loads(value)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
