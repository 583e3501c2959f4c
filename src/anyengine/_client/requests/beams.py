"""The beams of a beam search: which continuations are kept, and which answers come out.

Owns the choice and the score, which are those of vLLM 0.32.0 (``entrypoints/generate/beam_search``): every step adds a
token to each beam, of the likeliest of its distribution; the end-of-sequence token takes an answer out. Pure: whoever
runs the model hands in its distributions.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from anyengine.outputs import LogprobsOnePosition
from anyengine.params import BeamSearchParams

__all__ = ["Beam", "Beams"]


class Beam(msgspec.Struct, frozen=True):
    """One answer, or the beginning of one; ``rows`` are the distributions that its tokens were chosen from."""

    token_ids: tuple[int, ...] = ()
    rows: tuple[LogprobsOnePosition, ...] = ()
    cumulative_logprob: float = 0.0
    has_ended: bool = False
    ends_with_eos: bool = False


class Beams:
    """See the module. ``running`` are to be continued, each by one token."""

    def __init__(self, params: BeamSearchParams, prompt_token_ids: Sequence[int], eos_token_id: int | None) -> None:
        self._params = params
        self._prompt_token_ids = prompt_token_ids
        self._eos_token_id = eos_token_id
        self._ended: list[Beam] = []
        self.running: list[Beam] = [Beam()]

    def extend(self, rows: Sequence[LogprobsOnePosition]) -> None:
        """Go on with the best; ``rows`` has what may follow each of ``running``."""
        candidates: list[Beam] = []
        for beam, row in zip(self.running, rows, strict=True):
            for token_id, entry in row.items():
                score = beam.cumulative_logprob + entry.logprob
                if token_id == self._eos_token_id and not self._params.ignore_eos:
                    shown = self._params.include_stop_str_in_output
                    ids = (*beam.token_ids, token_id) if shown else beam.token_ids
                    self._ended.append(Beam(ids, (*beam.rows, row), score, has_ended=True, ends_with_eos=shown))
                else:
                    candidates.append(Beam((*beam.token_ids, token_id), (*beam.rows, row), score))
        candidates.sort(key=lambda beam: -beam.cumulative_logprob)
        self.running = candidates[: self._params.beam_width]

    def best(self) -> list[Beam]:
        """The answers, best first."""
        return sorted([*self._ended, *self.running], key=self._score, reverse=True)[: self._params.beam_width]

    def _score(self, beam: Beam) -> float:
        """Per token, prompt included, but for a last one that could end it (as in vLLM)."""
        *_, last = beam.token_ids or self._prompt_token_ids
        length = len(self._prompt_token_ids) + len(beam.token_ids) - (last == self._eos_token_id)
        return beam.cumulative_logprob / float(max(length, 1) ** self._params.length_penalty)
