"""PAU: pause and resume in all modes, sleep and wake-up."""

from __future__ import annotations

from anyengine._wire import FinishReason
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []

_SINCE = (0, 17, 0)


async def _pause(link: EngineLink, mode: str, *args: bool) -> None:
    link.paused = True
    expect(f"result of pause_scheduler({mode!r})", await link.call("pause_scheduler", mode, *args), None)


async def _resume(link: EngineLink) -> None:
    link.paused = False
    expect("result of resume_scheduler", await link.call("resume_scheduler"), None)


@check("PAU-01", "is_scheduler_paused and is_sleeping say so while it is paused", "protocol.md §8", since=_SINCE)
async def says_so(link: EngineLink) -> None:
    await _pause(link, "abort")
    paused = await link.call("is_scheduler_paused"), await link.call("is_sleeping")
    await _resume(link)
    resumed = await link.call("is_scheduler_paused"), await link.call("is_sleeping")
    expect("paused, then resumed", (paused, resumed), ((True, True), (False, False)))


@check("PAU-02", "mode abort ends every request with ABORT before its own reply", "interop.md §1", since=_SINCE)
async def mode_abort(link: EngineLink) -> None:
    running = [link.add(max_tokens=link.max_model_len - 10) for _ in range(3)]
    await link.first_token(*running)
    await _pause(link, "abort")
    reasons = [tracked.finish_reason for tracked in running]
    await _resume(link)
    if FinishReason.LENGTH in reasons:
        raise CheckSkipped("the engine was faster than the pause: a request had finished")
    expect("finish reasons when the reply is there", reasons, [FinishReason.ABORT] * 3)


@check("PAU-03", "mode wait lets running requests finish before its own reply", "protocol.md §8", since=_SINCE)
async def mode_wait(link: EngineLink) -> None:
    running = [link.add(max_tokens=16) for _ in range(3)]
    await link.first_token(*running)
    await _pause(link, "wait")
    found = [(tracked.finish_reason, len(tracked.token_ids)) for tracked in running]
    await _resume(link)
    expect("finish reasons and tokens when the reply is there", found, [(FinishReason.LENGTH, 16)] * 3)


@check("PAU-04", "mode keep freezes requests; they go on with the same tokens", "protocol.md §8", since=_SINCE)
async def mode_keep(link: EngineLink) -> None:
    alone = await link.generate(max_tokens=64)
    running = link.add(max_tokens=64)
    await link.first_token(running)
    await _pause(link, "keep", False)
    frozen = len(running.outputs)
    for _ in range(20):
        await link.call("is_scheduler_paused")
    still = len(running.outputs)
    await _resume(link)
    await link.finish(running)
    expect("outputs while it was paused", still - frozen, 0)
    expect("token ids", running.token_ids, alone.token_ids)


@check("PAU-05", "requests that come while it is paused wait, and run when it resumes", "interop.md §7", since=_SINCE)
async def added_while_paused(link: EngineLink) -> None:
    await _pause(link, "abort")
    waiting = [link.add() for _ in range(3)]
    for _ in range(5):
        await link.call("is_scheduler_paused")
    early = [len(tracked.outputs) for tracked in waiting]
    await _resume(link)
    await link.finish(*waiting)
    expect("outputs while it was paused", early, [0, 0, 0])
    expect("tokens", [len(tracked.token_ids) for tracked in waiting], [4, 4, 4])


@check("PAU-06", "a waiting request can be aborted", "protocol.md §5", since=_SINCE)
async def abort_waiting(link: EngineLink) -> None:
    await _pause(link, "abort")
    doomed, kept = link.add(), link.add()
    link.abort(doomed)
    await link.fence()
    await _resume(link)
    await link.finish(kept)
    await link.fence()
    expect("outputs of the aborted one", len(doomed.outputs), 0)


@check("PAU-07", "a frozen request can be aborted", "protocol.md §5", since=_SINCE)
async def abort_frozen(link: EngineLink) -> None:
    doomed, kept = link.add(max_tokens=link.max_model_len - 10), link.add(max_tokens=40)
    await link.first_token(doomed, kept)
    await _pause(link, "keep", False)
    if doomed.last is not None:
        raise CheckSkipped("the engine was faster than the pause: the request had finished")
    link.abort(doomed)
    await link.fence()
    frozen = len(doomed.outputs)
    await _resume(link)
    await link.finish(kept)
    expect("outputs after the abort", len(doomed.outputs) - frozen, 0)
    expect("tokens of the other", len(kept.token_ids), 40)


@check("PAU-08", "a second pause, and a resume of what is not paused, do no harm", "protocol.md §8", since=_SINCE)
async def twice(link: EngineLink) -> None:
    await _pause(link, "abort")
    await _pause(link, "keep")
    await _resume(link)
    await _resume(link)
    expect("tokens of the next request", len((await link.generate()).token_ids), 4)


@check("PAU-09", "sleep at level 0 and wake_up of the scheduling", "protocol.md §8", since=_SINCE)
async def sleep_level_0(link: EngineLink) -> None:
    if (failure := await link.failure_of("sleep", 0)) is not None:
        raise CheckSkipped(f"not offered: {failure:.100}")
    link.paused = True
    asleep = await link.call("is_sleeping")
    woken = await link.call("wake_up", ["scheduling"])
    link.paused = False
    found = asleep, woken, await link.call("is_sleeping")
    expect("is_sleeping, wake_up, is_sleeping", found, (True, True, False))
    expect("tokens of the next request", len((await link.generate()).token_ids), 4)


@check("PAU-10", "sleep at level 1 and wake_up: the same tokens afterwards", "protocol.md §8", since=_SINCE)
async def sleep_level_1(link: EngineLink) -> None:
    before = await link.generate(max_tokens=8)
    if (failure := await link.failure_of("sleep", 1)) is not None:
        raise CheckSkipped(f"not offered: {failure:.100}")
    link.paused = True
    asleep = await link.call("is_sleeping")
    woken = await link.call("wake_up")
    link.paused = False
    expect("is_sleeping, wake_up", (asleep, woken), (True, True))
    expect("token ids", (await link.generate(max_tokens=8)).token_ids, before.token_ids)


@check("PAU-11", "pause_generation refuses what comes while it is paused", "vLLM 0.33", since=(0, 33, 0))
async def pause_generation(link: EngineLink) -> None:
    if (failure := await link.failure_of("pause_generation")) is not None:
        raise CheckSkipped(f"not offered: {failure:.100}")
    link.paused = True
    refused = await link.generate()
    await _resume(link)
    error = refused.last.error if refused.last else None
    expect("finish reason", refused.finish_reason, FinishReason.ERROR)
    expect_that(error is not None and error.retryable, "error", expected="one that is retryable", got=error)
