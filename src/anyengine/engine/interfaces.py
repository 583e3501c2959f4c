"""The seams of the embedded engine core: what server, core, scheduler, model runner and sampler know of each other.

Owns the shared records and protocols; imports neither torch nor zmq. Anything here can be replaced alone: the server
drives an :class:`Engine`; the embedded :class:`Engine` schedules :class:`SequenceState` records onto a
:class:`ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from anyengine._wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    LogprobsLists,
    LogprobsTensors,
    SchedulerStats,
    Tensor,
    WireLoRARequest,
    WirePoolingParams,
    WireSamplingParams,
)

__all__ = [
    "AdapterRunner",
    "CollectiveRunner",
    "Engine",
    "FailedSequence",
    "ManagedRunner",
    "ModelRunner",
    "PooledPrompt",
    "ProfiledRunner",
    "SampledToken",
    "ScheduledSequence",
    "SequenceState",
    "StepResult",
    "generates",
]


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request inside the engine, from admission to its last token. Owned by the busy loop's thread."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: WireSamplingParams
    priority: int = 0
    arrival_order: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """How many of prompt + output have their keys and values in the cache."""
    block_ids: list[int] = field(default_factory=list)
    """Where these are: block ``i`` holds tokens ``i * kv_block_tokens`` and following. The scheduler's to change."""
    cache_key: bytes = b""
    """What keys and values depend on besides the tokens: sequences share blocks only if they have this in common."""
    num_cached_tokens: int = 0
    """Prompt tokens that were in the cache when it joined the batch for the first time."""
    num_preemptions: int = 0
    pooling: WirePoolingParams | None = None
    """What is wanted of the prompt instead of a token after it."""
    lora_id: int | None = None
    """The adapter that it is computed with."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether all of its tokens are computed, though they may be in the cache."""
        return bool(self.sampling.skip_reading_prefix_cache) or self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are wanted, of the likeliest tokens or of chosen ones."""
        return self.sampling.prompt_logprobs is not None or self.sampling.prompt_logprob_token_ids is not None

    def token_slice(self, start: int, end: int) -> list[int]:
        """Tokens ``start`` to ``end`` of prompt and output, without joining the two."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
        return self.prompt_token_ids[start:end] + self.output_token_ids[: max(0, end - num_prompt_tokens)]


@dataclass(slots=True, frozen=True)
class ScheduledSequence:
    """``seq`` computes its next ``num_new_tokens`` tokens in this step (its prompt, a chunk of it, or one token)."""

    seq: SequenceState
    num_new_tokens: int


class SampledToken(NamedTuple):
    """What a step yields for one sequence: its next token, and what its sampling parameters ask for beside that."""

    token_id: int
    logprobs: LogprobsLists | None = None
    prompt_logprobs: LogprobsTensors | None = None
    """With the first token only."""
    prompt_token_id_logprobs: Tensor | None = None
    """Of the ids of ``prompt_logprob_token_ids``, [num_rows, num_ids], float32. With the first token only."""


class PooledPrompt(NamedTuple):
    """What the step that completes a prompt yields for a pooling request."""

    data: Tensor


class FailedSequence(NamedTuple):
    """What a step yields for a sequence that cannot go on: its request fails, alone."""

    reason: str
    code: str = "validation_error"
    """Its error's code for the client: by default, that the request asks for what cannot be."""


StepResult: TypeAlias = SampledToken | PooledPrompt | FailedSequence | None
"""What a step yields for one sequence; ``None``: its prompt is not complete yet."""


def generates(runner: ModelRunner) -> bool:
    """Whether ``runner`` samples tokens. One that says nothing of it does; a model that classifies does not."""
    return bool(getattr(runner, "generates", True))


class ModelRunner(Protocol):
    """Runs the model for whole steps. Synchronous, one thread. Sampling included."""

    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    dtype: str  # "float32", "bfloat16", ...
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int  # enough for one sequence of max_model_len
    kv_block_tokens: int
    pooling_tasks: tuple[str, ...]  # what it computes of prompts: "embed", "classify"
    embedding_size: int

    def start(self, seq: SequenceState) -> Future[None] | None:
        """Take ``seq`` in, before it waits for its turn: sampler state and the like. An exception (a sampling
        parameter it cannot honour, no memory) fails this request alone.

        A Future stands for what takes longer, such as compiling a grammar, and is done elsewhere: ``seq`` is scheduled
        once it is done; an exception in it fails the request, too.
        """

    def finish(self, request_id: str) -> None:
        """Release everything held for it. Unknown ids are ignored."""

    def step(self, scheduled: Sequence[ScheduledSequence]) -> Sequence[StepResult]:
        """Run one step; a sampled token for each entry, in order (``None``: its prompt is not complete yet), what a
        pooling request wants, or why the sequence cannot go on.

        Keys and values of the new tokens go to, and those of the ``num_computed_tokens`` before them are in, the
        blocks that ``seq.block_ids`` names. Other sequences may have some of these too, and only read them. A
        preempted sequence computes its tokens again. Does not change ``seq``: the caller appends the token and
        advances ``num_computed_tokens``.
        """

    def close(self) -> None:
        """Release the model."""


