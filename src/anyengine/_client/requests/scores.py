"""Log-probabilities of one request, between the engine and the consumer.

Owns their way from the tensors of an output into columns, and which of them each item of a stream gets. Exists only for
requests that ask for them. Invariant: a row for each token, always: what is broken or missing is refused before the
tokens beside it are taken. Ranks and rows are vLLM 0.32.0's (``v1/engine/logprobs.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from anyengine._wire import EngineCoreOutput, LogprobsLists, LogprobsTensors, Tensor
from anyengine.outputs import FlatLogprobs, TokenDecoder
from anyengine.params import SamplingParams

from .state import BatchClock, RequestState

if TYPE_CHECKING:
    from anyengine._client.session.wakeup import Parker

__all__ = ["LogprobColumns", "ScoredRequestState", "Scores", "wants_scores"]


_SCORE_PARAMETERS: Final = ("logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids")


def wants_scores(params: SamplingParams) -> bool:
    """Whether ``params`` ask for any log-probability."""
    return any(getattr(params, name) is not None for name in _SCORE_PARAMETERS)


class LogprobColumns:
    """Rows of log-probabilities, flat: see :class:`FlatLogprobs`. Each column is one block of memory."""

    __slots__ = ("ends", "logprobs", "ranks", "token_ids")

    def __init__(self) -> None:
        self.ends: array[int] = array("q")
        self.token_ids: array[int] = array("q")
        self.logprobs: array[float] = array("d")
        self.ranks: array[int] = array("q")

    def __len__(self) -> int:
        return len(self.ends)

    def add_unscored(self) -> None:
        """Add a position without log-probabilities: the first one of a prompt."""
        self.ends.append(len(self.token_ids))
        self.ranks.append(0)

    def cut(self, num_rows: int) -> None:
        """Keep the first ``num_rows``."""
        del self.ends[num_rows:], self.ranks[num_rows:]
        width = self.ends[-1] if self.ends else 0
        del self.token_ids[width:], self.logprobs[width:]

    def extend(self, more: LogprobColumns) -> None:
        """Add the rows of ``more``."""
        shift = len(self.token_ids)
        self.ends.extend(array("q", [end + shift for end in more.ends]) if shift else more.ends)
        self.token_ids.extend(more.token_ids)
        self.logprobs.extend(more.logprobs)
        self.ranks.extend(more.ranks)

    def add_tensors(self, tensors: LogprobsLists | LogprobsTensors, num_rows: int, keep: int | None) -> None:
        """Add the rows of an output, ``keep`` columns of each (``None``: all). An engine sends as many columns as the
        most demanding request of its batch wants.

        Raises:
            ValueError: not ``num_rows`` rows, or tensors that contradict each other.
            TypeError: values that are no numbers.
        """
        ranks = tensors.sampled_token_ranks if isinstance(tensors, LogprobsLists) else tensors.selected_token_ranks
        ids, logprobs = tensors.logprob_token_ids, tensors.logprobs
        if len(ids.shape) != 2 or ids.shape != logprobs.shape or ranks.shape != ids.shape[:1]:
            raise ValueError(
                f"log-probabilities of shapes {ids.shape}, {logprobs.shape} and {ranks.shape} contradict each other"
            )
        rows, columns = ids.shape
        if rows != num_rows or columns == 0:
            raise ValueError(f"{num_rows} rows of log-probabilities were expected; they have the shape {ids.shape}")
        width = columns if keep is None else min(columns, keep)
        self.token_ids.extend(array("q", _cut(ids, width)))
        self.logprobs.extend(array("d", _cut(logprobs, width)))
        self.ranks.extend(array("q", ranks.values()))
        start = self.ends[-1] if self.ends else 0
        self.ends.extend(array("q", [start + width * (row + 1) for row in range(rows)]))

    def frozen(self, decode: TokenDecoder | None, preceding: Sequence[int] = ()) -> FlatLogprobs:
        """These rows as their reader gets them. They must not be changed any more."""
        return FlatLogprobs(self.ends, self.token_ids, self.logprobs, self.ranks, decode=decode, preceding=preceding)

    def copy(self) -> LogprobColumns:
        """The same rows, in memory of their own."""
        twin = LogprobColumns()
        twin.extend(self)
        return twin


def _cut(tensor: Tensor, width: int) -> Sequence[Any]:
    """The first ``width`` columns of a matrix, in one row."""
    values = tensor.values()
    rows, columns = tensor.shape
    if width == columns:
        return values
    return [value for row in range(rows) for value in values[row * columns : row * columns + width]]


class ScoredRequestState(RequestState):
    """The merge buffer of a request that asks for log-probabilities."""

    __slots__ = (
        "_keep",
        "_keep_prompt",
        "_num_prompt_rows",
        "_params",
        "prompt_rows",
        "prompt_scores",
        "rows",
        "started",
    )

    def __init__(
        self,
        wire_id: str,
        label: str,
        parker: Parker,
        params: SamplingParams,
        num_prompt_tokens: int,
        *,
        clock: BatchClock | None = None,
    ) -> None:
        super().__init__(wire_id, label, parker, clock=clock)
        self._params = params
        self._keep = _columns(len(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs)
        self._keep_prompt = _columns(params.prompt_logprobs)
        self._num_prompt_rows = num_prompt_tokens - 1
        self.started: bool = False
        """Whether the first token has come, and with it everything about the prompt."""
        self.rows = LogprobColumns()
        self.prompt_rows = LogprobColumns()
        self.prompt_scores: Tensor | None = None

    def push(self, output: EngineCoreOutput) -> bool:
        """Take one output from the engine; whether the request ends here, although the engine would go on.

        Raises:
            ValueError, TypeError: its log-probabilities are broken or missing; nothing of it was taken.
        """
        num_tokens = len(output.new_token_ids)
        asked = self._params.logprobs is not None or self._params.logprob_token_ids is not None
        rows = LogprobColumns()
        if asked and num_tokens:
            if output.new_logprobs is None:
                raise ValueError("the engine sent tokens without their log-probabilities")
            rows.add_tensors(output.new_logprobs, num_tokens, self._keep)
        self._take_prompt(output, num_tokens)
        stopped = super().push(output)
        if asked:
            rows.cut(len(output.new_token_ids))  # fewer, if a stop string ended it
        self.rows.extend(rows)
        return stopped

    def _take_prompt(self, output: EngineCoreOutput, num_tokens: int) -> None:
        """The prompt's rows come in one piece or in several, the last one with the first token."""
        scored = self._params.prompt_logprobs is not None
        if scored and (tensors := output.new_prompt_logprobs_tensors) is not None:
            rows = LogprobColumns()
            rows.add_tensors(tensors, tensors.logprobs.shape[0] if tensors.logprobs.shape else 0, self._keep_prompt)
            self.prompt_rows.extend(rows)
        if output.prompt_token_id_logprobs is not None:
            self.prompt_scores = output.prompt_token_id_logprobs
        if self.started or not num_tokens:
            return
        self.started = True
        if scored and len(self.prompt_rows) != self._num_prompt_rows:
            raise ValueError(
                f"the engine sent {len(self.prompt_rows)} rows of prompt log-probabilities, not {self._num_prompt_rows}"
            )
        if self._params.prompt_logprob_token_ids is not None and self.prompt_scores is None:
            raise ValueError("the engine ignored prompt_logprob_token_ids: in vLLM it takes the V2 model runner")


