"""Log-probabilities as their reader gets them, and the tensors that come beside them.

Owns the columnar form. The records share no mutable state with the client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Protocol, TypeAlias, overload, runtime_checkable

import msgspec

__all__ = ["FlatLogprobs", "Logprob", "LogprobsOnePosition", "TensorLike", "TokenDecoder"]

TokenDecoder: TypeAlias = Callable[[int, Sequence[int]], str]
"""The text of a token id, given up to four ids before it (which may hold the first bytes of its character)."""

_CONTEXT_TOKENS: Final = 4  # no character has more bytes


@runtime_checkable
class TensorLike(Protocol):
    """Numbers as the engine sent them: row-major little-endian bytes, and two ways to read them."""

    @property
    def dtype(self) -> str:
        """numpy's or torch's name of it: ``"<f4"``, ``"float32"``."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def data(self) -> bytes | bytearray | memoryview: ...

    def numpy(self) -> Any:
        """An array over the same memory; it needs numpy."""

    def tolist(self) -> Any:
        """Nested lists of Python numbers; it needs nothing."""


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """One token's log-probability at one position.

    Attributes:
        logprob: natural logarithm; as far as the engine says, of the raw distribution, before temperature and filters.
        rank: 1 is the likeliest token of the vocabulary.
        decoded_token: its text; ``None`` if the client has no tokenizer, or was told not to detokenize. Empty while a
            character is not complete.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]
"""Token id -> its log-probability; the token that stands at the position comes first."""


class FlatLogprobs(Sequence[LogprobsOnePosition | None]):
    """Log-probabilities of a run of tokens: a sequence of dicts to look at, a few columns in memory.

    A position is put together when it is read, texts included; an iteration over millions of them keeps none. The
    first token of a prompt has no log-probability: its position is ``None``. Compares equal to a list of such dicts.

    Attributes:
        ends: where the row of each position ends in the columns.
        token_ids, logprobs: the columns; the first entry of each row is the token that stands at the position.
        ranks: the rank of that token, one for each position. The others in a row have the ranks 1, 2, 3, ...
    """

    __slots__ = ("_decode", "_preceding", "_texts", "ends", "logprobs", "ranks", "token_ids")

    def __init__(
        self,
        ends: Sequence[int] = (),
        token_ids: Sequence[int] = (),
        logprobs: Sequence[float] = (),
        ranks: Sequence[int] = (),
        *,
        decode: TokenDecoder | None = None,
        preceding: Sequence[int] = (),
        texts: Sequence[str] | None = None,
    ) -> None:
        self.ends: Sequence[int] = ends
        self.token_ids: Sequence[int] = token_ids
        self.logprobs: Sequence[float] = logprobs
        self.ranks: Sequence[int] = ranks
        self._decode = decode
        self._preceding = preceding  # tokens before the first position that belong to the same text
        self._texts = texts

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[LogprobsOnePosition | None]: ...

    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | list[LogprobsOnePosition | None] | None:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        start, end = self._row(position)
        if start == end:
            return None
        texts = self._texts_at(position, start, end)
        ranks = (self.ranks[position], *range(1, end - start))
        # A token that is among the likeliest stands in its row twice; the later one decides, as in vLLM.
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], rank, text)
            for i, rank, text in zip(range(start, end), ranks, texts, strict=True)
        }

    def chosen(self) -> list[float | None]:
        """The log-probability of the token at each position."""
        bounds = map(self._row, range(len(self)))
        return [None if start == end else self.logprobs[start] for start, end in bounds]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({list(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A tokenizer does not travel; what it has to say does.
        columns = (list(self.ends), list(self.token_ids), list(self.logprobs), list(self.ranks))
        return _restore, (*columns, self._all_texts())

    def _row(self, position: int) -> tuple[int, int]:
        return self.ends[position - 1] if position else 0, self.ends[position]

    def _texts_at(self, position: int, start: int, end: int) -> Sequence[str | None]:
        if self._texts is not None:
            return self._texts[start:end]
        if self._decode is None:
            return [None] * (end - start)
        context = self._context(position)
        return [self._decode(token_id, context) for token_id in self.token_ids[start:end]]

    def _context(self, position: int) -> list[int]:
        """The tokens before ``position``, oldest first, four at most."""
        first = max(0, position - _CONTEXT_TOKENS)
        bounds = map(self._row, range(first, position))
        here = [self.token_ids[start] for start, end in bounds if start != end]
        if position >= _CONTEXT_TOKENS:
            return here
        return [*self._preceding[-(_CONTEXT_TOKENS - position) :], *here]

    def _all_texts(self) -> list[str] | None:
        if self._decode is None and self._texts is None:
            return None
        rows = [(position, *self._row(position)) for position in range(len(self))]
        return [text or "" for position, start, end in rows for text in self._texts_at(position, start, end)]


def _restore(
    ends: list[int], token_ids: list[int], logprobs: list[float], ranks: list[int], texts: list[str] | None
) -> FlatLogprobs:
    return FlatLogprobs(ends, token_ids, logprobs, ranks, texts=texts)
