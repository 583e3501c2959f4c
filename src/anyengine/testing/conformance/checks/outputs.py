"""OUT: what an engine says while and after it generates. Most of these judge all that was said since the start."""

from __future__ import annotations

from anyengine._wire import FinishReason
from anyengine.testing.conformance.engine_link import PROMPT, EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []


async def _some_traffic(link: EngineLink) -> None:
    requests = [link.add(max_tokens=1 + index) for index in range(4)]
    await link.finish(*requests)
    for client in range(len(link.ports.clients)):
        await link.fence(client)


@check("OUT-01", "outputs and replies are only for what was asked", "protocol.md §7")
async def no_strays(link: EngineLink) -> None:
    await _some_traffic(link)
    expect("messages that nobody asked for", link.evidence.strays, [])


@check("OUT-02", "nothing comes for a request after its finish reason", "protocol.md §7")
async def nothing_after_finish(link: EngineLink) -> None:
    await _some_traffic(link)
    expect("outputs after the last one", link.evidence.after_finish, [])


@check("OUT-03", "outputs come while a request runs, each with new tokens only", "protocol.md §7")
async def deltas(link: EngineLink) -> None:
    tracked = await link.generate(max_tokens=12)
    expect("outputs without a token or a finish reason", link.evidence.no_news, [])
    expect_that(len(tracked.outputs) > 1, "outputs for 12 tokens", expected="several", got="one")
    expect("tokens of all outputs", len(tracked.token_ids), 12)


@check("OUT-04", "timestamps never go back, replies to calls included", "protocol.md §7, §8")
async def timestamps(link: EngineLink) -> None:
    running = link.add(max_tokens=12)
    for _ in range(4):
        await link.call("get_supported_tasks")
    await link.finish(running)
    expect("timestamps that went back", link.evidence.time_went_back, [])


@check("OUT-05", "finish reasons are 0 to 4", "protocol.md §7")
async def finish_reasons(link: EngineLink) -> None:
    await _some_traffic(link)
    surplus = link.evidence.finish_reasons - set(FinishReason)
    expect("finish reasons unknown to the protocol", surplus, set())


@check("OUT-06", "a reply to a call comes alone", "protocol.md §7, utility_output")
async def replies_alone(link: EngineLink) -> None:
    running = link.add(max_tokens=12)
    await link.call("get_supported_tasks")
    await link.finish(running)
    expect("replies with something else in the message", link.evidence.mixed_replies, [])


@check("OUT-07", "statistics tell of running requests, and in the end that none are left", "protocol.md §7")
async def statistics(link: EngineLink) -> None:
    link.evidence.statistics.clear()
    requests = [link.add(max_tokens=24) for _ in range(3)]
    await link.finish(*requests)
    found = link.evidence.statistics
    if not found and not await _more_statistics(link):
        raise CheckSkipped("the engine sends no statistics")
    most = max(stats.num_running_reqs + stats.num_waiting_reqs for stats, _ in found)
    expect_that(1 <= most <= 3, "requests in the statistics", expected="1 to 3", got=most)
    await link.until(
        lambda: found[-1][1] == 0 and found[-1][0].num_running_reqs == found[-1][0].num_waiting_reqs == 0,
        "last statistics",
        got=lambda: f"{found[-1]}",
    )


async def _more_statistics(link: EngineLink) -> bool:
    await link.fence()
    return bool(link.evidence.statistics)


@check("OUT-08", "statistics make sense", "protocol.md §7")
async def statistics_values(link: EngineLink) -> None:
    await _some_traffic(link)
    if not link.evidence.statistics:
        raise CheckSkipped("the engine sends no statistics")
    for stats, _ in link.evidence.statistics:
        numbers = (stats.num_running_reqs, stats.num_waiting_reqs, stats.step_counter)
        expect_that(min(numbers) >= 0, "counts", expected="none negative", got=numbers)
        expect_that(0.0 <= stats.kv_cache_usage <= 1.0, "kv_cache_usage", expected="0 to 1", got=stats.kv_cache_usage)


@check("OUT-09", "prefill statistics come once, with the length of the prompt", "protocol.md §7", since=(0, 20, 0))
async def prefill_stats(link: EngineLink) -> None:
    tracked = await link.generate(max_tokens=5)
    found = [output.prefill_stats for output in tracked.outputs if output.prefill_stats is not None]
    if not found:
        raise CheckSkipped("the engine sends no prefill statistics")
    expect("number of prefill statistics", len(found), 1)
    stats = found[0]
    expect("num_prompt_tokens", stats.num_prompt_tokens, len(PROMPT))
    expect("computed and cached tokens", stats.num_computed_tokens + stats.num_cached_tokens, len(PROMPT))


@check("OUT-10", "events say queued, then scheduled, in the order of their times", "protocol.md §7")
async def events(link: EngineLink) -> None:
    tracked = await link.generate(max_tokens=5)
    found = [event for output in tracked.outputs for event in output.events or ()]
    if not found:
        raise CheckSkipped("the engine sends no events")
    expect("event types", [event.type for event in found], [1, 2])
    expect_that(
        found[0].timestamp <= found[1].timestamp, "event times", expected="in order", got=[e.timestamp for e in found]
    )


@check("OUT-11", "a finish reason has a stop reason only where a stop id was the cause", "protocol.md §7")
async def stop_reasons(link: EngineLink) -> None:
    tracked = await link.generate(max_tokens=3)
    expect("stop_reason with LENGTH", [output.stop_reason for output in tracked.outputs], [None] * len(tracked.outputs))


@check("OUT-12", "outputs name the version of the weights", "protocol.md §7", since=(0, 32, 0))
async def weight_version(link: EngineLink) -> None:
    if await link.failure_of("get_weight_version") is not None:
        raise CheckSkipped("the engine has no get_weight_version")
    version = await link.call("get_weight_version")
    link.evidence.weight_versions.clear()
    await link.generate()
    expect("weight_version of outputs", link.evidence.weight_versions, {version})


@check("OUT-13", "no log-probabilities, tensors or transfer data unless asked for", "protocol.md §7")
async def nothing_unasked(link: EngineLink) -> None:
    tracked = await link.generate()
    names = (
        "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output", "kv_transfer_params", "ec_transfer_params",
        "trace_headers", "routed_experts", "new_sampling_mask", "prompt_token_id_logprobs", "mm_cache_miss_hashes",
    )  # fmt: skip
    found = {name for output in tracked.outputs for name in names if getattr(output, name) is not None}
    expect("fields that are set", found, set())
