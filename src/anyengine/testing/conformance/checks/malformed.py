"""MAL: input that makes no sense, beside a request that does. A good engine refuses it and goes on.

What the protocol says of vLLM's engine cores (section 12) is in the table of known deviations. Destructive: whoever is
not good is deaf, mute or dead afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from anyengine._wire import FinishReason, WireLoRARequest, WirePoolingParams
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check
from anyengine.testing.conformance.traffic import TrackedRequest

__all__: list[str] = []

_SOURCE = "protocol.md §12"
_ADD, _ABORT, _WAVE, _UTILITY = b"\x00", b"\x01", b"\x02", b"\x03"


def _pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


async def _survives(link: EngineLink, act: Callable[[TrackedRequest], TrackedRequest | None]) -> None:
    """``act`` beside a running request, which it gets. Then that one goes on, another one and a call are answered, and
    the one that ``act`` returned is refused."""
    bystander = link.add([4, 6], max_tokens=40)
    await link.first_token(bystander)
    refused = act(bystander)
    another = await link.generate()
    await link.fence()
    await link.finish(bystander)
    expect("tokens of the running request", len(bystander.token_ids), 40)
    expect("tokens of the next request", len(another.token_ids), 4)
    if refused is not None:
        await link.finish(refused)
        expect("finish reason of the bad request", refused.finish_reason, FinishReason.ERROR)


def _frames(check_id: str, title: str, *frames: bytes) -> None:
    """A check that these frames do no harm."""

    @check(check_id, title, _SOURCE, destructive=True)
    async def harmless(link: EngineLink) -> None:
        await _survives(link, lambda bystander: link.send(*frames))


def _request(check_id: str, title: str, change: Callable[[EngineLink, list[Any]], None], *, told: bool = True) -> None:
    """A check that an ADD with changed positions does no harm, and (with ``told``) ends with ERROR."""

    @check(check_id, title, _SOURCE, destructive=True)
    async def harmless(link: EngineLink) -> None:
        def act(bystander: TrackedRequest) -> TrackedRequest | None:
            positions = link.raw_add(link.request())
            request_id = positions[0]
            change(link, positions)
            tracked = link.send_raw_add(request_id, positions)
            return tracked if told else None

        await _survives(link, act)


def _set_sampling(**values: Any) -> Callable[[EngineLink, list[Any]], None]:
    def change(link: EngineLink, positions: list[Any]) -> None:
        next(value for value in positions if isinstance(value, dict)).update(values)

    return change


def _set(position: int, value: Any) -> Callable[[EngineLink, list[Any]], None]:
    def change(link: EngineLink, positions: list[Any]) -> None:
        positions[position] = value

    return change


def _shorten(link: EngineLink, positions: list[Any]) -> None:
    del positions[3:]


def _too_long(link: EngineLink, positions: list[Any]) -> None:
    positions[1] = link.fill(link.max_model_len + 476)


_frames("MAL-01", "an unknown type byte", b"\x7f", _pack([]))
_frames("MAL-02", "an empty type frame", b"", _pack([]))
_frames("MAL-03", "a type without a payload", _ADD)
_frames("MAL-04", "an ADD that is no msgpack", _ADD, b"\xc1\xc1\xc1")
_request("MAL-05", "an ADD whose request id is an int", _set(0, 5), told=False)
_request("MAL-06", "an ADD with too few positions", _shorten)
_request("MAL-07", "an ADD with temperature -1", _set_sampling(temperature=-1.0))
_request("MAL-08", "an ADD with a tensor whose frame is missing", _set(9, ["float32", [1, 4], 1]))
_frames("MAL-09", "a UTILITY that has too few positions", _UTILITY, _pack([0, 1]))
_request("MAL-10", "an ADD with max_tokens 0", _set_sampling(max_tokens=0))


@check("MAL-11", "an ADD for a client that is not there", _SOURCE, destructive=True)
async def add_for_nobody(link: EngineLink) -> None:
    def act(bystander: TrackedRequest) -> None:
        request = link.request(client=57)
        link.send(*link.dialect.encode_add(request))

    await _survives(link, act)


_frames("MAL-12", "a UTILITY for a client that is not there", _UTILITY, _pack([57, 4711, "is_sleeping", []]))


@check("MAL-13", "a UTILITY whose result cannot be encoded", _SOURCE, destructive=True)
async def unencodable_result(link: EngineLink) -> None:
    if await link.failure_of("collective_rpc", "check_health") is not None:
        raise CheckSkipped("the engine has no collective_rpc")

    def act(bystander: TrackedRequest) -> None:
        link.call_nowait("collective_rpc", "get_kv_cache_spec")

    await _survives(link, act)


@check("MAL-14", "an ADD with the id of a running request", _SOURCE, destructive=True)
async def duplicate_id(link: EngineLink) -> None:
    def act(bystander: TrackedRequest) -> None:
        request = link.request(fields={"request_id": bystander.request_id})
        link.send(*link.dialect.encode_add(request), client=0)

    victim = link.add(max_tokens=link.max_model_len - 10)  # which of the two an ERROR means, nobody can tell
    await link.first_token(victim)
    act(victim)
    another = await link.generate()
    expect("tokens of the next request", len(another.token_ids), 4)


_request("MAL-15", "an ADD with an empty prompt", _set(1, []))
_request("MAL-16", "an ADD whose prompt is longer than the context", _too_long)
_request("MAL-17", "an ADD with a token id outside every vocabulary", _set(1, [1, 2_000_000_000]))


@check("MAL-18", "an ADD of a pooling task on a model that generates", _SOURCE, destructive=True)
async def pooling_on_generator(link: EngineLink) -> None:
    tasks = await link.call("get_supported_tasks")
    if "generate" not in tasks or "embed" in tasks:
        raise CheckSkipped(f"the engine offers {', '.join(tasks)}")

    def act(bystander: TrackedRequest) -> TrackedRequest:
        request = link.request()
        request.sampling_params, request.pooling_params = None, WirePoolingParams(task="embed", use_activation=True)
        return link.send_add(request.request_id, link.dialect.encode_add(request))

    await _survives(link, act)


_frames("MAL-19", "an ABORT that is an int", _ABORT, _pack(7))
_frames("MAL-20", "an ABORT that is nil", _ABORT, _pack(None))
_frames("MAL-21", "EXECUTOR_FAILED from the network", b"\x04", _pack(None))


@check("MAL-22", "an ABORT of ints, and one that is a bare string", _SOURCE, destructive=True)
async def odd_aborts(link: EngineLink) -> None:
    def act(bystander: TrackedRequest) -> None:
        link.send(_ABORT, _pack([1, 2, 3]))
        link.send(_ABORT, _pack("a bare string"))

    await _survives(link, act)


_frames("MAL-23", "WAKEUP from the network, with a payload", b"\x05", _pack(None))
_frames("MAL-24", "START_DP_WAVE to an engine without data parallelism", _WAVE, _pack([3, None]))


@check("MAL-25", "a UTILITY that names an attribute which is no method", _SOURCE, destructive=True)
async def no_method(link: EngineLink) -> None:
    for name in ("engine_index", "vllm_config", "__class__", "__init__"):
        call = await link.answer(link.call_nowait(name))
        assert call.reply is not None
        failure = call.reply.failure_message
        expect_that(failure is not None, name, expected="a failure reply", got=f"the result {call.reply.result!r}")


@check("MAL-26", "an ADD with a LoRA on an engine without LoRA", _SOURCE, destructive=True)
async def lora_on_base(link: EngineLink) -> None:
    if link.registration is not None and link.registration.supports_lora:
        raise CheckSkipped("the engine has LoRA support")
    tracked = await link.generate(fields={"lora_request": WireLoRARequest("absent", 1, "/no/such/adapter")})
    found = tracked.finish_reason
    got = f"finish reason {'length' if found == FinishReason.LENGTH else found}"
    expect_that(found == FinishReason.ERROR, "request", expected="ERROR, not an answer of the base model", got=got)


@check("MAL-27", "a UTILITY whose method is no text", _SOURCE, destructive=True)
async def method_is_no_text(link: EngineLink) -> None:
    call = link.call_nowait("placeholder", call_id=4711)
    link.send(_UTILITY, _pack([0, 4712, 5, []]))
    await link.answer(call)
    await _survives(link, lambda bystander: None)


_frames(
    "MAL-28", "a UTILITY with a pickle among its arguments", _UTILITY,
    _pack([0, 4713, "is_sleeping", [msgspec.msgpack.Ext(1, b"cos\nsystem\n(S'true'\ntR.")]]),
)  # fmt: skip


@check("MAL-29", "an ADD with bytes that are no UTF-8 where text should be", _SOURCE, destructive=True)
async def bad_utf8(link: EngineLink) -> None:
    request = link.request()
    payload = bytes(link.dialect.encode_add(request)[1]).replace(
        request.request_id.encode()[:5], b"\xff\xfe\xfd\xfc\xfb"
    )
    await _survives(link, lambda bystander: link.send(_ADD, payload))


@check("MAL-30", "an ADD nested beyond reason", _SOURCE, destructive=True)
async def nested(link: EngineLink) -> None:
    payload = b"\x91" * 100_000 + b"\xc0"
    await _survives(link, lambda bystander: link.send(_ADD, payload))
