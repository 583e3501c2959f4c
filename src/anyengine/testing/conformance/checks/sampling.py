"""SMP: what sampling parameters do to the tokens. Checks use effects that hold for every model."""

from __future__ import annotations

from typing import Any

from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import expect, expect_that, skip_if_refused
from anyengine.testing.conformance.registry import check

__all__: list[str] = []


async def _tokens(link: EngineLink, feature: str, **sampling: Any) -> list[int]:
    tracked = await link.generate(max_tokens=sampling.pop("max_tokens", 6), **sampling)
    skip_if_refused(tracked.finish_reason, feature)
    return tracked.token_ids


@check("SMP-01", "the same seed gives the same tokens", "protocol.md §5")
async def same_seed(link: EngineLink) -> None:
    answers = [await _tokens(link, "seed", temperature=1.0, seed=17) for _ in range(3)]
    expect("tokens of the same seed", answers[1:], [answers[0]] * 2)


@check("SMP-02", "a seed gives the same tokens in a batch as alone", "protocol.md §5")
async def seed_in_batch(link: EngineLink) -> None:
    alone = [await _tokens(link, "seed", temperature=1.0, seed=seed) for seed in range(4)]
    together = [link.add(temperature=1.0, seed=seed, max_tokens=6) for seed in range(4)]
    await link.finish(*together)
    expect("tokens of the batch", [tracked.token_ids for tracked in together], alone)


@check("SMP-03", "different seeds give different tokens", "protocol.md §5")
async def other_seed(link: EngineLink) -> None:
    answers = {tuple(await _tokens(link, "seed", temperature=2.0, seed=seed, max_tokens=12)) for seed in range(8)}
    expect_that(len(answers) > 1, "answers of eight seeds", expected="at least two different ones", got=answers)


@check("SMP-04", "at temperature 0 the seed does not matter", "protocol.md §5")
async def greedy_seed(link: EngineLink) -> None:
    expect("tokens", await _tokens(link, "seed", seed=3), await _tokens(link, "greedy decoding"))


@check("SMP-05", "top_k=1 takes the likeliest token at any temperature", "protocol.md §5")
async def top_k(link: EngineLink) -> None:
    found = await _tokens(link, "top_k", temperature=1.0, top_k=1)
    expect("tokens", found, await _tokens(link, "greedy decoding"))


@check("SMP-06", "logit_bias makes a token certain", "protocol.md §5")
async def bias_up(link: EngineLink) -> None:
    greedy = await _tokens(link, "greedy decoding")
    wanted = next(token_id for token_id in range(3, 40) if token_id not in greedy)
    expect("tokens", await _tokens(link, "logit_bias", logit_bias={wanted: 100.0}), [wanted] * 6)


@check("SMP-07", "logit_bias makes a token impossible", "protocol.md §5")
async def bias_down(link: EngineLink) -> None:
    greedy = await _tokens(link, "greedy decoding")
    found = await _tokens(link, "logit_bias", logit_bias=dict.fromkeys(greedy, -100.0))
    expect("greedy tokens among those it was biased against", sorted(set(found) & set(greedy)), [])


@check("SMP-08", "allowed_token_ids allows no others", "protocol.md §5")
async def allowed(link: EngineLink) -> None:
    found = await _tokens(link, "allowed_token_ids", allowed_token_ids=[4, 6, 10], temperature=1.0, seed=1)
    expect("tokens other than 4, 6 and 10", sorted(set(found) - {4, 6, 10}), [])


@check("SMP-09", "_bad_words_token_ids keeps a word of one token out", "protocol.md §12")
async def bad_words(link: EngineLink) -> None:
    banned = (await _tokens(link, "greedy decoding"))[0]
    found = await _tokens(link, "_bad_words_token_ids", bad_words=["x"], bad_words_token_ids=[[banned]])
    expect_that(banned not in found, "tokens", expected=f"all but {banned}", got=found)


@check("SMP-10", "penalties and cut-offs within their ranges are taken", "protocol.md §12, ranges")
async def ranges(link: EngineLink) -> None:
    for sampling in (
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.3},
        {"temperature": 2.0, "top_p": 0.5, "min_p": 1.0, "top_k": -1, "seed": 1},
        {"temperature": 0.01, "top_p": 1.0, "min_p": 0.0, "top_k": 1},
    ):
        expect(f"tokens of {sampling}", len(await _tokens(link, "penalties", **sampling)), 6)
