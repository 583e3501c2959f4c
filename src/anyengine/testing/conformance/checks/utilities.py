"""UTL: calls by name: results, failures, order, and the fence that a reply is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []


async def _result(link: EngineLink, method: str, *args: Any) -> Any:
    """The result of an optional method."""
    link.knows(method, args=len(args))
    if (failure := await link.failure_of(method, *args)) is not None:
        raise CheckSkipped(f"not offered: {failure:.100}")
    return await link.call(method, *args)


def _optional(check_id: str, method: str, what: str, fits: Callable[[Any], bool], *args: Any) -> None:
    """A check that ``method``, if the engine offers it, returns ``what``."""

    @check(check_id, f"{method} returns {what}", "protocol.md §8")
    async def returns(link: EngineLink) -> None:
        result = await _result(link, method, *args)
        expect_that(fits(result), f"result of {method}", expected=what, got=result)


@check("UTL-01", "get_supported_tasks returns an array of names", "protocol.md §8")
async def supported_tasks(link: EngineLink) -> None:
    tasks = await link.call("get_supported_tasks")
    fine = isinstance(tasks, list) and bool(tasks) and all(isinstance(task, str) for task in tasks)
    expect_that(fine, "result", expected="an array of str, not empty", got=tasks)


@check("UTL-02", "is_sleeping returns false while it is awake", "protocol.md §8")
async def is_sleeping(link: EngineLink) -> None:
    expect("is_sleeping", await link.call("is_sleeping"), False)


@check("UTL-03", "is_scheduler_paused returns false while it runs", "protocol.md §8", since=(0, 17, 0))
async def is_scheduler_paused(link: EngineLink) -> None:
    expect("is_scheduler_paused", await link.call("is_scheduler_paused"), False)


@check("UTL-04", "reset_prefix_cache returns true while it is idle", "protocol.md §8")
async def reset_prefix_cache(link: EngineLink) -> None:
    expect("reset_prefix_cache", await link.call("reset_prefix_cache"), True)


@check("UTL-05", "reset_mm_cache returns nil", "protocol.md §8")
async def reset_mm_cache(link: EngineLink) -> None:
    expect("reset_mm_cache", await link.call("reset_mm_cache"), None)


_optional("UTL-06", "reset_encoder_cache", "nil", lambda result: result is None)
_optional("UTL-07", "get_weight_version", "a str or nil", lambda result: result is None or isinstance(result, str))
_optional(
    "UTL-08",
    "compute_weight_checksums",
    "an array of maps from str to str",
    lambda result: (
        isinstance(result, list)
        and all(isinstance(text, str) for sums in result for item in sums.items() for text in item)
    ),
)
_optional(
    "UTL-09",
    "get_kv_cache_group_metadata",
    "an array of maps with group_idx, kind and block_size",
    lambda result: (
        isinstance(result, list) and all({"group_idx", "kind", "block_size"} <= set(item) for item in result)
    ),
)
_optional("UTL-10", "execute_dummy_batch", "nil", lambda result: result is None)
_optional(
    "UTL-11",
    "list_loras",
    "an array of ints",
    lambda result: isinstance(result, list) and all(type(item) is int for item in result),
)
_optional(
    "UTL-12",
    "collective_rpc",
    "an array with one nil for each worker",
    lambda result: isinstance(result, list) and bool(result) and all(item is None for item in result),
    "check_health",
)


@check("UTL-13", "set_weight_version is told by get_weight_version and by outputs", "protocol.md §8", since=(0, 32, 0))
async def set_weight_version(link: EngineLink) -> None:
    before = await _result(link, "get_weight_version")
    expect("set_weight_version", await link.call("set_weight_version", "checked"), None)
    link.evidence.weight_versions.clear()
    await link.generate()
    found = await link.call("get_weight_version"), link.evidence.weight_versions
    await link.call("set_weight_version", before)
    expect("get_weight_version, weight_version of outputs", found, ("checked", {"checked"}))


@check("UTL-14", "an unknown method is a failure reply that names it", "protocol.md §8, §12")
async def unknown_method(link: EngineLink) -> None:
    failure = await link.failure_of("no_such_method_at_all", 1, "x")
    expect_that(
        isinstance(failure, str) and "no_such_method_at_all" in failure,
        "failure message",
        expected="one that names no_such_method_at_all",
        got=failure,
    )


@check("UTL-15", "too many arguments are a failure reply", "protocol.md §8, §12")
async def too_many_arguments(link: EngineLink) -> None:
    for method in ("is_sleeping", "reset_prefix_cache"):
        failure = await link.failure_of(method, *range(9))
        expect_that(isinstance(failure, str), f"{method} with 9 arguments", expected="a failure message", got=failure)


@check("UTL-16", "an argument that makes no sense is a failure reply", "protocol.md §8, §12", since=(0, 17, 0))
async def bad_argument(link: EngineLink) -> None:
    failure = await link.failure_of("pause_scheduler", "sideways")
    expect_that(isinstance(failure, str), "pause_scheduler('sideways')", expected="a failure message", got=failure)
    expect("is_scheduler_paused", await link.call("is_scheduler_paused"), False)


@check("UTL-17", "a failed call leaves running requests alone", "protocol.md §8")
async def failure_alone(link: EngineLink) -> None:
    running = link.add(max_tokens=16)
    for _ in range(4):
        await link.failure_of("no_such_method_at_all")
    await link.finish(running)
    expect("tokens", len(running.token_ids), 16)


@check("UTL-18", "call ids come back as they were, up to 64 bits", "protocol.md §8")
async def call_ids(link: EngineLink) -> None:
    ids = [1, 127, 128, 65_535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1]
    calls = [link.call_nowait("is_sleeping", call_id=call_id) for call_id in ids]
    for call in calls:
        await link.answer(call)
    expect("call ids of the replies", [call.reply.call_id for call in calls if call.reply], ids)


@check("UTL-19", "replies come in the order of the calls", "protocol.md §8")
async def order(link: EngineLink) -> None:
    methods = ("is_sleeping", "get_supported_tasks", "no_such_method_at_all", "reset_mm_cache")
    calls = [link.call_nowait(methods[index % 4]) for index in range(32)]
    for call in calls:
        await link.answer(call)
    places = [call.order for call in calls]
    expect_that(places == sorted(places, key=lambda it: it or 0), "order", expected="as called", got=places)


@check("UTL-20", "a reply goes to the client that the call names", "protocol.md §8")
async def reply_socket(link: EngineLink) -> None:
    for client in range(len(link.ports.clients)):
        call = await link.answer(link.call_nowait("is_sleeping", client=client))
        expect("client that got the reply", call.reply_client, client)


@check("UTL-21", "calls are answered while requests run, and do not change them", "protocol.md §8")
async def while_running(link: EngineLink) -> None:
    alone = await link.generate(max_tokens=24)
    running = link.add(max_tokens=24)
    for _ in range(12):
        await link.call("is_sleeping")
    await link.finish(running)
    expect("token ids", running.token_ids, alone.token_ids)


@check("UTL-22", "a reply is a fence: what the engine made before it comes before it", "protocol.md §8")
async def fence(link: EngineLink) -> None:
    running = link.add(max_tokens=24)
    await link.first_token(running)
    await link.call("is_sleeping")
    seen = len(running.outputs)
    await link.finish(running)
    expect("timestamps that went back", link.evidence.time_went_back, [])
    expect_that(seen >= 1, "outputs before the reply", expected="at least one", got=seen)


@check("UTL-23", "an argument of a mebibyte is no problem", "protocol.md §1: no high-water mark")
async def large_argument(link: EngineLink) -> None:
    failure = await link.failure_of("no_such_method_at_all", "x" * (1 << 20))
    expect_that(isinstance(failure, str), "failure message", expected="a str", got=failure)


@check("UTL-24", "add, list, pin and remove of a LoRA that is not there fail or say no", "protocol.md §8")
async def absent_lora(link: EngineLink) -> None:
    if link.registration is None or not link.registration.supports_lora:
        raise CheckSkipped("the engine has no LoRA support")
    call = await link.answer(link.call_nowait("remove_lora", 4711))
    assert call.reply is not None
    expect_that(
        call.reply.failure_message is not None or call.reply.result is False,
        "remove_lora(4711)",
        expected="false or a failure",
        got=call.reply,
    )
