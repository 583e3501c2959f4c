"""Which ranks take requests.

Owns the life of the ranks as the client sees it: serving, dying (its end is being learnt: no new work), dead. Pure.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

__all__ = ["RankRota"]


class RankRota:
    """The ranks of one connection. Invariant: a rank only ever moves from serving to dying to dead, and back only when
    it is revived."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._serving = sorted(ranks)
        self._dying: list[int] = []

    @property
    def serving(self) -> tuple[int, ...]:
        """The ranks that take work."""
        return tuple(self._serving)

    @property
    def alive(self) -> tuple[int, ...]:
        """The ranks that are not dead: those that serve, or, if none does, those that are dying (what is sent to one of
        these is failed with it)."""
        return tuple(self._serving or self._dying)

    def __contains__(self, rank: int) -> bool:
        return rank in self._serving or rank in self._dying

    def retire(self, rank: int) -> bool:
        """The rank is dying: it takes no more work. Whether it was serving until now."""
        if rank not in self._serving:
            return False
        self._serving.remove(rank)
        self._dying.append(rank)
        return True

    def bury(self, rank: int) -> None:
        """The rank is dead."""
        self.retire(rank)
        if rank in self._dying:
            self._dying.remove(rank)

    def revive(self, rank: int) -> None:
        """The rank, which was dead, has been started again and takes work."""
        if rank not in self:
            insort(self._serving, rank)
