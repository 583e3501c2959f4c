"""What is done with a client, step by step: the coroutines that the cancellation explorer cancels.

Each begins and ends with nothing in flight, but for a neighbour that it does not know of. Which member of the client
one stands for is :mod:`operations`'s.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import anyio

from anyengine import EngineCoreClient, EngineDeadError, LoRARequest, PoolingParams, SamplingParams
from anyengine._wire import EngineCoreRequest, WireSamplingParams
from explorer import Case

__all__ = [
    "ADAPTER",
    "LONG",
    "SHORT",
    "abort",
    "abort_all",
    "answer_many",
    "close_from_inside",
    "close_the_core_from_inside",
    "complete",
    "core_session",
    "die_under_a_reader",
    "drain",
    "encode",
    "final",
    "follow_a_life",
    "generate_with_an_adapter",
    "give_up_a_call",
    "in_time",
    "leave_a_block_early",
    "leave_many_early",
    "paused",
    "pieces_of_text",
    "read_in_a_block",
    "read_to_the_end",
    "receive_outputs",
    "several_completions",
    "single_tokens",
    "sleeping",
    "start_a_stream",
    "submit_and_close",
    "two_at_once",
    "wait_dead",
    "wait_for_no_answer",
    "wait_for_what_does_not_come",
    "weight_update",
    "whole_session",
]

SHORT: Final = SamplingParams(max_tokens=3)
LONG: Final = SamplingParams(max_tokens=1_000_000)
ADAPTER: Final = LoRARequest("adapter", 1, "/adapter")

# ------------------------------------------------------------------------------------------------------------ streams


async def read_to_the_end(case: Case) -> None:
    async for _ in case.client.generate([1], SHORT):
        pass


async def read_in_a_block(case: Case) -> None:
    async with case.client.generate([1], SHORT) as stream:
        async for _ in stream:
            pass


async def leave_a_block_early(case: Case) -> None:
    async with case.client.generate([1], LONG) as stream:
        await anext(stream)


async def wait_for_what_does_not_come(case: Case) -> None:
    """The third token never comes; a sibling closes the stream in the end."""
    stream = await case.client.submit([1], LONG)
    async with anyio.create_task_group() as tasks:

        async def close() -> None:
            for _ in range(12):
                await anyio.lowlevel.checkpoint()
            stream.abort()

        tasks.start_soon(close)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close_nowait()


async def submit_and_close(case: Case) -> None:
    stream = await case.client.submit([1], LONG)
    await stream.aclose()


async def start_a_stream(case: Case) -> None:
    stream = case.client.generate([1], LONG)
    try:
        await stream.start()
    finally:
        stream.close_nowait()


async def two_at_once(case: Case) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_to_the_end, case)
        tasks.start_soon(leave_a_block_early, case)


async def generate_with_an_adapter(case: Case) -> None:
    async for _ in case.client.generate([1], SHORT, lora_request=ADAPTER):
        pass


async def encode(case: Case) -> None:
    await case.client.encode([1], PoolingParams(task="embed"))


async def abort(case: Case) -> None:
    stream = await case.client.submit([1], LONG, request_id="doomed")
    try:
        assert await case.client.abort(["doomed", "nobody's"]) == (stream.wire_id,)
        assert [out.finish_reason async for out in stream][-1] == "abort"
    finally:
        stream.close_nowait()


async def abort_all(case: Case) -> None:
    async with case.another() as client:
        stream = await client.submit([1], LONG)
        try:
            assert await client.abort_all() == (stream.wire_id,)
        finally:
            stream.close_nowait()


async def drain(case: Case) -> None:
    async with case.another() as client:
        stream = await client.submit([1], SHORT)
        try:
            await client.drain()
        finally:
            stream.close_nowait()


async def answer_many(case: Case, *, concurrency: int | None) -> None:
    async for _ in case.client.generate_many([[1], [2], [3]], SHORT, concurrency=concurrency):
        pass


async def leave_many_early(case: Case) -> None:
    params = [SHORT, LONG, LONG]
    async with case.client.generate_many([[1], [2], [3]], params) as group:
        assert (await anext(group))[0] == 0


async def several_completions(case: Case) -> None:
    async with case.client.generate([1], SamplingParams(max_tokens=3, n=3, temperature=1.0)) as stream:
        async for _ in stream:
            pass


async def final(case: Case) -> None:
    await case.client.generate([1], SHORT).final()


async def complete(case: Case) -> None:
    await case.client.complete([1], SHORT)


async def single_tokens(case: Case) -> None:
    async with case.client.generate([1], LONG).token_stream() as tokens:
        await anext(tokens)
        await tokens.aclose()


async def pieces_of_text(case: Case) -> None:
    """There are none without a tokenizer; the tokens are waited for all the same."""
    async with case.client.generate([1], SHORT).text_stream() as pieces:
        async for _ in pieces:
            pass


async def in_time(case: Case) -> None:
    async for _ in case.client.generate([1], SHORT, timeout_s=60, inter_token_timeout_s=60):
        pass


# ---------------------------------------------------------------------------------------------------- the whole client


async def whole_session(case: Case) -> None:
    async with case.another() as client:
        async with client.generate([1], LONG) as stream:
            await anext(stream)
        left_to_the_end = await client.submit([2], LONG)
        await anext(left_to_the_end)
        await client.core.utility("is_sleeping")
    left_to_the_end.close_nowait()


async def core_session(case: Case) -> None:
    async with EngineCoreClient(case.another().core.engines, liveness_timeout_s=None) as core:
        core.add(EngineCoreRequest(f"core-{id(core)}", [1], sampling_params=WireSamplingParams(max_tokens=3)))
        async for batch in core.outputs():
            if batch.outputs and batch.outputs[-1].finish_reason is not None:
                break


async def receive_outputs(case: Case) -> None:
    async with EngineCoreClient(case.another().core.engines, liveness_timeout_s=None) as core:
        core.add(EngineCoreRequest(f"core-{id(core)}", [1], sampling_params=WireSamplingParams(max_tokens=1)))
        await core.receive_outputs()


async def close_from_inside(case: Case) -> None:
    """One request ends within the limit, the other is aborted."""
    async with case.another() as client:
        short = await client.submit([1], SHORT)
        endless = await client.submit([1], LONG)
        await client.aclose(drain_timeout_s=0.01)
        for stream in (short, endless):
            stream.close_nowait()


async def close_the_core_from_inside(case: Case) -> None:
    async with EngineCoreClient(case.another().core.engines, liveness_timeout_s=None) as core:
        core.add(EngineCoreRequest(f"core-{id(core)}", [1], sampling_params=WireSamplingParams(max_tokens=1_000_000)))
        await core.aclose(drain_timeout_s=0)


async def wait_dead(case: Case, *, rank: int | None = None) -> None:
    async with case.another() as client, anyio.create_task_group() as tasks:

        async def kill() -> None:
            for _ in range(4):
                await anyio.lowlevel.checkpoint()
            client.core.session.engines[0].child.kill()

        tasks.start_soon(kill)
        error = await client.wait_dead(rank)
        assert isinstance(error, EngineDeadError)


async def die_under_a_reader(case: Case) -> None:
    async with case.another() as client:
        stream = await client.submit([1], LONG)
        await anext(stream)
        client.core.session.engines[0].child.kill()
        async for _ in stream:
            pass


async def wait_for_no_answer(case: Case) -> None:
    """A call that is never answered; the client is closed under it."""
    async with case.another() as client, anyio.create_task_group() as tasks:

        async def close() -> None:
            for _ in range(6):
                await anyio.lowlevel.checkpoint()
            client.core.session.close()

        tasks.start_soon(close)
        await client.core.utility("silence", unchecked=True)


async def give_up_a_call(case: Case) -> None:
    """A call that is never answered; a sibling cancels it, and nothing more is heard of it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(case.client.core.utility, "silence", unchecked=True))
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def follow_a_life(case: Case) -> None:
    """From before the block is entered until it has been left."""
    client = case.another()
    async with anyio.create_task_group() as tasks:

        async def live() -> None:
            async with client:
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(live)
        async for _ in client.events():
            pass


async def sleeping(case: Case) -> None:
    async with case.client.sleeping(1, "keep"):
        await case.client.is_sleeping()


async def weight_update(case: Case) -> None:
    """All the calls of new weights."""
    async with case.client.weight_update("v2"):
        await case.client.update_weights({"names": ["w"]})


async def paused(case: Case) -> None:
    async with case.client.paused("keep"):
        await case.client.is_paused()
