"""Picks the next token of every sequence from its logits.

Owns what sampling parameters mean, in the order of ``vllm.v1.sample.sampler`` (0.32): allowed ids, bad words, minimum
length, bias, logits processors that were brought along and penalties change the logits; then temperature, min-p, top-k
and top-p; then one draw. Pure, as far as these processors are: the randomness of a draw is a hash of the sequence's
seed and of how many tokens it has, so a sequence samples the same tokens alone, in any batch, in any slot and after it
was preempted. Must not know the model, the cache or the scheduler.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import Tensor

from anyengine._wire import WireSamplingParams
from anyengine.engine.interfaces import SequenceState

__all__ = ["sample", "unsupported_sampling"]

_UNSUPPORTED = (
    "thinking_token_budget",
    "trace_decode_token_ids",
)

_GREEDY_BELOW = 1e-5  # vLLM's threshold: a lower temperature means greedy
_DRAW_BITS = 48  # a draw of at most 1 - 2**-48 times a float64 total stays below that total, whatever the rounding


def unsupported_sampling(params: WireSamplingParams, vocab_size: int) -> str | None:
    """What of ``params`` this sampler cannot do, in words; ``None``: nothing. What passes cannot fail in a step."""
    for name in _UNSUPPORTED:
        value = getattr(params, name)
        if value is not None and value is not False:
            return f"sampling parameter {name} is not supported by this engine"
    if params.bad_words and not params.bad_words_token_ids:
        return "sampling parameter bad_words needs _bad_words_token_ids: this engine has no tokenizer"
    token_ids = {
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias or (),
        "logprob_token_ids": params.logprob_token_ids or (),
        "_bad_words_token_ids": [token_id for word in params.bad_words_token_ids or () for token_id in word],
    }
    for name, ids in token_ids.items():
        if outside := [token_id for token_id in ids if not 0 <= token_id < vocab_size]:
            return f"sampling parameter {name} contains {outside[0]}, outside the vocabulary of {vocab_size} tokens"
    if any(not word for word in params.bad_words_token_ids or ()):
        return "sampling parameter _bad_words_token_ids contains an empty word"
    return None


def sample(
    logits: Tensor,
    seqs: Sequence[SequenceState],
    seeds: Sequence[int],
    process: Callable[[Tensor], None] | None = None,
) -> list[int]:
    """The next token id of each of ``seqs``; ``logits`` stays as it was.

    ``seeds`` has one number for each sequence: the same seed, logits and history give the same token. ``process``
    changes a copy of the logits [num_seqs, vocab] in place, between bias and penalties.
    """
    logits = _changed(logits, seqs, process)
    token_ids = logits.argmax(dim=-1)  # [num_seqs], int64
    drawing = [index for index, seq in enumerate(seqs) if seq.sampling.temperature >= _GREEDY_BELOW]
    if drawing:
        draws = [_uniform(seeds[index], len(seqs[index].output_token_ids)) for index in drawing]
        params = [seqs[index].sampling for index in drawing]
        token_ids[drawing] = _draw(logits[drawing], params, draws)
    return [int(token_id) for token_id in token_ids.tolist()]


def _uniform(seed: int, num_output_tokens: int) -> float:
    """A number in [0, 1) that depends on nothing but the arguments."""
    digest = hashlib.blake2b(f"{seed}:{num_output_tokens}".encode(), digest_size=_DRAW_BITS // 8).digest()
    return float(int.from_bytes(digest, "little") / 2**_DRAW_BITS)


# --- what changes the logits themselves ---------------------------------------------------------------------------


class _Entries:
    """Some entries of a matrix [num_seqs, vocab], of many rows, with a value for each: one operation for the batch."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._counts: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(self, row: int, columns: Collection[int], values: float | Iterable[float] = 0.0) -> None:
        self._rows.append(row)
        self._counts.append(len(columns))
        self._columns += columns
        self._values += [values] * len(columns) if isinstance(values, float | int) else values

    def of(self, logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """Index and values; ``None``: there are none."""
        if not self._columns:
            return None
        rows = torch.tensor(self._rows).repeat_interleave(torch.tensor(self._counts)).to(logits.device)
        columns = torch.tensor(self._columns, device=logits.device)
        return (rows, columns), torch.tensor(self._values, dtype=logits.dtype, device=logits.device)


def _changed(logits: Tensor, seqs: Sequence[SequenceState], process: Callable[[Tensor], None] | None) -> Tensor:
    """``logits`` [num_seqs, vocab], float32, with all that applies before the temperature; a copy, if anything does."""
    if process is None and not any(_changes_logits(seq) for seq in seqs):
        return logits
    allowed, banned, biases, repeated, counted = (_Entries() for _ in range(5))
    for row, seq in enumerate(seqs):
        params, output = seq.sampling, seq.output_token_ids
        if params.allowed_token_ids:
            allowed.add(row, params.allowed_token_ids)
        banned.add(row, _banned(seq, logits.shape[-1]), -math.inf)
        if params.logit_bias:
            biases.add(row, params.logit_bias.keys(), params.logit_bias.values())
        if params.repetition_penalty != 1.0:
            repeated.add(row, {*seq.prompt_token_ids, *output}, params.repetition_penalty)
        if params.frequency_penalty or params.presence_penalty:
            counts = Counter(output)
            penalties = [params.frequency_penalty * count + params.presence_penalty for count in counts.values()]
            counted.add(row, counts.keys(), penalties)
    changed = _keep_only(logits, allowed, seqs)
    if entries := banned.of(logits):
        changed[entries[0]] = entries[1]
    if entries := biases.of(logits):
        changed[entries[0]] += entries[1]
    if process is not None:
        process(changed)
    if entries := repeated.of(logits):
        index, penalty = entries
        before = changed[index]  # [num_entries]
        changed[index] = torch.where(before > 0, before / penalty, before * penalty)
    if entries := counted.of(logits):
        changed[entries[0]] -= entries[1]
    return changed


def _changes_logits(seq: SequenceState) -> bool:
    params = seq.sampling
    return bool(
        params.allowed_token_ids
        or params.bad_words_token_ids
        or params.logit_bias
        or len(seq.output_token_ids) < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
    )


def _keep_only(logits: Tensor, allowed: _Entries, seqs: Sequence[SequenceState]) -> Tensor:
    """A copy, without the tokens that are not allowed in rows where only some are."""
    entries = allowed.of(logits)
    if entries is None:
        return logits.clone()
    index, _ = entries
    restricted = torch.tensor([bool(seq.sampling.allowed_token_ids) for seq in seqs], device=logits.device)
    kept = logits.masked_fill(restricted[:, None], -math.inf)
    kept[index] = logits[index]
    return kept


def _banned(seq: SequenceState, vocab_size: int) -> list[int]:
    """What must not come next: the end of the text too early, the end of a bad word."""
    params, output = seq.sampling, seq.output_token_ids
    banned: list[int] = []
    for bad_word in params.bad_words_token_ids or ():
        prefix = bad_word[:-1]
        if output[len(output) - len(prefix) :] == prefix:
            banned.append(bad_word[-1])
    if len(output) < params.min_tokens:
        stops = {*params.all_stop_token_ids, *(params.stop_token_ids or ())}
        if params.eos_token_id is not None:
            stops.add(params.eos_token_id)
        banned += sorted(token_id for token_id in stops if 0 <= token_id < vocab_size)
    return banned


# --- drawing ------------------------------------------------------------------------------------------------------


def _draw(logits: Tensor, params: Sequence[WireSamplingParams], draws: Sequence[float]) -> Tensor:
    """One token id for each row of ``logits`` [num_rows, vocab].

    The inverse of its cumulative distribution at ``draws``.
    """
    vocab_size = logits.shape[-1]
    scaled = logits / _column([p.temperature for p in params], logits)  # [num_rows, vocab]
    floor = scaled.amax(dim=-1, keepdim=True) + _column([p.min_p for p in params], logits).log()  # [num_rows, 1]
    truncated = [index for index, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    scaled.masked_fill_(scaled < floor, -math.inf)
    if truncated:
        rows = scaled[truncated]  # [num_truncated, vocab]
        cutoff = _cutoff(rows, [params[index] for index in truncated])  # [num_truncated, 1]
        scaled[truncated] = rows.masked_fill(rows < cutoff, -math.inf)
    probs = scaled.softmax(dim=-1, dtype=torch.float64)  # [num_rows, vocab]
    cumulative = probs.cumsum(dim=-1)
    target = _column(draws, cumulative) * cumulative[:, -1:]
    # A parallel prefix sum is not exactly monotone: a token without probability must not be hit by a rounding error.
    hit = (cumulative > target) & (probs > 0)
    return hit.to(torch.uint8).argmax(dim=-1)  # the first hit; [num_rows], int64


def _cutoff(scaled: Tensor, params: Sequence[WireSamplingParams]) -> Tensor:
    """The lowest logit that top-k, then top-p leave in each row.

    [num_rows, 1]. Ties at the cut stay in, as their order is chance.
    """
    vocab_size = scaled.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    ranked = scaled.topk(max(top_k), dim=-1).values  # [num_rows, max_k], descending
    ranks = torch.arange(ranked.shape[-1], device=scaled.device)
    ranked = ranked.masked_fill(ranks >= torch.tensor(top_k, device=scaled.device)[:, None], -math.inf)
    probs = ranked.softmax(dim=-1, dtype=torch.float64)
    mass_above = probs.cumsum(dim=-1) - probs
    kept = (mass_above < _column([p.top_p for p in params], mass_above)) & (probs > 0)
    last_kept = kept.sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    return ranked.gather(-1, last_kept)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]  # [num_rows, 1]
