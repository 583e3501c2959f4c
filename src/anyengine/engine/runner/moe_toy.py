"""A toy mixture of experts whose ranks share one model: each has some of the experts, and none can step alone.

For tests and experiments with data-parallel ranks in lockstep::

    EmbeddedEngine(runner="anyengine.engine.runner.moe_toy:create_runner",
                   runner_options={"data_parallel_rank": 0, "data_parallel_size": 2, "port": 29600})

Owns the model, which has random weights and no attention (the next token depends on the last few), and its collective
operations, over gloo. Sampling is greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch import distributed as dist

from anyengine._process.status import Status
from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import SampledToken, ScheduledSequence, SequenceState, StepResult

__all__ = ["MoEOptions", "MoERunner", "MoEWeights", "create_runner"]

_VOCAB_SIZE, _HIDDEN, _NUM_EXPERTS, _NUM_SEEN = 64, 16, 4, 8
_REFUSED = ("structured_outputs", "logprobs", "prompt_logprobs", "logprob_token_ids", "prompt_logprob_token_ids")


class MoEOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``runner_options`` may hold. Rank 0 listens at ``port`` for the others."""

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    port: int = 0
    timeout_s: float = 60.0
    """How long a rank waits for the others in one operation, before it takes them for dead."""


class MoEWeights:
    """All weights, of all experts: the same on every rank."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embedding: Tensor = torch.randn(_VOCAB_SIZE, _HIDDEN, generator=generator)
        self.router: Tensor = torch.randn(_HIDDEN, _NUM_EXPERTS, generator=generator)
        self.experts: Tensor = torch.randn(_NUM_EXPERTS, _HIDDEN, _HIDDEN, generator=generator)

    def hidden_state(self, tokens: Sequence[int]) -> Tensor:
        """Of what the last few tokens are, the last one most of all: [hidden]."""
        seen = torch.tensor(tokens[-_NUM_SEEN:])
        weights = 0.7 ** torch.arange(len(seen) - 1, -1, -1)
        return (self.embedding[seen] * weights[:, None]).sum(0)


class MoERunner:
    """Implements :class:`~anyengine.engine.interfaces.CollectiveRunner`. One thread; every step is collective."""

    dtype = "float32"
    vocab_size = _VOCAB_SIZE
    eos_token_ids: tuple[int, ...] = ()
    num_kv_blocks = 1024  # of a cache that it has no use for
    kv_block_tokens = 16
    pooling_tasks: tuple[str, ...] = ()
    embedding_size = 0

    def __init__(self, options: MoEOptions, *, seed: int, max_model_len: int) -> None:
        if _NUM_EXPERTS % options.data_parallel_size:
            raise ValueError(f"data_parallel_size={options.data_parallel_size} must divide {_NUM_EXPERTS} experts")
        self.max_model_len = max_model_len
        self.data_parallel_size: int = options.data_parallel_size
        self.num_dummy_batches: int = 0
        self._rank = options.data_parallel_rank
        self._weights = MoEWeights(seed)
        share = _NUM_EXPERTS // options.data_parallel_size
        self._experts = range(self._rank * share, (self._rank + 1) * share)
        timeout = timedelta(seconds=options.timeout_s)
        tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so
        store = tcp_store("127.0.0.1", options.port, options.data_parallel_size, self._rank == 0, timeout=timeout)
        # A group of its own, not the process's: its stubs have no operations.
        self._group: Any = dist.ProcessGroupGloo(store, self._rank, options.data_parallel_size, timeout)

    def start(self, seq: SequenceState) -> None:
        """Raises ValueError for what a toy has not."""
        if seq.sampling.temperature:
            raise ValueError("the toy is greedy: temperature must be 0")
        for name in _REFUSED:
            if getattr(seq.sampling, name) is not None:
                raise ValueError(f"the toy has no {name}")

    def finish(self, request_id: str) -> None:
        """Nothing is kept."""

    def step(self, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """Together with the other ranks, whatever they have."""
        places = [place for place, item in enumerate(scheduled) if _completes(item)]
        seqs = [scheduled[place].seq for place in places]
        states = [self._weights.hidden_state(seq.prompt_token_ids + seq.output_token_ids) for seq in seqs]
        mixed = self._mix(torch.stack(states) if states else torch.empty(0, _HIDDEN))
        token_ids = (mixed @ self._weights.embedding.T).argmax(-1).tolist()
        results: list[StepResult] = [None] * len(scheduled)
        for place, token_id in zip(places, token_ids, strict=True):
            results[place] = SampledToken(token_id)
        return results

    def run_dummy_batch(self) -> None:
        """A step on nothing: the experts of this rank serve the others."""
        self.num_dummy_batches += 1
        self._mix(torch.empty(0, _HIDDEN))

    def any_has_work(self, has_work: bool) -> bool:
        """Whether any rank has."""
        count = torch.tensor([int(has_work)])
        self._group.allreduce([count]).wait()
        return bool(count)

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()

    def _mix(self, states: Tensor) -> Tensor:
        """``states`` [num_rows, hidden] with what their experts make of them, wherever these are."""
        rows = self._from_all(torch.tensor([len(states)]))
        most = int(max(rows))
        if not most:
            return states
        padded = torch.zeros(most, _HIDDEN)
        padded[: len(states)] = states
        everybody = torch.cat(self._from_all(padded))  # [size * most, hidden]
        chosen = (everybody @ self._weights.router).argmax(-1)
        found = torch.zeros_like(everybody)
        for expert in self._experts:
            mine = chosen == expert
            found[mine] = torch.tanh(everybody[mine] @ self._weights.experts[expert])
        self._group.allreduce([found]).wait()
        first = self._rank * most
        return states + found[first : first + len(states)]

    def _from_all(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.data_parallel_size)]
        self._group.allgather([gathered], [tensor]).wait()
        return gathered


def _completes(item: ScheduledSequence) -> bool:
    return item.seq.num_computed_tokens + item.num_new_tokens == item.seq.num_tokens


def create_runner(config: EmbeddedEngine, report: Callable[[Status], None]) -> MoERunner:
    """The factory that ``EmbeddedEngine.runner`` names. Waits for the other ranks."""
    options = msgspec.convert(config.runner_options, MoEOptions)
    report(Status("loading", detail="toy mixture of experts"))
    return MoERunner(options, seed=config.seed, max_model_len=config.max_model_len or 2048)
