"""A logits processor of one's own: ``extra_args={"never_twice": True}`` has no token of the answer come again."""

from collections.abc import Sequence

import torch

from anyengine.engine.interfaces import SequenceState
from anyengine.engine.runner.logits_processors import ServedModel


class NeverTwice:
    def __init__(self, model: ServedModel) -> None:
        """``EmbeddedEngine(logits_processors=["never_twice:NeverTwice"])`` has it made in the engine's process."""

    def start(self, seq: SequenceState) -> list[int] | None:
        """What it has to know of this request: the tokens of the answer, a list that grows."""
        wanted = (seq.sampling.extra_args or {}).get("never_twice", False)
        if not isinstance(wanted, bool):
            raise ValueError(f"never_twice={wanted!r} must be True or False")
        return seq.output_token_ids if wanted else None

    def apply(self, logits: torch.Tensor, states: Sequence[list[int]]) -> torch.Tensor:
        """One row of ``logits`` [num_requests, vocab] for each of those who want it."""
        rows = [row for row, token_ids in enumerate(states) for _ in token_ids]
        logits[rows, [token_id for token_ids in states for token_id in token_ids]] = float("-inf")
        return logits
