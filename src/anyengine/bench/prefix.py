"""``anyengine bench prefix``: what a beginning that requests share costs the second of them.

Owns the measurement: processor time of the whole process tree to the first token, of a request with a long beginning
that is new, and of one with the same beginning and an end of its own.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from anyengine import EmbeddedEngine, EngineClient, SamplingParams
from anyengine.bench.contestants.protocol import tree_cpu_s

__all__ = ["PrefixTimes", "measure_prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTimes:
    """Two requests: medians over the rounds."""

    prefix_tokens: int
    own_tokens: int
    rounds: int
    computed_tokens: tuple[int, int]
    """Prompt tokens that the first and the second request had to compute."""
    cpu_s: tuple[float, float]
    """To their first tokens."""


async def measure_prefix(
    engine: EmbeddedEngine,
    *,
    prefix_tokens: int,
    own_tokens: int,
    rounds: int,
    on_round: Callable[[int], None] = lambda _number: None,
) -> PrefixTimes:
    """Every round has a beginning of its own.

    Raises:
        EngineError: the engine cannot be started, or fails.

    Cancellation: the engine is stopped.
    """
    source = random.Random(0)  # noqa: S311  # the same prompts each time

    def tokens(count: int) -> list[int]:
        return [source.randrange(100, 30_000) for _ in range(count)]

    computed: list[list[int]] = [[], []]
    cpu_s: list[list[float]] = [[], []]
    async with EngineClient(engine=engine) as client:
        await _first_token(client, tokens(own_tokens))  # warm-up
        for number in range(1, rounds + 1):
            prefix = tokens(prefix_tokens)
            for place in range(2):
                num_computed, seconds = await _first_token(client, prefix + tokens(own_tokens))
                computed[place].append(num_computed)
                cpu_s[place].append(seconds)
            on_round(number)
    return PrefixTimes(
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        rounds=rounds,
        computed_tokens=(max(computed[0]), max(computed[1])),
        cpu_s=(statistics.median(cpu_s[0]), statistics.median(cpu_s[1])),
    )


async def _first_token(client: EngineClient, prompt: list[int]) -> tuple[int, float]:
    """How many prompt tokens were computed, and the processor time that it took, in s."""
    before_s = tree_cpu_s(os.getpid())
    stream = client.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    num_cached = max([output.num_cached_tokens async for output in stream])
    return len(prompt) - num_cached, tree_cpu_s(os.getpid()) - before_s
