"""Aborted requests, and whether their engine is known to have taken the abort.

Owns the answer to two questions: may this id be used again, and what does an output mean that comes after an abort? It
may have been under way (the usual case: nothing to do), or the engine ignored the abort (it is told once more). A fence
tells them apart: a call that was sent behind the abort, whose answer comes from behind everything that the engine had
sent when it took the abort. Pure: who asks when a fence is needed sends it, and says when it has been answered.
"""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["AbortLedger"]


_REMEMBERED = 8192


_Abort: TypeAlias = tuple[int, int]
"""The rank, and how many fences it had been sent before. There are thousands: a collector passes pairs of ints by."""


class AbortLedger:
    """What is remembered of aborts.

    Memory is bounded: of the ids that were aborted, at least the last ``_REMEMBERED`` are known. Invariant: an abort is
    repeated at most once.
    """

    __slots__ = ("_earlier", "_passed", "_recent", "_repeated", "_sent", "doubtful", "ignored")

    def __init__(self) -> None:
        self.doubtful: set[int] = set()
        """Ranks that have sent an output after an abort, with no fence behind it yet."""
        self.ignored: dict[int, list[str]] = {}
        """Ids, by rank, whose outputs go on although a fence behind their abort was answered: to be aborted again."""
        self._recent: dict[str, _Abort] = {}
        self._earlier: dict[str, _Abort] = {}  # together they hold one to two times what we promise
        self._repeated: set[str] = set()
        self._sent: dict[int, int] = {}
        self._passed: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._recent) + len(self._earlier)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._recent or request_id in self._earlier

    def note(self, request_id: str, rank: int) -> None:
        """The abort of ``request_id`` is sent to ``rank`` now."""
        self._recent[request_id] = rank, self._sent.get(rank, 0)
        if len(self._recent) >= _REMEMBERED:
            self._earlier, self._recent = self._recent, {}
            self._repeated.intersection_update(self._earlier)

    def fence_sent(self, rank: int) -> int:
        """A fence is sent to ``rank``; its number."""
        number = self._sent[rank] = self._sent.get(rank, 0) + 1
        self.doubtful.discard(rank)
        return number

    def fence_passed(self, rank: int, number: int) -> None:
        """The fence of this number was answered, and everything that the rank sent before has been looked at."""
        self._passed[rank] = max(number, self._passed.get(rank, 0))

    def late_output(self, request_id: str) -> None:
        """An output of a request that is not alive: see :attr:`doubtful` and :attr:`ignored` for what follows."""
        abort = self._recent.get(request_id) or self._earlier.get(request_id)
        if abort is None or request_id in self._repeated:
            return
        rank, fences = abort
        if self._passed.get(rank, 0) > fences:
            self._repeated.add(request_id)
            self.ignored.setdefault(rank, []).append(request_id)
        elif self._sent.get(rank, 0) == fences:
            self.doubtful.add(rank)
