"""LGP: log-probabilities, where the engine offers them: shapes, the sampled token first, the prompt's once."""

from __future__ import annotations

import struct
from array import array
from typing import Any

from anyengine._wire import Tensor
from anyengine.testing.conformance.engine_link import PROMPT, EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that, skip_if_refused
from anyengine.testing.conformance.registry import check
from anyengine.testing.conformance.traffic import TrackedRequest

__all__: list[str] = []

_FORMATS = {
    "<i4": "i", "int32": "i", "<i8": "q", "int64": "q", "<f4": "f", "float32": "f", "<f8": "d", "float64": "d",
    "<u4": "I", "<u8": "Q", "<f2": "e", "float16": "e", "|b1": "?", "bool": "?",
}  # fmt: skip


def values(tensor: Tensor) -> list[Any]:
    """The numbers of ``tensor``, row after row; without numpy, which the checker does not need."""
    data = bytes(tensor.data)
    if tensor.dtype == "bfloat16":
        data, format_ = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2)), "f"
    elif (format_ := _FORMATS.get(tensor.dtype, "")) == "":
        raise CheckSkipped(f"tensors of {tensor.dtype} are beyond this check")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(format_)}{format_}", data))


def rows(tensor: Tensor) -> list[list[Any]]:
    """A matrix as rows."""
    expect("dimensions of a matrix", len(tensor.shape), 2)
    flat, width = values(tensor), tensor.shape[1]
    return [flat[at : at + width] for at in range(0, len(flat), width)]


async def _asked(link: EngineLink, feature: str, **sampling: Any) -> TrackedRequest:
    tracked = await link.generate(max_tokens=5, **sampling)
    skip_if_refused(tracked.finish_reason, feature)
    return tracked


@check("LGP-01", "logprobs: a row for each token, the sampled one first, then k others", "protocol.md §7")
async def shapes(link: EngineLink) -> None:
    for k in (0, 3):
        tracked = await _asked(link, "logprobs", logprobs=k)
        for output in tracked.outputs:
            count, found = len(output.new_token_ids), output.new_logprobs
            expect_that(found is not None, "new_logprobs", expected="present in every output", got=None)
            assert found is not None
            shape = found.logprob_token_ids.shape, found.logprobs.shape, found.sampled_token_ranks.shape
            expect("shapes of ids, values, ranks", shape, ((count, k + 1), (count, k + 1), (count,)))
            expect("column 0", [row[0] for row in rows(found.logprob_token_ids)], output.new_token_ids)


@check("LGP-02", "the k likeliest come in order, and greedy takes the first", "protocol.md §7")
async def order(link: EngineLink) -> None:
    tracked = await _asked(link, "logprobs", logprobs=3)
    for output in tracked.outputs:
        if output.new_logprobs is None:
            continue
        for ids, logs in zip(
            rows(output.new_logprobs.logprob_token_ids), rows(output.new_logprobs.logprobs), strict=True
        ):
            expect_that(logs[1:] == sorted(logs[1:], reverse=True), "values", expected="falling", got=logs)
            expect_that(max(logs) <= 1e-6, "values", expected="at most 0", got=logs)
            expect_that(ids[0] == ids[1] or logs[0] == logs[1], "ids", expected="the sampled one is first", got=ids)
        expect("rank of a greedy token", set(values(output.new_logprobs.sampled_token_ranks)), {1})


@check("LGP-03", "asking for log-probabilities does not change the tokens", "protocol.md §5")
async def unchanged(link: EngineLink) -> None:
    asked = await _asked(link, "logprobs", logprobs=2)
    expect("token ids", asked.token_ids, (await link.generate(max_tokens=5)).token_ids)


@check("LGP-04", "prompt_logprobs come once, from the second prompt token on", "protocol.md §7")
async def prompt(link: EngineLink) -> None:
    tracked = await _asked(link, "prompt_logprobs", prompt_logprobs=2, skip_reading_prefix_cache=True)
    found = [part for output in tracked.outputs if (part := output.new_prompt_logprobs_tensors) is not None]
    expect("outputs with prompt log-probabilities", len(found), 1)
    expect("shape", found[0].logprob_token_ids.shape, (len(PROMPT) - 1, 3))
    expect("column 0", [row[0] for row in rows(found[0].logprob_token_ids)], list(PROMPT[1:]))


@check("LGP-05", "logprobs -1: the whole vocabulary, probabilities that add up to one", "protocol.md §7")
async def whole_vocabulary(link: EngineLink) -> None:
    tracked = await link.generate(max_tokens=1, logprobs=-1)
    skip_if_refused(tracked.finish_reason, "logprobs=-1")
    (output,) = tracked.outputs
    assert output.new_logprobs is not None
    (logs,) = rows(output.new_logprobs.logprobs)
    total = sum(2.718281828459045**value for value in logs[1:])
    expect_that(abs(total - 1.0) < 1e-3, "sum of all probabilities", expected="1", got=total)


@check("LGP-06", "logprob_token_ids: values of the tokens that were named", "protocol.md §5", since=(0, 20, 0))
async def named_tokens(link: EngineLink) -> None:
    tracked = await _asked(link, "logprob_token_ids", logprob_token_ids=[4, 9])
    for output in tracked.outputs:
        assert output.new_logprobs is not None
        for ids in rows(output.new_logprobs.logprob_token_ids):
            expect_that({4, 9} <= set(ids), "ids", expected="4 and 9 among them", got=ids)


@check("LGP-07", "prompt_logprob_token_ids: a row for each position, padded ids without probability", "protocol.md §7")
async def named_prompt_tokens(link: EngineLink) -> None:
    if link.release < (0, 32, 0):
        raise CheckSkipped("no such parameter in this release")
    start = 1
    ids = [[token, -1, PROMPT[0]] for token in PROMPT[start + 1 :]]
    packed = array("i", [token for row in ids for token in row]).tobytes()
    tracked = await _asked(
        link,
        "prompt_logprob_token_ids",
        prompt_logprobs=0,
        prompt_logprob_start=start,
        prompt_logprob_token_ids=Tensor("<i4", (len(ids), 3), packed),
        skip_reading_prefix_cache=True,
    )
    found = [part for output in tracked.outputs if (part := output.prompt_token_id_logprobs) is not None]
    if not found:
        raise CheckSkipped("this model runner knows no such scores")
    expect("outputs with scores of named tokens", len(found), 1)
    scores = rows(found[0])
    expect("scores of padding", {row[1] for row in scores}, {float("-inf")})
    ranked = [tensors for output in tracked.outputs if (tensors := output.new_prompt_logprobs_tensors) is not None]
    own = [row[0] for row in rows(ranked[0].logprobs)][start:]
    got = [row[0] for row in scores]
    same = len(got) == len(own) and all(abs(a - b) < 1e-3 for a, b in zip(got, own, strict=True))
    expect_that(same, "scores of the prompt's own tokens", expected=str(own), got=got)