def _columns(count: int | None) -> int | None:
    return None if count is None or count == -1 else count + 1


class Scores:
    """The log-probabilities that a stream has taken from its state, and what of them its next item shows."""

    __slots__ = (
        "_all",
        "_cumulative",
        "_decode",
        "_new",
        "_params",
        "_preceding",
        "_prompt",
        "_prompt_scores",
        "_shown",
    )

    def __init__(self, params: SamplingParams, decode: TokenDecoder | None) -> None:
        self._params = params
        self._decode = decode
        asked = params.logprobs is not None or params.logprob_token_ids is not None
        self._all = LogprobColumns() if asked else None
        self._new = LogprobColumns()
        self._preceding: tuple[int, ...] = ()  # the last tokens before the new ones: they may hold half a character
        self._cumulative = 0.0
        self._prompt: FlatLogprobs | None = None
        self._prompt_scores: Tensor | None = None
        self._shown = False

    def take(self, state: ScoredRequestState) -> None:
        """Move what has arrived from ``state``, together with its tokens."""
        if self._all is not None:
            self._preceding = self._last_tokens()
            self._new, state.rows = state.rows, LogprobColumns()
            self._all.extend(self._new)
            starts = (end for end in (0, *self._new.ends[:-1])) if self._new else ()
            for start in starts:
                self._cumulative += self._new.logprobs[start]
        if self._prompt is None and self._params.prompt_logprobs is not None and state.started:
            columns = LogprobColumns()
            columns.add_unscored()
            columns.extend(state.prompt_rows)
            self._prompt = columns.frozen(self._decode)
        self._prompt_scores = state.prompt_scores

    def fields(self, *, everything: bool) -> dict[str, Any]:
        """The fields of an output: with ``everything`` so far, or with what is new."""
        fields: dict[str, Any] = {}
        if self._all is not None:
            rows = self._all.copy() if everything else self._new
            fields["logprobs"] = rows.frozen(self._decode, () if everything else self._preceding)
            fields["cumulative_logprob"] = self._cumulative
        if everything or not self._shown:
            fields["prompt_logprobs"] = self._prompt
            fields["prompt_token_id_logprobs"] = self._prompt_scores
            self._shown = self._shown or self._prompt is not None or self._prompt_scores is not None
        return fields

    def _last_tokens(self) -> tuple[int, ...]:
        assert self._all is not None
        ends = self._all.ends
        first = max(0, len(ends) - 4)
        return tuple(self._all.token_ids[ends[row - 1] if row else 0] for row in range(first, len(ends)))
