"""The dialect of each rank, as it becomes known: from the registration, from a probe, from the first outputs.

Owns the one piece of state that the wire needs: engines of different releases may answer on one socket. Belongs to one
connection; no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from anyengine.exceptions import DecodeError

from .constants import Frame
from .dialect import Dialect
from .outputs import EngineCoreOutputs
from .positions import peek_rank, positions

__all__ = ["RankDialects"]


class RankDialects(Mapping[int, Dialect]):
    """Rank -> dialect. ``warnings`` collects what a person should read, once for each rank; whoever logs it empties it.

    Invariant: a rank's dialect only ever gets narrower, as long as its engine is the same. Until a rank has sent its
    first outputs, each message of its has its arrays counted; afterwards a message costs nothing extra, or, between
    ranks of different dialects, a look at its first bytes.
    """

    def __init__(self, dialects: Mapping[int, Dialect]) -> None:
        if not dialects:
            raise ValueError("at least one rank is needed")
        self._dialects = dict(dialects)
        self._unseen = set(dialects)  # ranks whose outputs have not been looked at
        self.warnings: list[str] = []
        self._settle()

    def __getitem__(self, rank: int) -> Dialect:
        return self._dialects[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._dialects)

    def __len__(self) -> int:
        return len(self._dialects)

    def decode_outputs(self, frames: Sequence[Frame]) -> EngineCoreOutputs:
        """See :meth:`Dialect.decode_outputs`.

        Raises:
            DecodeError: the frames are not an engine message.
        """
        if self._common is not None:
            return self._common.decode_outputs(frames)
        rank, dialect = self._sender(frames)
        if rank in self._unseen and positions(frames[0]).output is not None:
            dialect = self._look(rank, dialect, frames)
        return dialect.decode_outputs(frames)

    def salvage_outputs(self, frames: Sequence[Frame], error: DecodeError) -> EngineCoreOutputs | None:
        """See :meth:`Dialect.salvage_outputs`."""
        return self._sender(frames)[1].salvage_outputs(frames, error)

    def probed(self, rank: int, found: bool) -> Dialect:
        """Take the outcome of calling the method that the rank's :attr:`Dialect.probe` names; the dialect that follows.

        Raises:
            LocalProtocolError: the rank needs no probe (any more).
        """
        self._dialects[rank] = narrowed = self._dialects[rank].probed(found)
        self._settle()
        return narrowed

    def replace(self, rank: int, dialect: Dialect) -> None:
        """The engine of ``rank`` is another one now, which speaks ``dialect``."""
        self._dialects[rank] = dialect
        self._unseen.add(rank)
        self._settle()

    def _sender(self, frames: Sequence[Frame]) -> tuple[int, Dialect]:
        """Rank and dialect of whoever sent ``frames``; rank -1 and the newest dialect if they do not say."""
        rank = peek_rank(frames[0]) if frames else None
        if rank is None or rank not in self._dialects:
            return -1, self._fallback
        return rank, self._dialects[rank]

    def _look(self, rank: int, dialect: Dialect, frames: Sequence[Frame]) -> Dialect:
        self._unseen.discard(rank)
        self._dialects[rank] = narrowed = dialect.narrowed(frames)
        if (surplus := narrowed.surplus(frames)) is not None:
            self.warnings.append(f"engine {rank} ({narrowed.releases}): {surplus}")
            self._dialects[rank] = narrowed = narrowed.keeping_later(frames)
        self._settle()
        return narrowed

    def _settle(self) -> None:
        distinct = set(self._dialects.values())
        self._fallback = max(distinct, key=lambda dialect: dialect.since)
        self._common = self._fallback if len(distinct) == 1 and not self._unseen else None
