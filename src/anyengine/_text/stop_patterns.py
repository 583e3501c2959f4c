"""Regular expressions as stop strings: where an output ends because of a pattern, and what of it may become a match.

Owns the search for patterns and their hold-back; everything else is :class:`~anyengine._text.stop_strings.StopText`'s.

The text is read character by character, and a match counts as soon as it is there: the output ends with the first
character at which some part of the text, up to it, is matched as a whole. Of several parts the longest is the match, so
that it begins as early as it can; a greedy repeat gains nothing by what might follow. Nothing of that depends on how
the text comes in tokens or frames. ``re.escape(s)`` as a pattern is ``s`` as a stop string.

``regex`` does the search, because it says from where on a text may still become a match (``partial=True``).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from anyengine._pattern_rules import read_pattern
from anyengine._text.stop_strings import StopText
from anyengine.exceptions import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anyengine._text.detokenizer import Detokenizer

__all__ = ["PatternText", "StopPattern", "compile_pattern"]

_MOST_AT_ONCE_S: Final = 0.05
_MOST_PER_TOKEN_S: Final = 0.002
"""What the searches of one output may take, together: so much for each token, and what was not used before, up to the
other. Nearly all take microseconds, and the event loop waits meanwhile."""
_NEVER: Final = "\ud800"
"""A lone surrogate, which is in no text that was decoded."""
_TOKEN: Final = re.compile(
    r"\\N\{[^}]*\}|\\.|\(\?#[^)]*\)|\(\?>?|\[\^?\]?(?:\\.|[^\]\\])*\]|(?:[*+?]|\{(?:\d+,?\d*|,\d*)\})[?+]?|\{",
    re.DOTALL,
)
_BRACKET: Final = re.compile(r"\\.|\[", re.DOTALL)


class StopPattern(NamedTuple):
    """One pattern, compiled for three questions."""

    pattern: str
    anywhere: Any
    """Is there a match? ``None`` where that cannot be asked of several characters at once."""
    ending: Any
    """Is there a match that ends where the text does?"""
    beginning: Any
    """From where on may the text be the beginning of a match? Has partial matches only."""
    num_chars_before: int
    """How many characters before a match decide whether it is one, at most."""


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> StopPattern:
    """``pattern``, ready for use. Cached for the process: a server uses the same ones for every request.

    Raises:
        RequestRejected: it cannot be used, or the package ``regex`` is not installed.
    """
    try:
        import regex
    except ImportError as error:
        raise RequestRejected(
            "stop_regex needs the package regex",
            parameter="stop_regex",
            value=pattern,
            remedy='pip install "anyengine[text]", or use stop',
        ) from error
    facts = read_pattern(pattern)
    end = "\n)" if facts.verbose else ")"  # behind a comment
    spelled, greedy = _TOKEN.sub(_spelled, pattern), _TOKEN.sub(_greedy, pattern)
    forms = (f"(?:{spelled}{end}", rf"(?:{spelled}{end}\Z", f"(?:{greedy}{end}{_NEVER}")
    try:
        anywhere, ending, beginning = (regex.compile(form, regex.VERSION0) for form in forms)
    except (regex.error, ValueError, OverflowError, RecursionError) as error:
        raise RequestRejected(
            f"stop_regex={pattern!r:.200} cannot be compiled by the package regex: {error}",
            parameter="stop_regex",
            value=pattern,
            remedy="use a simpler pattern",
        ) from error
    return StopPattern(pattern, None if facts.commits else anywhere, ending, beginning, facts.num_chars_before)


def _spelled(match: re.Match[str]) -> str:
    """A part of a pattern of ``re``, such that ``regex`` means the same: it has more in braces and in brackets."""
    part = match[0]
    if part[0] == "[":
        return "[" + _BRACKET.sub(lambda inner: "\\[" if inner[0] == "[" else inner[0], part[1:])
    if part.startswith("{,}"):
        return "{0,}" + part[3:]
    return r"\{" if part == "{" else part


def _greedy(match: re.Match[str]) -> str:
    """The same, without what is lazy, possessive or atomic: for the question whether anything may follow, it is all
    one, except that ``regex`` overlooks what a lazy repeat may still take, and that what is atomic takes too much."""
    part = _spelled(match)
    if part == "(?>":
        return "(?:"
    return part[:-1] if part[0] in "*+?{" and len(part) > 1 and part[-1] in "?+" else part


class PatternText(StopText):
    """The text of one output with patterns, and perhaps stop strings. At a tie, a stop string wins. ``clock``: seconds
    of work, which never go backwards.

    Raises:
        ValueError: from all methods that take tokens: the searches take too long.
    """

    __slots__ = ("_begins", "_clock", "_keep_for_strings", "_left_s", "_patterns")

    def __init__(
        self,
        inner: Detokenizer,
        stop: Sequence[str],
        patterns: Sequence[str],
        *,
        clock: Callable[[], float],
        include: bool = False,
        min_tokens: int = 0,
    ) -> None:
        super().__init__(inner, stop, include=include, min_tokens=min_tokens)
        self._patterns = [compile_pattern(pattern) for pattern in patterns]
        self._begins = [0] * len(patterns)  # offset, for each: no match that is still to come begins before it
        self._keep_for_strings = self._keep
        self._clock = clock
        self._left_s = _MOST_AT_ONCE_S

    def _add(self, piece: str) -> bool:
        self._left_s = min(self._left_s + _MOST_PER_TOKEN_S, _MOST_AT_ONCE_S)
        if super()._add(piece):
            return True
        if piece:
            self._hold_back()
        return False

    def _find(self, text: str, searched: int) -> tuple[str, int, int] | None:
        found = super()._find(text, searched)
        last = len(text) if found is None else found[2] - 1  # where a match may end that comes before it
        for pattern, offset in zip(self._patterns, self._begins, strict=True):
            begin = offset - self._start
            if pattern.anywhere is not None and self._search(pattern, pattern.anywhere, text, begin, last) is None:
                continue
            for end in range(searched + 1, last + 1):
                where = self._search(pattern, pattern.ending, text, begin, end)
                if where is not None:
                    found, last = (pattern.pattern, where, end), end - 1
                    break
        return found

    def _search(
        self, pattern: StopPattern, compiled: Any, text: str, begin: int, end: int, *, partial: bool = False
    ) -> int | None:
        """Where the first match in ``text[begin:end]`` begins, as one of the forms of ``pattern`` has it."""
        begun_s = self._clock()
        try:
            match = compiled.search(text, begin, end, partial=partial, timeout=max(self._left_s, _MOST_PER_TOKEN_S))
        except TimeoutError:
            match, self._left_s = None, -1.0  # whatever the clock says of it
        self._left_s -= self._clock() - begun_s
        if self._left_s < 0:
            raise ValueError(
                f"the search for stop_regex={pattern.pattern!r:.200} takes more than "
                f"{_MOST_PER_TOKEN_S * 1000:.0f} ms for each token (at present in {end - begin} characters of the "
                "output): use fewer patterns, which do not try the same text in many ways (repeats in repeats) and "
                "hold back little"
            )
        return None if match is None else int(match.start())

    def _hold_back(self) -> None:
        """Find out from where on the text may become a match, and what must be kept to see it."""
        length = len(self._text)
        held = before = 0
        for index, pattern in enumerate(self._patterns):
            begin = self._begins[index] - self._start
            where = self._search(pattern, pattern.beginning, self._text, begin, length, partial=True)
            if where is None:
                where = length
            self._begins[index] = self._start + where
            held = max(held, length - where)
            before = max(before, length - where + pattern.num_chars_before)
        self._keep = max(self._keep_for_strings, before)
        self._hold = 0 if self._include else max(self._keep_for_strings, held)
