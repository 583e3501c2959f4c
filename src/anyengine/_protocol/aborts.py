"""Aborted requests, and whether their engine is known to have taken the abort.

Owns the answer to two questions: may this id be used again, and what does an output mean that comes after an abort? It
may have been under way (the usual case: nothing to do), or the engine ignored the abort (it is told once more). A fence
tells them apart: a call that was sent behind the abort, whose answer comes from behind everything that the engine had
sent when it took the abort. Pure: who asks when a fence is needed sends it, and says when it has been answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["AbortLedger"]


_REMEMBERED = 8192


@dataclass(slots=True)
class _Abort:
    rank: int
    fences: int
    """How many fences the rank had been sent before the abort."""
    repeated: bool = False


@dataclass(slots=True)
class AbortLedger:
    """What is remembered of aborts.

    Memory is bounded: of the ids that were aborted, at least the last ``_REMEMBERED`` are known. Invariant: an abort is
    repeated at most once.
    """

    doubtful: set[int] = field(default_factory=set)
    """Ranks that have sent an output after an abort, with no fence behind it yet."""
    ignored: dict[int, list[str]] = field(default_factory=dict)
    """Ids, by rank, whose outputs go on although a fence behind their abort was answered: to be aborted again."""
    _recent: dict[str, _Abort] = field(default_factory=dict)
    _earlier: dict[str, _Abort] = field(default_factory=dict)  # together they hold one to two times what we promise
    _sent: dict[int, int] = field(default_factory=dict)
    _passed: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._recent) + len(self._earlier)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._recent or request_id in self._earlier

    def note(self, request_id: str, rank: int) -> None:
        """The abort of ``request_id`` is sent to ``rank`` now."""
        self._recent[request_id] = _Abort(rank, self._sent.get(rank, 0))
        if len(self._recent) >= _REMEMBERED:
            self._earlier, self._recent = self._recent, {}

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
        if abort is None or abort.repeated:
            return
        if self._passed.get(abort.rank, 0) > abort.fences:
            abort.repeated = True
            self.ignored.setdefault(abort.rank, []).append(request_id)
        elif self._sent.get(abort.rank, 0) == abort.fences:
            self.doubtful.add(abort.rank)
