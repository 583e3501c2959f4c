"""Log-probabilities, as requests ask for them: of sampled tokens, and of prompt tokens.

Owns their layout on the wire (``vllm.v1.outputs``: the token itself in column 0, then the likeliest ones; ranks count
from 1) and where they come from: the logits before any sampling parameter has changed them, vLLM's ``raw_logprobs``.
Pure. Must not know the model or the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyengine import _wire
from anyengine._wire import LogprobsLists, LogprobsTensors
from anyengine.engine.interfaces import SequenceState

__all__ = ["PromptLogprobs", "sampled_logprobs"]

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


class PromptLogprobs:
    """Collects the log-probabilities of one prompt, chunk by chunk: of its tokens from the second one on."""

    def __init__(self, seq: SequenceState) -> None:
        self._prompt = seq.prompt_token_ids
        self._k = seq.sampling.prompt_logprobs
        self._chunks: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, logits: Tensor, start: int) -> None:
        """``logits`` [num_tokens, vocab], float32, behind the prompt tokens from position ``start`` on. A preempted
        sequence computes some again."""
        known = sum(len(columns) for columns, _, _ in self._chunks)
        logits, start = logits[max(0, known - start) :], max(start, known)
        targets = self._prompt[start + 1 : start + 1 + len(logits)]
        for first in range(0, len(targets), _ROWS_AT_ONCE):
            chosen = torch.tensor(targets[first : first + _ROWS_AT_ONCE], device=logits.device)
            logprobs = logits[first : first + len(chosen)].log_softmax(dim=-1)  # [num_chosen, vocab]
            self._chunks.append(_gather(logprobs, chosen, _likeliest(logprobs, self._k)))

    def result(self) -> LogprobsTensors | None:
        """All of them; ``None`` for a prompt of one token."""
        if not self._chunks:
            return None
        columns, values, ranks = (torch.cat(parts) for parts in zip(*self._chunks, strict=True))
        return LogprobsTensors(
            _packed("int32", columns.int()), _packed("float32", values), _packed("int32", ranks.int())
        )


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
