"""The rules of regular expressions that end an output: which ones can be looked for in a text that still grows.

Owns the reading of a pattern. Patterns are those of Python's ``re``. A match counts as soon as it is there, so a
pattern may look behind itself, and not ahead: what follows has not come yet. Must not know how a pattern is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

# Private, and the only way to ask what a pattern is made of: its text says it with escapes, classes and comments in it.
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any, Final, NamedTuple

from anyengine._rules import Rule, reject, strings

__all__ = ["PatternFacts", "read_pattern", "stop_patterns"]

_NAME: Final = "stop_regex"
_MOST, _MOST_CHARS = 16, 1000  # each takes some time at every token, and a millisecond and more to be compiled
_LOOKS: Final = (_constants.ASSERT, _constants.ASSERT_NOT)
_REPEATS: Final = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_COMMITS: Final = (_constants.ATOMIC_GROUP, _constants.POSSESSIVE_REPEAT)
_ENDS: Final = (_constants.AT_END, _constants.AT_END_STRING)
_BOUNDARIES: Final = (_constants.AT_BOUNDARY, _constants.AT_NON_BOUNDARY)


class PatternFacts(NamedTuple):
    """What a search in a growing text has to know of a pattern."""

    num_chars_before: int
    """How many characters before a match decide whether it is one, at most."""
    commits: bool
    """Whether it has atomic groups or possessive repeats: then there may be no match in a text whose beginning has
    one."""
    verbose: bool
    """Whether spaces and comments in it mean nothing."""


def stop_patterns() -> Rule:
    """A tuple of patterns; one str counts as a sequence of one, ``None`` as an empty one."""
    rule = strings(most=_MOST)

    def checked(name: str, value: Any) -> tuple[str, ...]:
        patterns: tuple[str, ...] = rule(name, value)
        for pattern in patterns:
            if len(pattern) > _MOST_CHARS:
                reject(_NAME, pattern, f"has {len(pattern)} characters", f"use at most {_MOST_CHARS}")
            read_pattern(pattern)
        return patterns

    return checked


@lru_cache(maxsize=256)
def read_pattern(pattern: str) -> PatternFacts:
    """What ``pattern`` is like.

    Raises:
        RequestRejected: it is no pattern of ``re``, may match the empty text, or looks at what follows the match.
    """
    try:
        flags = re.compile(pattern).flags
        tree = _parser.parse(pattern)
    except re.error as exc:
        where = "" if exc.pos is None else f" at position {exc.pos}"
        reject(_NAME, pattern, f"is no regular expression: {exc.msg}{where}", "use a pattern that re.compile() takes")
    except (ValueError, OverflowError, RecursionError) as exc:  # flags, numbers and depths that it cannot take
        reject(_NAME, pattern, f"is no regular expression: {exc}", "use a pattern that re.compile() takes")
    if tree.getwidth()[0] == 0:
        reject(_NAME, pattern, "may match the empty text, which is everywhere", "use one that needs a character")
    walk = _Walk(pattern)
    walk.look_at(tree, at_start=True)
    return PatternFacts(walk.num_chars_before, walk.commits, bool(flags & re.VERBOSE))


class _Walk:
    """Looks at all parts of one pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.num_chars_before = 1  # for \b and (?m)^
        self.commits = False

    def look_at(self, tree: Any, *, at_start: bool) -> None:
        """``at_start``: nothing of the match stands before ``tree``."""
        for kind, value in tree:
            if kind is _constants.AT:
                self._check_place(value, at_start=at_start)
                continue
            if kind in _LOOKS:
                self._check_look(*value)
            self.commits = self.commits or kind in _COMMITS
            first = at_start and not (kind in _REPEATS and value[1] > 1)
            for part in _parts(value):
                self.look_at(part, at_start=first)
            at_start = at_start and kind in _LOOKS

    def _check_place(self, place: Any, *, at_start: bool) -> None:
        if place in _ENDS:
            remedy = r"say what ends the match, such as \n"
            reject(_NAME, self._pattern, "asks for an end ($ or \\Z) of a text that still grows", remedy)
        if place in _BOUNDARIES and not at_start:
            remedy = r"use \b and \B at the beginning only; elsewhere say what follows, such as \W"
            reject(_NAME, self._pattern, "asks what follows (\\b or \\B), which has not come yet", remedy)

    def _check_look(self, direction: int, tree: Any) -> None:
        if direction > 0:
            remedy = r"say what follows as a part of the match, such as END\W for END(?!\w)"
            reject(_NAME, self._pattern, "looks ahead at what has not come yet", remedy)
        self.num_chars_before += tree.getwidth()[1]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