@runtime_checkable
class AdapterRunner(Protocol):
    """A :class:`ModelRunner` that may have LoRA adapters. Sequences name theirs with ``lora_id``, and keep it to their
    end, though it may be removed or replaced meanwhile. Called between steps."""

    max_loras: int  # so many are kept; 0: none

    def add_lora(self, request: WireLoRARequest) -> bytes:
        """Load an adapter, unless it is there. What keys and values that are computed with it depend on: no other
        adapter gives the same.

        Raises:
            ValueError: it cannot be served, and why.
        """

    def remove_lora(self, lora_id: int) -> bool:
        """Whether it was there."""

    def list_loras(self) -> list[int]:
        """The ids of those that are loaded."""

    def pin_lora(self, lora_id: int) -> bool:
        """Never let it go for another one. Raises ValueError if it is not loaded."""


@runtime_checkable
class ManagedRunner(Protocol):
    """A :class:`ModelRunner` whose memory can be given back and whose weights can be changed. Called between steps;
    none is run while it sleeps."""

    @property
    def is_sleeping(self) -> bool:
        """Whether any of its memory is away."""

    def sleep(self, level: int) -> None:
        """Give memory back: level 1 what can be had again without loss, 2 all."""

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back: ``"weights"``, ``"kv_cache"``, or all of it. What the cache held is lost."""

    def release_kv_cache_memory(self) -> None:
        """Give the memory of keys and values back."""

    def reload_weights(self, path: str | None) -> None:
        """Load weights from files; ``None``: those that it began with. A failure leaves the present ones."""


@runtime_checkable
class ProfiledRunner(Protocol):
    """A :class:`ModelRunner` that can be profiled. Called between steps."""

    def start_profile(self, prefix: str | None, delay_steps: int | None, max_steps: int | None) -> None:
        """After so many more steps, for so many. Raises where that is not possible."""

    def stop_profile(self) -> None:
        """Write what there is."""


@runtime_checkable
class CollectiveRunner(ModelRunner, Protocol):
    """A :class:`ModelRunner` that is one of several data-parallel ranks, none of which can step alone. From the start
    of a wave to its end each takes the same number of steps: :meth:`ModelRunner.step`, or a dummy batch."""

    data_parallel_size: int

    def run_dummy_batch(self) -> None:
        """A step on nothing, for the sake of the other ranks."""

    def any_has_work(self, has_work: bool) -> bool:
        """Whether any rank has. All of them ask behind the same step."""


class Engine(Protocol):
    """What the server drives. Called from the busy loop's thread only."""

    needs_coordinator: bool
    """Whether it runs in waves, which a coordinator starts."""

    def ready_response(self) -> EngineCoreReadyResponse:
        """What the registration frame says. Its ``vllm_version`` names the dialect that the server speaks."""

    def add(self, request: EngineCoreRequest) -> None:
        """Take a request. A bad one becomes an output with finish reason ERROR at the next step; it never raises."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests without an output. Unknown ids are ignored."""

    def abort_client(self, client_index: int) -> None:
        """Forget all requests of a client that has gone, without an output."""

    def abort_all(self) -> None:
        """End every request; each gets an output with finish reason ABORT at the next step."""

    def refuse(self, client_index: int, request_id: str, reason: str) -> None:
        """Answer a request that could not even be decoded, with finish reason ERROR at the next step."""

    def count_malformed(self) -> None:
        """Note that a message was dropped."""

    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""

    def step(self) -> list[tuple[int, EngineCoreOutput]]:
        """One step: ``(client_index, output)`` pairs. An exception here is fatal for the engine."""

    def take_finished(self) -> dict[int, set[str]]:
        """The requests that have left the engine since the last call, in whatever way, by client."""

    def scheduler_stats(self) -> SchedulerStats:
        """The load after the last step."""

    def start_wave(self, wave: int) -> bool:
        """The coordinator starts a wave. False: this engine takes no part in waves."""

    def take_coordinator_news(self) -> list[EngineCoreOutputs]:
        """What the coordinator shall know, since the last call: of waves, and of the load."""

    @property
    def weight_version(self) -> str:
        """The name of the weights that the last step ran with."""

    def utility(self, method: str, args: Sequence[Any]) -> Any:
        """An allow-listed call. Raises for a failure reply; returns a Future for a reply that comes later, behind the
        outputs of the step that completes it."""

    def reset(self) -> None:
        """Be as new for the next front ends: no request, no pause. Counters and model stay."""

    def close(self) -> None:
        """Release everything."""
