"""Which of several engines is it, when something says that one is gone, but not which one?

Owns the evidence (a connection lost, a dead sentinel: neither names its engine) and the reasoning from it. Whoever
answers a call that was made after the evidence is cleared of it; when as many suspects are left as are missing, it is
they, however busy the others are. Connections can be counted; sentinels cannot, since a broken engine may say so more
than once: they tell of one engine, and name it when one suspect is left. No clock: being slow is no evidence. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

__all__ = ["SENTINEL", "Evidence", "Suspicion"]

Evidence: TypeAlias = Literal["input", "output", "sentinel"]

SENTINEL = "it sent ENGINE_CORE_DEAD"
"""The symptom of an engine that has said so itself; it ends by itself, too."""

_SYMPTOMS: dict[Evidence, str] = {
    "input": "its input connection is gone",
    "output": "its output connection is gone",
    "sentinel": SENTINEL,
}


class Suspicion:
    """The evidence of one connection. Each engine has one connection to the input socket and one to the output socket.

    Invariant: a suspect is a rank that serves and has not answered since the latest piece of that kind of evidence.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._serving = set(ranks)
        self._connections: dict[Evidence, set[int]] = {"input": set(), "output": set()}
        self._is_sentinel_open = False  # one has been read, and nobody has owned up to it
        self._returning: set[int] = set()  # ranks that are started again, and may be connected
        self._may_still_say_so: set[int] = set()  # ranks that serve no more, and whose sentinel may be on its way
        self._suspects: dict[Evidence, dict[int, int]] = {"input": {}, "output": {}, "sentinel": {}}
        self.count: int = 0
        """How many pieces of evidence there have been; a call is made at a count, and its answer clears up to it."""

    def connected(self, link: Evidence, connection: int) -> None:
        """A connection has come."""
        self._connections[link].add(connection)
        if self._missing(link) <= 0:
            self._suspects[link].clear()

    def disconnected(self, link: Evidence, connection: int) -> None:
        """A connection has gone."""
        self._connections[link].discard(connection)
        self._suspect_all(link)

    def sentinel(self) -> None:
        """An engine has said that it is dead. If one that serves no more can have said it, it is no evidence."""
        if not self._may_still_say_so:
            self._is_sentinel_open = True
            self._suspect_all("sentinel")

    def cleared(self, rank: int, count: int) -> None:
        """``rank`` has answered a call that was made when ``count`` pieces of evidence were there."""
        for suspects in self._suspects.values():
            if suspects.get(rank, count + 1) <= count:
                del suspects[rank]

    def retired(self, rank: int) -> None:
        """``rank`` serves no more, for whatever reason: a sentinel that nobody owns up to was its, or may yet come."""
        self._serving.discard(rank)
        self._is_sentinel_open = False
        self._may_still_say_so.add(rank)
        for kind, suspects in self._suspects.items():
            suspects.pop(rank, None)
            if self._missing(kind) <= 0:
                suspects.clear()

    def ended(self, rank: int) -> None:
        """``rank``'s process has ended, and everything that it sent has been read."""
        self._may_still_say_so.discard(rank)

    def returning(self, rank: int) -> None:
        """``rank``, whose process has ended, is started again: what it connects is nobody's surplus."""
        self._may_still_say_so.discard(rank)
        self._returning.add(rank)

    def gave_up(self, rank: int) -> None:
        """That start has failed, and its process has ended."""
        self._returning.discard(rank)

    def returned(self, rank: int) -> None:
        """``rank`` serves again. It may have hidden that another's connection is gone: then all are suspects."""
        self._returning.discard(rank)
        self._serving.add(rank)
        for kind in self._connections:
            self._suspect_all(kind)

    @property
    def suspects(self) -> tuple[int, ...]:
        """Everyone who should be asked for a sign of life."""
        return tuple(sorted({rank for suspects in self._suspects.values() for rank in suspects}))

    def guilty(self) -> tuple[int, str] | None:
        """A rank that it must be, and its symptom; ``None`` while that is open."""
        for kind, suspects in self._suspects.items():
            if suspects and len(suspects) <= self._missing(kind):
                return min(suspects), _SYMPTOMS[kind]
        return None

    def surplus_outputs(self) -> int:
        """How many output connections there are beyond those of the ranks that serve, or will."""
        return self._surplus("output")

    def surplus(self) -> int:
        """The same of both sockets: the greater number."""
        return max(map(self._surplus, self._connections))

    def _surplus(self, kind: Evidence) -> int:
        return len(self._connections[kind]) - len(self._serving) - len(self._returning)

    def _missing(self, kind: Evidence) -> int:
        return int(self._is_sentinel_open) if kind == "sentinel" else len(self._serving) - len(self._connections[kind])

    def _suspect_all(self, kind: Evidence) -> None:
        self.count += 1
        if self._missing(kind) > 0:
            self._suspects[kind] = dict.fromkeys(self._serving, self.count)
