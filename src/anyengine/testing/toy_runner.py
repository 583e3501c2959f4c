"""A model runner without a model: deterministic tokens, no torch, faults on demand.

For tests that want a real engine process behind real sockets, started in a fraction of a second::

    EmbeddedEngine(runner="anyengine.testing.toy_runner:create_runner", runner_options={"step_delay_s": 0.01})

The next token depends on the seed and on all tokens before it, and on nothing else: not on batch-mates or timing. Of
sampling parameters only those count that forbid or force a token, and the seed of a request that is not greedy.
:func:`expected_tokens` says what an undisturbed generation yields. Owns no engine logic: it sits where a model would.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence

import msgspec

from anyengine._process.status import Status
from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import ModelRunner, PooledPrompt, SampledToken, ScheduledSequence, SequenceState

__all__ = ["ToyOptions", "ToyRunner", "create_runner", "expected_tokens", "next_token"]

_CERTAIN = 100.0
"""A logit bias of this size decides."""


class ToyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``runner_options`` may hold. Steps count from 1."""

    vocab_size: int = 1000
    max_model_len: int = 2048
    num_kv_blocks: int = 4096
    kv_block_tokens: int = 16
    eos_token_id: int = -1
    """-1: none, so that generations end where their limits say."""
    step_delay_s: float = 0.0
    """A real sleep inside every step: a slow model."""
    fail_at_step: int = 0
    exit_at_step: int = 0
    """The process vanishes in this step, as if killed."""
    fail_on_load: str = ""
    """Load fails with a RuntimeError of this text."""
    hang_on_load: bool = False


_SCORES = ("logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids")


def next_token(seed: int, tokens: Sequence[int], vocab_size: int) -> int:
    """The token after ``tokens``."""
    return zlib.crc32(array("q", tokens).tobytes(), seed) % vocab_size


def expected_tokens(prompt: Sequence[int], n: int, *, seed: int = 0, vocab_size: int = 1000) -> list[int]:
    """The first ``n`` tokens that a toy engine generates after ``prompt``, stop conditions aside."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(seed, tokens, vocab_size))
    return tokens[len(prompt) :]


class ToyRunner:
    """Implements :class:`~anyengine.engine.interfaces.ModelRunner`, and checks that it is used as agreed."""

    dtype = "float32"
    pooling_tasks: tuple[str, ...] = ()
    embedding_size = 0

    def __init__(self, options: ToyOptions, *, seed: int, max_model_len: int) -> None:
        self.vocab_size: int = options.vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids: tuple[int, ...] = (options.eos_token_id,) if options.eos_token_id >= 0 else ()
        self._options = options
        self._seed = seed
        self._num_steps = 0
        self.num_kv_blocks: int = max(options.num_kv_blocks, -(-max_model_len // options.kv_block_tokens))
        self.kv_block_tokens: int = options.kv_block_tokens
        self._digests: dict[str, list[int]] = {}
        """Of every beginning of each request's tokens; nothing is cached for a request that is not in it."""
        self._cache: dict[tuple[int, int], int] = {}
        """What a real one has of keys and values, by block and offset: a digest of all tokens so far."""

    def start(self, seq: SequenceState) -> None:
        if seq.request_id in self._digests:
            raise RuntimeError(f"{seq.request_id!r} was started twice")
        if any(getattr(seq.sampling, name) is not None for name in _SCORES):
            raise ValueError("the toy has no log-probabilities")
        if seq.sampling.structured_outputs is not None:
            raise ValueError("the toy has no structured_outputs: its tokens are no text")
        self._digests[seq.request_id] = []

    def finish(self, request_id: str) -> None:
        self._digests.pop(request_id, None)

    def step(self, scheduled: Sequence[ScheduledSequence]) -> list[SampledToken | PooledPrompt | None]:
        self._num_steps += 1
        if self._options.step_delay_s:
            time.sleep(self._options.step_delay_s)
        if self._num_steps == self._options.exit_at_step:
            os._exit(66)
        if self._num_steps == self._options.fail_at_step:
            raise RuntimeError(f"the toy fails at step {self._num_steps}, as told")
        return [self._compute(item.seq, item.num_new_tokens) for item in scheduled]

    def close(self) -> None:
        self._digests.clear()
        self._cache.clear()

    def _compute(self, seq: SequenceState, num_new_tokens: int) -> SampledToken | None:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens
        if seq.request_id not in self._digests or not start < end <= seq.num_tokens:
            raise RuntimeError(f"{seq.request_id!r}: tokens {start} to {end} of {seq.num_tokens} were scheduled")
        tokens = seq.prompt_token_ids + seq.output_token_ids
        digests = self._digests[seq.request_id]
        goes_on = len(digests) == start
        for token in tokens[len(digests) : end]:
            digests.append(zlib.crc32(b"%d" % token, digests[-1] if digests else zlib.crc32(seq.cache_key)))
        del digests[end:]  # it was preempted, and computes them again
        for position in range(start - 1 if goes_on and start else 0, end):
            where = self._where(seq, position)
            if position >= start:
                self._cache[where] = digests[position]
            elif self._cache.get(where) != digests[position]:
                raise RuntimeError(f"{seq.request_id!r}: block {where[0]} does not hold its token {position}")
        return SampledToken(self._sample(seq, tokens)) if end == seq.num_tokens else None

    def _where(self, seq: SequenceState, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.kv_block_tokens)
        return seq.block_ids[index], offset

    def _sample(self, seq: SequenceState, tokens: list[int]) -> int:
        sampling, bias = seq.sampling, seq.sampling.logit_bias or {}
        seeded = sampling.seed is not None and sampling.temperature > 0 and sampling.top_k != 1
        token_id = next_token(self._seed + (sampling.seed or 0 if seeded else 0), tokens, self.vocab_size)
        forced = [candidate for candidate, value in bias.items() if value >= _CERTAIN]
        allowed = forced or sampling.allowed_token_ids
        if allowed:
            return allowed[token_id % len(allowed)]
        banned = {candidate for candidate, value in bias.items() if value <= -_CERTAIN}
        banned |= {word[0] for word in sampling.bad_words_token_ids or () if len(word) == 1}
        while token_id in banned and len(banned) < self.vocab_size:
            token_id = (token_id + 1) % self.vocab_size
        return token_id


def create_runner(config: EmbeddedEngine, report: Callable[[Status], None]) -> ModelRunner:
    """The factory that ``EmbeddedEngine.runner`` names. Raises RuntimeError when ``fail_on_load`` says so."""
    options = msgspec.convert(config.runner_options, ToyOptions)
    report(Status("loading", detail="toy"))
    if options.hang_on_load:
        threading.Event().wait()
    if options.fail_on_load:
        raise RuntimeError(options.fail_on_load)
    max_model_len = min(options.max_model_len, config.max_model_len or options.max_model_len)
    return ToyRunner(options, seed=config.seed, max_model_len=max_model_len)
