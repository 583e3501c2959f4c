"""PFX: the prefix cache, where there is one: what it says, and what keeps prompts apart."""

from __future__ import annotations

import secrets
from typing import Any

from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check
from anyengine.testing.conformance.traffic import TrackedRequest

__all__: list[str] = []

_MAX_PROMPT_TOKENS = 2048


def _prompt(link: EngineLink) -> list[int]:
    """Two blocks and a bit that nobody has sent before."""
    block = link.registration.block_size if link.registration is not None else None
    size = 2 * (block or 128) + 5
    if size > min(_MAX_PROMPT_TOKENS, link.max_model_len - 10):
        raise CheckSkipped(f"blocks of {block} tokens leave no room for a prompt of two")
    return [1 + byte % 50 for byte in secrets.token_bytes(size)]


async def _cached(link: EngineLink, prompt: list[int], **options: Any) -> tuple[TrackedRequest, int]:
    tracked = await link.generate(prompt, **options)
    stats = next((output.prefill_stats for output in tracked.outputs if output.prefill_stats is not None), None)
    if stats is None:
        raise CheckSkipped("the engine sends no prefill statistics")
    return tracked, stats.num_cached_tokens


async def _warm(link: EngineLink) -> list[int]:
    """A prompt that is in the cache."""
    prompt = _prompt(link)
    await _cached(link, prompt)
    if (await _cached(link, prompt))[1] == 0:
        raise CheckSkipped("no token comes from a cache: prefix caching is off")
    return prompt


@check("PFX-01", "a prompt that was seen is taken from the cache, with the same answer", "protocol.md §7")
async def hit(link: EngineLink) -> None:
    prompt = _prompt(link)
    first, cold = await _cached(link, prompt)
    second, warm = await _cached(link, prompt)
    if warm == 0:
        raise CheckSkipped("no token comes from a cache: prefix caching is off")
    expect("cached tokens of a prompt nobody has sent", cold, 0)
    expect_that(0 < warm < len(prompt), "cached tokens", expected=f"1 to {len(prompt) - 1}", got=warm)
    expect("token ids", second.token_ids, first.token_ids)


@check("PFX-02", "reset_prefix_cache empties it", "protocol.md §8")
async def reset(link: EngineLink) -> None:
    prompt = await _warm(link)
    expect("reset_prefix_cache", await link.call("reset_prefix_cache"), True)
    expect("cached tokens afterwards", (await _cached(link, prompt))[1], 0)


@check("PFX-03", "a cache salt keeps equal prompts apart", "protocol.md §5; interop.md §7")
async def salt(link: EngineLink) -> None:
    prompt = await _warm(link)
    salted = {"fields": {"cache_salt": link.new_id()}}
    found = [(await _cached(link, prompt, **salted))[1] for _ in range(2)]
    expect_that(found[0] == 0 < found[1], "cached tokens with a new salt, twice", expected="none, then some", got=found)


@check("PFX-04", "skip_reading_prefix_cache computes the prompt anew", "protocol.md §5")
async def skip(link: EngineLink) -> None:
    prompt = await _warm(link)
    expect("cached tokens", (await _cached(link, prompt, skip_reading_prefix_cache=True))[1], 0)
