"""LOD: many requests, many calls, large messages."""

from __future__ import annotations

from anyengine.testing.conformance.engine_link import EngineLink
from anyengine.testing.conformance.outcomes import CheckSkipped, expect, expect_that
from anyengine.testing.conformance.registry import check

__all__: list[str] = []

_MOST_REQUESTS = 600


@check("LOD-01", "64 requests at once each get their own answer", "protocol.md §5")
async def sixty_four(link: EngineLink) -> None:
    prompts = [[1 + index % 16, 2 + index // 16] for index in range(64)]
    requests = [link.add(prompt, client=index % 2, max_tokens=3 + index % 5) for index, prompt in enumerate(prompts)]
    await link.finish(*requests)
    expect("tokens", [len(item.token_ids) for item in requests], [3 + index % 5 for index in range(64)])
    alone = await link.generate(prompts[40], max_tokens=3)
    expect("token ids of number 40", requests[40].token_ids, alone.token_ids)


@check("LOD-02", "more requests than max_num_seqs: the others wait, and all finish", "protocol.md §4")
async def more_than_fit(link: EngineLink) -> None:
    limit = link.registration.max_num_seqs if link.registration is not None else None
    if limit is None or limit + 8 > _MOST_REQUESTS:
        raise CheckSkipped(f"max_num_seqs is {limit}: this check starts {_MOST_REQUESTS} requests at most")
    link.evidence.statistics.clear()
    requests = [link.add([2, 1 + index % 17], max_tokens=3) for index in range(limit + 8)]
    await link.finish(*requests)
    expect("tokens", {len(tracked.token_ids) for tracked in requests}, {3})
    running = [stats.num_running_reqs for stats, _ in link.evidence.statistics]
    expect_that(
        max(running, default=0) <= limit, "running requests", expected=f"at most {limit}", got=max(running, default=0)
    )


@check("LOD-03", "a short request joins and leaves while a long one runs", "continuous batching")
async def joins_and_leaves(link: EngineLink) -> None:
    long = link.add([4, 2], max_tokens=link.max_model_len - 2)
    await link.first_token(long)
    short = await link.generate(max_tokens=2)
    if long.last is not None:
        raise CheckSkipped("the engine was faster than this check: the long request had finished")
    expect("tokens of the short one", len(short.token_ids), 2)


@check("LOD-04", "500 calls at once are all answered", "protocol.md §8")
async def many_calls(link: EngineLink) -> None:
    calls = [link.call_nowait("is_sleeping", client=index % 2) for index in range(500)]
    for call in calls:
        await link.answer(call)
    expect("failures", [call.reply.failure_message for call in calls if call.reply and call.reply.failure_message], [])


@check("LOD-05", "a large message is taken and answered as a small one", "protocol.md §1")
async def large_message(link: EngineLink) -> None:
    headers = {"baggage": "x" * (1 << 18)}
    tracked = await link.generate(fields={"trace_headers": headers})
    expect("tokens", len(tracked.token_ids), 4)


@check("LOD-06", "requests of both clients run side by side", "interop.md §5")
async def both_clients(link: EngineLink) -> None:
    requests = [link.add(client=client, max_tokens=12) for client in (0, 1) for _ in range(4)]
    await link.finish(*requests)
    expect("output sockets", [tracked.clients for tracked in requests], [{0}] * 4 + [{1}] * 4)
