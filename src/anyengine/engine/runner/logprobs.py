"""Log-probabilities, as requests ask for them: of sampled tokens, and of prompt tokens.

Owns their layout on the wire (``vllm.v1.outputs``: the token itself in column 0, then the likeliest ones; ranks count
from 1) and where they come from: the logits before any sampling parameter has changed them, vLLM's ``raw_logprobs``.
Pure. Must not know the model or the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from anyengine import _wire
from anyengine._wire import LogprobsLists, LogprobsTensors
from anyengine.engine.interfaces import SequenceState

__all__ = ["PromptScores", "sampled_logprobs"]

_ROWS_AT_ONCE = 64  # of a prompt: each takes several copies of the vocabulary's size


def sampled_logprobs(
    logits: Tensor, seqs: Sequence[SequenceState], token_ids: Sequence[int]
) -> list[LogprobsLists | None]:
    """What each of ``seqs`` wants to know of its next token; ``logits`` [num_seqs, vocab], float32, as the model gave
    them. ``None``: nothing."""
    wanted = [index for index, seq in enumerate(seqs) if _wants_logprobs(seq)]
    results: list[LogprobsLists | None] = [None] * len(seqs)
    if not wanted:
        return results
    logprobs = logits[wanted].log_softmax(dim=-1)  # [num_wanted, vocab], float32
    for row, index in zip(logprobs, wanted, strict=True):
        sampling = seqs[index].sampling
        chosen = torch.tensor([token_ids[index]], device=row.device)
        if sampling.logprob_token_ids is not None:
            others = torch.tensor([sampling.logprob_token_ids], dtype=torch.int64, device=row.device)
        else:
            others = _likeliest(row[None], sampling.logprobs)
        columns, values, ranks = _gather(row[None], chosen, others)
        results[index] = LogprobsLists(_packed("<i4", columns.int()), _packed("<f4", values), _packed("<i8", ranks))
    return results


class PromptScores:
    """Collects the log-probabilities of one prompt, chunk by chunk: of its tokens from the second one on, beside the
    likeliest ones; and of the ids that ``prompt_logprob_token_ids`` names for each position."""

    def __init__(self, seq: SequenceState) -> None:
        sampling = seq.sampling
        self._prompt = seq.prompt_token_ids
        self._k = sampling.prompt_logprobs
        self._num_scored = 0
        self._ranked: list[tuple[Tensor, Tensor, Tensor]] = []
        self._named: list[Tensor] = []  # [num_rows, num_ids], float32
        self._start = sampling.prompt_logprob_start or 0
        matrix = sampling.prompt_logprob_token_ids
        self._ids = None if matrix is None else torch.from_numpy(matrix.numpy().astype(np.int64))

    def add(self, logits: Tensor, start: int) -> None:
        """``logits`` [num_tokens, vocab], float32, behind the prompt tokens from position ``start`` on. A preempted
        sequence computes some again."""
        known = self._num_scored
        logits, start = logits[max(0, known - start) :], max(start, known)
        targets = self._prompt[start + 1 : start + 1 + len(logits)]
        for first in range(0, len(targets), _ROWS_AT_ONCE):
            chosen = torch.tensor(targets[first : first + _ROWS_AT_ONCE], device=logits.device)
            logprobs = logits[first : first + len(chosen)].log_softmax(dim=-1)  # [num_chosen, vocab]
            if self._k is not None:
                self._ranked.append(_gather(logprobs, chosen, _likeliest(logprobs, self._k)))
            if self._ids is not None:
                self._named.append(self._of_named(logprobs, start + first, self._ids))
            self._num_scored += len(chosen)

    def _of_named(self, logprobs: Tensor, position: int, ids: Tensor) -> Tensor:
        """Of the positions from ``position`` on, those that have a row of ``ids``; -1 there has no probability."""
        logprobs = logprobs[max(0, self._start - position) :]
        first = max(position, self._start) - self._start
        wanted = ids[first : first + len(logprobs)].to(logprobs.device)
        return logprobs.gather(-1, wanted.clamp(min=0)).masked_fill_(wanted < 0, -math.inf).cpu()

    def results(self) -> tuple[LogprobsTensors | None, _wire.Tensor | None]:
        """All of them; ``None`` for what was not asked for, and for a prompt of one token."""
        ranked = named = None
        if self._ranked:
            columns, values, ranks = (torch.cat(parts) for parts in zip(*self._ranked, strict=True))
            ranked = LogprobsTensors(
                _packed("int32", columns.int()), _packed("float32", values), _packed("int32", ranks.int())
            )
        if self._ids is not None:
            named = _packed("float32", torch.cat([torch.empty((0, self._ids.shape[-1])), *self._named]))
        return ranked, named


def _wants_logprobs(seq: SequenceState) -> bool:
    return seq.sampling.logprobs is not None or seq.sampling.logprob_token_ids is not None


def _likeliest(logprobs: Tensor, k: int | None) -> Tensor:
    """[num_rows, k], int64; -1 stands for the whole vocabulary."""
    vocab_size = logprobs.shape[-1]
    return logprobs.topk(vocab_size if k == -1 else min(k or 0, vocab_size), dim=-1).indices


def _gather(logprobs: Tensor, chosen: Tensor, others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities [num_rows, 1 + num_others], ranks [num_rows] of the chosen tokens."""
    columns = torch.cat((chosen[:, None], others), dim=1)
    values = logprobs.gather(-1, columns)
    ranks = (logprobs >= values[:, :1]).sum(dim=-1)  # of equals the last, as vLLM
    return columns, values, ranks


def _packed(dtype: str, tensor: Tensor) -> _wire.Tensor:
    return _wire.Tensor(dtype, tuple(tensor.shape), tensor.cpu().numpy().tobytes())
