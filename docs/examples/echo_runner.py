"""An engine of one's own: it answers with the prompt, again and again. All that a model runner must be."""

from collections.abc import Callable, Sequence

from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import SampledToken, ScheduledSequence, SequenceState

SCORES = ("logprobs", "prompt_logprobs", "logprob_token_ids")
CANNOT = ("seed", "structured_outputs", "logit_bias", "allowed_token_ids", "bad_words", *SCORES)


class EchoRunner:
    dtype = "float32"
    vocab_size = 50_000
    max_model_len = 4096  # tokens
    eos_token_ids: tuple[int, ...] = ()
    num_kv_blocks, kv_block_tokens = 1024, 16  # of a cache that an echo has no use for
    pooling_tasks: tuple[str, ...] = ()
    embedding_size = 0

    def start(self, seq: SequenceState) -> None:
        """Refuse what we cannot do: the request fails with the reason, and alone."""
        for name in CANNOT:
            if getattr(seq.sampling, name) not in (None, []):
                raise ValueError(f"an echo has no {name}")

    def finish(self, request_id: str) -> None:
        """It has left, in whatever way."""

    def step(self, scheduled: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """The next token of each sequence whose prompt is complete."""
        return [self._next(item.seq) if self._completes(item) else None for item in scheduled]

    def close(self) -> None:
        """The engine ends."""

    def _completes(self, item: ScheduledSequence) -> bool:
        return item.seq.num_computed_tokens + item.num_new_tokens == item.seq.num_tokens

    def _next(self, seq: SequenceState) -> SampledToken:
        return SampledToken(seq.prompt_token_ids[len(seq.output_token_ids) % len(seq.prompt_token_ids)])


def create_runner(config: EmbeddedEngine, report: Callable[..., None]) -> EchoRunner:
    """What ``EmbeddedEngine(runner="echo_runner:create_runner")`` calls in the engine's process."""
    return EchoRunner()
