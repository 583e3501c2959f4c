"""Beam search over a model of three symbols: with enough beams it is what trying everything finds."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest
from recording_limiter import RecordingLimiter

from anyengine import (
    BeamSearchParams,
    EngineClient,
    Limiter,
    QuotaExceededError,
    RequestFailed,
    RequestRejected,
    TokenBuckets,
    TokenQuota,
)
from anyengine._process.task_child import TaskHost
from anyengine._transport.memory import MemoryLink
from anyengine.config import InMemoryEngine

pytestmark = pytest.mark.anyio

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
READY = {"max_model_len": 64, "num_gpu_blocks": 1, "block_size": 16, "dtype": "float32", "vllm_version": "0.33.0"}
EOS = 0
PROMPT = [1, 2]
WEIGHTS = {0: (1, 1, 1), 1: (1, 5, 3), 2: (4, 1, 6)}
"""How likely each of three symbols follows the last one."""


def logprob(before: Sequence[int], token: int) -> float:
    """Depends on the last two tokens, so that a greedy step can be wrong."""
    weights = WEIGHTS[before[-1]]
    bent = [weight * (1 + (before[-2] == token)) for weight in weights]
    return struct.unpack("<f", struct.pack("<f", math.log(bent[token] / sum(bent))))[0]


def serve(failing_at: int | None = None) -> InMemoryEngine:
    """An engine with that model: one token for each request, and the log-probabilities of as many as are asked for."""

    def rows(prompt: Sequence[int], k: int) -> list[Any]:
        ranked = sorted(range(3), key=lambda token: -logprob(prompt, token))[:k]
        ids, width = [ranked[0], *ranked], len(ranked) + 1
        ext = msgspec.msgpack.Ext
        return [
            ["int64", [1, width], ext(3, struct.pack(f"<{width}q", *ids))],
            ["float32", [1, width], ext(3, struct.pack(f"<{width}f", *(logprob(prompt, one) for one in ids)))],
            ["int64", [1], ext(3, struct.pack("<q", 1))],
            None,
        ]

    async def run(link: MemoryLink, rank: int, host: TaskHost) -> None:
        handshake = link.connect_handshake()
        handshake.send_nowait([pack({"status": "HELLO", "local": True, "headless": False})])
        await handshake.drain(1)
        inputs, outputs = link.connect_inputs(), link.connect_outputs()
        inputs.send_nowait([pack(READY)])
        handshake.send_nowait([pack({"status": "READY", "local": True, "headless": False})])
        served = 0
        while True:
            for kind, payload in await inputs.drain():
                message = unpack(payload)
                if kind == b"\x00":
                    served += 1
                    finish = 3 if served == failing_at else 1
                    scores = rows(message[1], message[3]["logprobs"])
                    outputs.send_nowait([pack([rank, [[message[0], [scores[0] and 1], scores, None, None, finish]]])])
                elif kind == b"\x03":
                    result = ["generate"] if message[2] == "get_supported_tasks" else False
                    outputs.send_nowait([pack([rank, [], None, 0.0, [message[1], None, [None, result]]])])

    return InMemoryEngine(serve=run)


def everything(max_tokens: int, penalty: float, *, ignore_eos: bool) -> list[tuple[list[int], float]]:
    """Every answer with its log-probability, best first."""
    found: list[tuple[tuple[int, ...], float, float]] = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(3), repeat=length):
            ends = tokens[-1] == EOS and not ignore_eos
            if (EOS in tokens[:-1] and not ignore_eos) or not (ends or length == max_tokens):
                continue
            total = sum(logprob([*PROMPT, *tokens[:at]], token) for at, token in enumerate(tokens))
            kept = tokens[:-1] if ends else tokens
            length_counted = len(PROMPT) + len(kept) - ((kept or PROMPT)[-1] == EOS)
            found.append((kept, total, total / length_counted**penalty))
    found.sort(key=lambda item: -item[2])
    return [(list(tokens), total) for tokens, total, _ in found]


async def search(
    params: BeamSearchParams, *, max_logprobs: int = 20, limiter: Limiter | None = None, **options: Any
) -> Any:
    with anyio.fail_after(30):
        async with EngineClient(engine=serve(**options), limiter=limiter, shutdown_grace_s=0) as client:
            limits = client.core.session.connection.limits
            limits[0] = msgspec.structs.replace(limits[0], max_logprobs=max_logprobs)
            client._entered_desk().builder.take_limits(limits[0])
            client._entered_desk().builder._eos_token_ids = (EOS,)  # there are no files to say so
            out = await client.beam_search(PROMPT, params, "label")
            await client.drain()
            assert client.stats().in_flight == 0
            return out


@pytest.mark.feature("C43", "R34")
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
async def test_with_enough_beams_it_finds_the_best_of_all(penalty: float, ignore_eos: bool) -> None:
    params = BeamSearchParams(beam_width=81, max_tokens=4, length_penalty=penalty, ignore_eos=ignore_eos)
    out = await search(params, max_logprobs=-1)
    expected = everything(4, penalty, ignore_eos=ignore_eos)[:81]
    assert len(out.outputs) == len(expected)
    for one, (_, total) in zip(out.outputs, expected, strict=True):
        assert one.cumulative_logprob == pytest.approx(total)
    found = {tuple(one.token_ids) for one in out.outputs}
    assert found == {tuple(tokens) for tokens, _ in expected}
    assert out.finished and out.prompt_token_ids == tuple(PROMPT) and out.request_id == "label"
    assert [one.index for one in out.outputs] == list(range(len(expected)))


@pytest.mark.feature("C43", "R34")
async def test_few_beams_keep_what_is_best_at_each_step() -> None:
    """The same by hand, for a width of two."""
    out = await search(BeamSearchParams(beam_width=2, max_tokens=3, include_stop_str_in_output=True))
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float, int]] = []
    for _ in range(3):
        grown = [([*ids, t], total + logprob([*PROMPT, *ids], t)) for ids, total in beams for t in range(3)]
        ended += [(ids, total, len(ids) - 1) for ids, total in grown if ids[-1] == EOS]
        beams = sorted((one for one in grown if one[0][-1] != EOS), key=lambda one: -one[1])[:2]
    ranked = [*ended, *((ids, total, len(ids)) for ids, total in beams)]
    ranked.sort(key=lambda one: -one[1] / (len(PROMPT) + one[2]))
    assert [one.token_ids for one in out.outputs] == [ids for ids, _, _ in ranked[:2]]
    for one in out.outputs:
        ended_early = one.token_ids[-1] == EOS
        assert (one.finish_reason, one.stop_reason) == (("stop", EOS) if ended_early else ("length", None))
        assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
        chosen = [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]  # type: ignore[index]
        assert sum(chosen) == pytest.approx(one.cumulative_logprob)


@pytest.mark.feature("R34")
async def test_the_model_s_length_ends_the_search() -> None:
    """And not the request that would exceed it: what was found is given."""
    out = await search(BeamSearchParams(beam_width=1, max_tokens=100, ignore_eos=True))
    assert (len(PROMPT) + len(out.token_ids), out.finish_reason) == (READY["max_model_len"], "length")


@pytest.mark.feature("R34")
async def test_what_goes_wrong_ends_the_search() -> None:
    with pytest.raises(RequestFailed):
        await search(BeamSearchParams(beam_width=3, max_tokens=4), failing_at=3)
    for bad in ({"beam_width": 0}, {"max_tokens": 0}, {"temperature": 3}, {"length_penalty": float("nan")}):
        with pytest.raises(RequestRejected):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **bad})
    with pytest.raises(RequestRejected, match="logprobs"):  # more than the engine allows
        await search(BeamSearchParams(beam_width=20, max_tokens=4))


@pytest.mark.feature("R58")
@pytest.mark.parametrize(("failing_at", "bill"), [(None, (2, 7)), (3, (2, 4))])
async def test_a_search_is_one_request_to_a_limiter(failing_at: int | None, bill: tuple[int, int]) -> None:
    """One step of one beam, and two of three; its prompt counts once."""
    limiter = RecordingLimiter()
    params = BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True)
    if failing_at is None:
        await search(params, limiter=limiter)
    else:
        with pytest.raises(RequestFailed):
            await search(params, limiter=limiter, failing_at=failing_at)
    assert limiter.bills() == [bill]
    (demand,) = limiter.reserved
    assert (demand.request_id, demand.prompt_tokens, demand.max_completion_tokens) == ("label", 2, 9)


@pytest.mark.feature("R58")
async def test_a_search_beyond_the_quota_is_refused_as_a_whole() -> None:
    buckets = TokenBuckets(TokenQuota(capacity_tokens=11, refill_tokens_per_s=0))
    await search(BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True), limiter=buckets)
    assert buckets.available_tokens(None) == 2
    with pytest.raises(QuotaExceededError, match=r"5 tokens \(2 of prompt, up to 3 of output\)"):
        await search(BeamSearchParams(beam_width=1, max_tokens=3), limiter=buckets)
    with pytest.raises(RequestRejected, match="waiting does not help"):
        await search(BeamSearchParams(beam_width=3, max_tokens=4), limiter=buckets)
