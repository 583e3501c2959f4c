"""STP: when a generation ends, and what is said of it.

A token that greedy decoding is known to yield stands for the end-of-sequence id, so no check needs to know the model.
"""

from __future__ import annotations

from typing import Any

from anyengine._wire import FinishReason, WireRepetitionDetection
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import expect, expect_that, skip_if_refused
from anyengine.testing.conformance.registry import check

__all__: list[str] = []

_FREE = 12


async def _landmark(link: EngineLink) -> tuple[list[int], int]:
    """The greedy tokens, and where in them the latest token stands that had not come before."""
    tokens = (await link.generate(max_tokens=_FREE)).token_ids
    return tokens, max(index for index, token_id in enumerate(tokens[:-1]) if token_id not in tokens[:index])


async def _ends(link: EngineLink, **sampling: Any) -> tuple[list[int], int | None, int | str | None]:
    tracked = await link.generate(max_tokens=sampling.pop("max_tokens", _FREE), **sampling)
    assert tracked.last is not None
    return tracked.token_ids, tracked.finish_reason, tracked.last.stop_reason


@check("STP-01", "max_tokens ends with LENGTH and exactly so many tokens", "protocol.md §7, finish reasons")
async def length(link: EngineLink) -> None:
    for max_tokens in (1, 2, 9):
        tokens, reason, stop_reason = await _ends(link, max_tokens=max_tokens)
        expect("tokens, reasons", (len(tokens), reason, stop_reason), (max_tokens, FinishReason.LENGTH, None))


@check("STP-02", "_eos_token_id ends with STOP, without a stop reason, and is in the output", "protocol.md §7")
async def eos(link: EngineLink) -> None:
    tokens, index = await _landmark(link)
    ended = await _ends(link, eos_token_id=tokens[index])
    expect("tokens, finish reason, stop reason", ended, (tokens[: index + 1], FinishReason.STOP, None))


@check("STP-03", "without _eos_token_id nothing but the limits ends a request", "protocol.md §12")
async def no_eos(link: EngineLink) -> None:
    tokens, index = await _landmark(link)
    ended = await _ends(link, ignore_eos=True, all_stop_token_ids={tokens[index]})
    expect("tokens, finish reason, stop reason", ended, (tokens, FinishReason.LENGTH, None))


@check("STP-04", "an id of stop_token_ids ends with STOP and is the stop reason", "protocol.md §7")
async def stop_token(link: EngineLink) -> None:
    tokens, index = await _landmark(link)
    ended = await _ends(link, stop_token_ids=[tokens[index]])
    expect("tokens, finish reason, stop reason", ended, (tokens[: index + 1], FinishReason.STOP, tokens[index]))


@check("STP-05", "eos counts before stop_token_ids", "protocol.md §7: checked in this order")
async def eos_first(link: EngineLink) -> None:
    tokens, index = await _landmark(link)
    ended = await _ends(link, eos_token_id=tokens[index], stop_token_ids=[tokens[index]])
    expect("tokens, finish reason, stop reason", ended, (tokens[: index + 1], FinishReason.STOP, None))


@check("STP-06", "a stop token that is also the last one allowed ends with STOP", "protocol.md §7")
async def stop_before_length(link: EngineLink) -> None:
    tokens, index = await _landmark(link)
    ended = await _ends(link, stop_token_ids=[tokens[index]], max_tokens=index + 1)
    expect("tokens, finish reason, stop reason", ended, (tokens[: index + 1], FinishReason.STOP, tokens[index]))


@check("STP-07", "min_tokens holds back eos", "protocol.md §12, _all_stop_token_ids")
async def min_tokens_eos(link: EngineLink) -> None:
    await _held_back(link, "eos")


@check("STP-08", "min_tokens holds back stop_token_ids", "protocol.md §12, _all_stop_token_ids")
async def min_tokens_stop(link: EngineLink) -> None:
    await _held_back(link, "stop")


async def _held_back(link: EngineLink, kind: str) -> None:
    tokens, _ = await _landmark(link)
    ending: dict[str, Any] = {"eos_token_id": tokens[0]} if kind == "eos" else {"stop_token_ids": [tokens[0]]}
    found, _, _ = await _ends(link, all_stop_token_ids={tokens[0]}, min_tokens=_FREE, **ending)
    expect("tokens", len(found), _FREE)


@check("STP-09", "repetition_detection ends with REPETITION", "protocol.md §7", since=(0, 17, 0))
async def repetition(link: EngineLink) -> None:
    detection = WireRepetitionDetection(max_pattern_size=1, min_pattern_size=1, min_count=3)
    tokens, reason, stop_reason = await _ends(link, allowed_token_ids=[5], repetition_detection=detection)
    skip_if_refused(reason, "repetition_detection")
    expect("reasons", (reason, stop_reason), (FinishReason.REPETITION, "repetition_detected"))
    expect_that(len(tokens) <= 4, "tokens", expected="at most 4 of 12", got=tokens)
