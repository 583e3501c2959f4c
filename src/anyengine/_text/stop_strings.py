"""Stop strings: where an output ends because of its text, and how much of its text may be given before.

Owns the search, the hold-back and the cut. Knows nothing of the wire, of log-probabilities or of requests. The rules
are those of vLLM 0.32.0 (``v1/engine/detokenizer.py``): the match that is complete first wins, at a tie the one that
stands first in the list; one that is complete within the first ``min_tokens`` tokens does not count; as long as the
output runs, one character less than the longest stop string is held back.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyengine._text.detokenizer import Detokenizer

__all__ = ["StopText"]


class StopText:
    """The text of one output with stop strings. Owned by whoever receives the tokens, since a match ends the request.

    Tokens are looked at one by one, so that the result does not depend on how they are framed: a match is found at the
    token that completes it. A run of byte tokens counts for what it would be if the output ended there, because at a
    match it does. Offsets are in characters from the start of the output.
    """

    __slots__ = (
        "_ends",
        "_floor",
        "_given",
        "_hold",
        "_include",
        "_inner",
        "_keep",
        "_min_tokens",
        "_num_open",
        "_num_tokens",
        "_start",
        "_stop",
        "_text",
        "matched",
    )

    def __init__(self, inner: Detokenizer, stop: Sequence[str], *, include: bool = False, min_tokens: int = 0) -> None:
        self._inner = inner
        self._stop = stop
        self._include = include
        self._min_tokens = min_tokens
        self._keep = max(map(len, stop), default=1) - 1  # what of the text a match that is still to come may begin with
        self._hold = 0 if include else self._keep
        self._text = ""  # from the offset _start on
        self._start = 0
        self._given = 0  # offset
        self._floor = 0  # offset of the end of what the first min_tokens tokens are
        self._num_tokens = 0
        self._ends: deque[int] = deque()  # offsets of the ends of tokens that have not been given entirely
        self._num_open = 0  # tokens, behind those of _ends, that have no certain text yet
        self.matched: str | None = None
        """The stop string (or pattern) that ended the output."""

    def push(self, token_ids: Sequence[int], *, last_is_silent: bool = False) -> int:
        """Take tokens; how many of them belong to the output: all, or those up to the one that completes a match.

        ``last_is_silent``: the last one ends the output and adds no text.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if last_is_silent and index == last:
                self._note_end("")
            elif self._add(self._inner.push((token_id,))):
                return index + 1
        return len(token_ids)

    def finish(self) -> None:
        """The output has ended: what the detokenizer holds is certain, and all of it may be taken. No match can be in
        that, save with U+FFFD for an unfinished character in it."""
        if self.matched is None:
            self._text += self._inner.finish()
            self._ends.clear()
            self._num_open = 0

    def take(self, *, finished: bool) -> str:
        """The text that is new and may be given now; all of it if the output has ``finished``."""
        end = self._start + len(self._text) - (0 if finished else self._hold)
        if end <= self._given:
            return ""
        text = self._text[self._given - self._start : end - self._start]
        self._given = end
        surplus = min(end, self._start + len(self._text) - self._keep) - self._start
        if surplus > 0:
            self._text = self._text[surplus:]
            self._start += surplus
        while self._ends and self._ends[0] <= end:
            self._ends.popleft()
        return text

    @property
    def num_held_tokens(self) -> int:
        """How many of the last tokens have text that has not been taken."""
        return len(self._ends) + self._num_open

    # ----------------------------------------------------------------- the parts

    def _add(self, piece: str) -> bool:
        """Take the text of one token; whether a match is complete with it."""
        before = self._start + len(self._text)
        self._text += piece
        ahead = self._inner.peek()
        if self._num_tokens <= self._min_tokens:
            # A run of bytes that is not complete is one U+FFFD or more, whatever stands in it: only what was certain.
            certain = "" if "\ufffd" in ahead else ahead
            self._floor = max(self._floor, before + len(piece) + len(certain))
        elif piece or ahead:
            found = self._find(self._text + ahead, max(before, self._floor) - self._start)
            if found is not None:
                self._cut(*found)
                return True
        self._note_end(piece)
        return False

    def _find(self, text: str, searched: int) -> tuple[str, int, int] | None:
        """The match that ends first, of those that end behind ``searched``: its name, begin and end."""
        best: tuple[str, int, int] | None = None
        best_end = len(text) + 1
        for stop in self._stop:
            begin = text.find(stop, max(searched - len(stop) + 1, 0), best_end)
            if begin != -1 and begin + len(stop) < best_end:
                best_end = begin + len(stop)
                best = stop, begin, best_end
        return best

    def _cut(self, stop: str, begin: int, end: int) -> None:
        self.matched = stop
        self._text += self._inner.finish()  # a run of bytes, if the match ends in one: it is certain now
        self._text = self._text[: end if self._include else begin]
        self._ends.clear()
        self._num_open = 0

    def _note_end(self, piece: str) -> None:
        if not piece and self._inner.holding:
            self._num_open += 1
            return
        end = self._start + len(self._text)
        self._ends.extend([end] * (self._num_open + 1))
        self._num_open = 0
