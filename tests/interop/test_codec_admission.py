"""Differential: whatever a caller puts wherever, it is refused, or vLLM's own decoder takes what would be sent.

An engine's input thread decodes without a safety net: one request that its decoder refuses, and it is deaf for
everybody. So our admission must be at least as strict; and not so strict that it refuses what is right.
"""

from __future__ import annotations

import copy
from functools import reduce
from typing import Any

import msgspec
import pytest
from spoilt_requests import acceptable, spoilt
from vllm_codec import VLLMCodec
from wire_strategies import ROUNDS, examples

import anyengine._wire as wire
from anyengine._protocol import Connection
from anyengine.exceptions import EncodeError, LocalProtocolError, RequestRejected


class Consumer:
    """Of requests that are never sent."""

    def push(self, output: Any) -> None:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        raise NotImplementedError

    def aborted(self) -> None:
        raise NotImplementedError


def clear(request: Any, path: str) -> bool:
    """Whether there was such a field of a struct to clear; not, if the struct stands where it should not."""
    *parts, name = path.split(".")
    part = reduce(getattr, parts, request)
    if not isinstance(part, msgspec.Struct):
        return False
    info = next(info for info in msgspec.structs.fields(part) if info.name == name)
    setattr(part, name, None if info.default is msgspec.NODEFAULT else info.default)
    return True


def attempt(request: Any, dialect: wire.Dialect) -> list[bytes] | Exception:
    """The frames behind the type of ``request``, or the refusal; without what the release has no place for."""
    connection = Connection({0: dialect}, call_id_prefix=1)
    request = copy.deepcopy(request)
    while True:
        try:
            _, *frames = connection.add(request, 0, Consumer())
            break
        except (RequestRejected, EncodeError, LocalProtocolError) as exc:
            assert len(connection.requests) == 0, "refused, and registered all the same"
            if not isinstance(exc, EncodeError) or "no such field" not in str(exc):
                return exc
            if not clear(request, str(exc.field)):
                return exc
    assert list(connection.requests.live) == [request.request_id]
    return [bytes(frame) for frame in frames]


@pytest.mark.parametrize("number", ROUNDS)
@pytest.mark.feature("R54")
@pytest.mark.case("K66")
def test_what_is_not_refused_decodes_in_vllm(vllm_codec: VLLMCodec, number: int) -> None:
    dialect = wire.dialect_for(vllm_codec.version)
    requests = examples(spoilt(), number, 1000)
    attempts = [attempt(request, dialect) for request in requests]
    sent = [(request, frames) for request, frames in zip(requests, attempts, strict=True) if isinstance(frames, list)]
    refused = [exc for exc in attempts if isinstance(exc, Exception)]
    assert len(sent) > 10 and len(refused) > 250  # both happen: 41 to 85 are sent, by what Hypothesis draws
    for exc in refused:
        if isinstance(exc, RequestRejected):
            assert exc.parameter and exc.remedy and exc.parameter.partition(".")[0].partition("[")[0] in str(exc)
    answers = vllm_codec.decode_requests([frames for _, frames in sent])
    wrong = [
        (len(frames[0]), answer["$refused"], request)
        for (request, frames), answer in zip(sent, answers, strict=True)
        if "$refused" in answer
    ]
    if wrong:
        _, why, request = min(wrong, key=lambda item: item[0])
        reasons = "\n".join(sorted({why for _, why, _ in wrong})[:20])
        pytest.fail(f"{len(wrong)} would have made vLLM deaf; the smallest:\n{why}\n{request}\nall reasons:\n{reasons}")


@pytest.mark.parametrize("number", ROUNDS)
def test_what_is_right_is_never_refused(number: int) -> None:
    refused = [
        (outcome, request)
        for request in examples(acceptable(), number, 500)
        if isinstance(outcome := attempt(request, wire.NEWEST), Exception)
    ]
    if refused:
        outcome, request = refused[0]
        pytest.fail(f"{len(refused)} were refused; the first: {outcome}\n{request}")
