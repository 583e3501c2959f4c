"""ABT: an abort ends a request without a word, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from anyengine._wire import FinishReason
from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect
from anyengine.testing.conformance.registry import check
from anyengine.testing.conformance.traffic import TrackedRequest

__all__: list[str] = []


def _long(link: EngineLink, *, client: int = 0, seed: int = 0) -> TrackedRequest:
    """A request that is not over soon."""
    return link.add([3, 1 + seed % 17, 5], client=client, max_tokens=link.max_model_len - 3)


async def _aborted(link: EngineLink, act: Callable[[TrackedRequest], None], *, client: int = 0) -> None:
    """``act`` on a running request, wait for a fence; nothing may come from then on."""
    tracked = _long(link, client=client)
    await link.first_token(tracked)
    act(tracked)
    await link.fence(client)
    if tracked.last is not None and tracked.finish_reason == FinishReason.LENGTH:
        raise CheckSkipped("the engine was faster than the abort: the request had finished")
    await link.generate(client=client)  # whatever would have come has had its time
    await link.fence(client)
    expect("outputs after the abort", link.evidence.after_abort, [])
    expect("finish reason of an aborted request", tracked.finish_reason, None)


@check("ABT-01", "after an abort, no output comes: no last one either", "protocol.md §7: no output for the request")
async def abort_running(link: EngineLink) -> None:
    await _aborted(link, link.abort)


@check("ABT-02", "an abort of several ids ends all of them", "protocol.md §5")
async def abort_several(link: EngineLink) -> None:
    running = [_long(link, seed=index) for index in range(4)]
    await link.first_token(*running)

    def act(tracked: TrackedRequest) -> None:
        link.abort(tracked, *running)

    await _aborted(link, act)


@check("ABT-03", "unknown ids are ignored, also among known ones", "protocol.md §12")
async def abort_unknown(link: EngineLink) -> None:
    bystander = link.add(max_tokens=12)
    link.send(*link.dialect.encode_abort(["nobody", link.new_id(), ""]))

    def act(tracked: TrackedRequest) -> None:
        tracked.aborted = True
        link.send(*link.dialect.encode_abort(["nobody", tracked.request_id, "nobody"]))

    await _aborted(link, act)
    await link.finish(bystander)
    expect("tokens of another request", len(bystander.token_ids), 12)


@check("ABT-04", "an abort of nobody is nothing", "protocol.md §5")
async def abort_nobody(link: EngineLink) -> None:
    bystander = link.add(max_tokens=8)
    link.send(*link.dialect.encode_abort([]))
    await link.finish(bystander)
    expect("tokens of another request", len(bystander.token_ids), 8)


@check("ABT-05", "an abort of a finished request is ignored", "protocol.md §12")
async def abort_finished(link: EngineLink) -> None:
    tracked = await link.generate()
    link.send(*link.dialect.encode_abort([tracked.request_id]))
    await link.fence()
    expect("tokens of the next request", len((await link.generate()).token_ids), 4)


@check("ABT-06", "a second abort is ignored", "protocol.md §12")
async def abort_twice(link: EngineLink) -> None:
    def act(tracked: TrackedRequest) -> None:
        link.abort(tracked)
        link.abort(tracked)

    await _aborted(link, act)


@check("ABT-07", "a client may abort the request of another", "interop.md §5")
async def abort_by_another(link: EngineLink) -> None:
    tracked = _long(link, client=0)
    await link.first_token(tracked)
    link.send(*link.dialect.encode_abort([tracked.request_id]), client=1)
    await link.fence(1)
    await link.fence(0)
    length_so_far = len(tracked.outputs)
    await link.generate()
    expect("outputs after the abort", len(tracked.outputs), length_so_far)


@check("ABT-08", "an abort that follows its request at once ends it", "protocol.md §5: order is kept")
async def abort_at_once(link: EngineLink) -> None:
    requests = [_long(link, seed=index) for index in range(8)]
    link.abort(*requests)
    await link.fence()
    await link.generate()
    await link.fence()
    if any(tracked.finish_reason == FinishReason.LENGTH for tracked in requests):
        raise CheckSkipped("the engine was faster than the abort: a request had finished")
    expect("outputs after the abort", link.evidence.after_abort, [])


@check("ABT-09", "the others in the batch are not disturbed", "protocol.md §5")
async def batch_undisturbed(link: EngineLink) -> None:
    prompt = [6, 2, 9]
    alone = await link.generate(prompt, max_tokens=24)
    victims = [_long(link, seed=index) for index in range(6)]
    kept = link.add(prompt, max_tokens=24)
    await link.first_token(kept, *victims)
    for victim in victims:
        link.abort(victim)
    await link.finish(kept)
    expect("tokens of the request that stayed", kept.token_ids, alone.token_ids)


@check("ABT-10", "after a storm of aborts the engine holds no request", "protocol.md §12; a leak fills the engine")
async def storm(link: EngineLink) -> None:
    requests = []
    for index in range(64):
        requests.append(_long(link, client=index % 2, seed=index))
        if index % 3 == 0:
            link.abort(*requests[index // 2 :: 5])
    await link.first_token(*[item for item in requests[-4:] if not item.aborted])
    link.abort(*requests)
    for client in (0, 1):
        await link.fence(client)
    link.evidence.statistics.clear()
    await link.generate()
    await link.fence()
    expect("outputs after the abort", link.evidence.after_abort, [])
    for stats, _ in link.evidence.statistics:
        expect("waiting requests beside one", stats.num_waiting_reqs <= 1, True)
        expect("running requests beside one", stats.num_running_reqs <= 1, True)
    expect(
        "reset_prefix_cache, which works while no request holds a block", await link.call("reset_prefix_cache"), True
    )
