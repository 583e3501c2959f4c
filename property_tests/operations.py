"""Everything that can be done with a client, as the cancellation explorer does it.

Owns one entry for each public asynchronous member of the public classes, found by introspection: what has no entry, and
cannot be called without arguments, fails a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import anyio

from anyengine import (
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    LoRARequest,
    PoolingParams,
    RequestGroup,
    RequestStream,
    SamplingParams,
)
from anyengine._client.events import ClientEvents
from anyengine._client.output_batches import OutputBatches
from anyengine._client.stream_views import TextStream, TokenStream
from anyengine._wire import EngineCoreRequest, WireSamplingParams
from explorer import Case, Operation

__all__ = ["CLASSES", "IN_PROCESSES", "OPERATIONS", "asynchronous_members", "covered", "missing"]

CLASSES: Final = (
    EngineClient,
    EngineCoreClient,
    RequestStream,
    RequestGroup,
    OutputBatches,
    ClientEvents,
    TextStream,
    TokenStream,
)
"""The clients, and everything that their synchronous methods hand out to be awaited or iterated."""

SYNCHRONOUS: Final = frozenset(
    {
        "EngineClient.chat",
        "EngineClient.check_admission",
        "EngineClient.debug_snapshot",
        "EngineClient.default_sampling_params",
        "EngineClient.events",
        "EngineClient.generate",
        "EngineClient.generate_many",
        "EngineClient.statistics",
        "EngineCoreClient.abort",
        "EngineCoreClient.add",
        "EngineCoreClient.debug_snapshot",
        "EngineCoreClient.events",
        "EngineCoreClient.outputs",
        "EngineCoreClient.put",
        "EngineCoreClient.statistics",
        "EngineCoreClient.usable_session",
        "EngineCoreClient.utility_arity",
        "RequestGroup.close_nowait",
        "RequestStream.abort",
        "RequestStream.close_nowait",
        "RequestStream.disown",
        "RequestStream.text_stream",
        "RequestStream.token_stream",
    }
)
"""Methods without an await. What a new one returns, if it can be awaited, belongs into ``CLASSES``."""

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


async def paused(case: Case) -> None:
    async with case.client.paused("keep"):
        await case.client.is_paused()


def call(name: str, *args: Any, **kwargs: Any) -> Callable[[Case], Awaitable[object]]:
    """A method of the client, or of its core (``core.utility``)."""

    async def run(case: Case) -> None:
        target: Any = case.client
        for part in name.split("."):
            target = getattr(target, part)
        await target(*args, **kwargs)

    return run


ENTRIES: Final[dict[str, list[Operation]]] = {
    "EngineClient.__aenter__": [
        Operation("enter, use and leave", whole_session, shielded=True),
        Operation("the engine dies under a reader", die_under_a_reader, shielded=True, errors=(EngineDeadError,)),
        Operation("a call that is never answered", wait_for_no_answer, shielded=True, errors=(ExceptionGroup,)),
    ],
    "EngineClient.__aexit__": [],  # with its __aenter__
    "EngineClient.abort": [Operation("abort", abort)],
    "EngineClient.abort_all": [Operation("abort_all", abort_all, shielded=True)],
    "EngineClient.drain": [Operation("drain", drain, shielded=True)],
    "EngineClient.aclose": [Operation("close from inside", close_from_inside, shielded=True)],
    "EngineClient.add_lora": [Operation("add_lora", call("add_lora", ADAPTER))],
    "EngineClient.collective_rpc": [Operation("collective_rpc", call("collective_rpc", "x"))],
    "EngineClient.complete": [Operation("complete", complete)],
    "EngineClient.encode": [Operation("encode", encode)],
    "EngineClient.pause_generation": [Operation("pause", call("pause_generation", mode="keep"), pauses=True)],
    "EngineClient.paused": [Operation("paused", paused, shielded=True)],
    "EngineClient.pin_lora": [Operation("pin_lora", call("pin_lora", 1))],
    "EngineClient.remove_lora": [Operation("remove_lora", call("remove_lora", 1))],
    "EngineClient.save_sharded_state": [Operation("save_sharded_state", call("save_sharded_state", "/x"))],
    "EngineClient.sleep": [Operation("sleep", call("sleep", 1, "keep"), pauses=True)],
    "EngineClient.submit": [Operation("submit and close", submit_and_close)],
    "EngineClient.update_weight_version": [Operation("update_weight_version", call("update_weight_version", "x"))],
    "EngineClient.wait_dead": [
        Operation("wait_dead", wait_dead, shielded=True),
        Operation("wait_dead of a rank", partial(wait_dead, rank=0), shielded=True),
    ],
    "EngineCoreClient.__aenter__": [Operation("a session of the core", core_session, shielded=True)],
    "EngineCoreClient.__aexit__": [],
    "EngineCoreClient.aclose": [
        Operation("close the core from inside", close_the_core_from_inside, shielded=True),
    ],
    "EngineCoreClient.receive_outputs": [Operation("receive_outputs", receive_outputs, shielded=True)],
    "EngineCoreClient.utility": [
        Operation("utility", call("core.utility", "is_sleeping")),
        Operation("give up a call", give_up_a_call, shielded=True),
    ],
    "EngineCoreClient.utility_on": [Operation("utility_on", call("core.utility_on", [0], "is_sleeping"))],
    "EngineCoreClient.utility_on_all": [Operation("utility_on_all", call("core.utility_on_all", "is_sleeping"))],
    "EngineCoreClient.wait_dead": [],  # the client's
    "EngineCoreClient.wait_room": [Operation("wait_room", call("core.wait_room"), immediate=True)],
    "RequestGroup.__aenter__": [Operation("leave many early", leave_many_early)],
    "RequestGroup.__aexit__": [],
    "RequestGroup.__anext__": [
        Operation("answer many", partial(answer_many, concurrency=None)),
        Operation("answer many, one by one", partial(answer_many, concurrency=1)),
    ],
    "RequestGroup.aclose": [],  # with __anext__, which closes
    "RequestStream.__aenter__": [
        Operation("read in a block", read_in_a_block),
        Operation("leave a block early", leave_a_block_early),
    ],
    "RequestStream.__aexit__": [],
    "RequestStream.__anext__": [
        Operation("read to the end", read_to_the_end),
        Operation("read in time", in_time),
        Operation("several completions", several_completions),
        Operation("wait for what does not come", wait_for_what_does_not_come, shielded=True),
        Operation("two at once", two_at_once, shielded=True),
        Operation("generate with an adapter", generate_with_an_adapter),
    ],
    "RequestStream.aclose": [],  # with submit
    "RequestStream.final": [Operation("final", final)],
    "TextStream.__aenter__": [Operation("pieces of text", pieces_of_text)],
    **{f"TextStream.{name}": [] for name in ("__aexit__", "__anext__", "aclose")},
    "TokenStream.__aenter__": [Operation("single tokens", single_tokens)],
    **{f"TokenStream.{name}": [] for name in ("__aexit__", "__anext__", "aclose")},
    "RequestStream.start": [Operation("start a stream", start_a_stream, immediate=True)],
    "ClientEvents.__anext__": [Operation("follow a life", follow_a_life, shielded=True)],
    "OutputBatches.__anext__": [],  # with a session of the core
}
"""By member; what is not here and needs no arguments is called as it is."""


def asynchronous_members() -> Iterator[tuple[str, Any]]:
    """Every public member of the public classes that can be cancelled: coroutines and context managers."""
    for owner in CLASSES:
        for name in dir(owner):
            member = inspect.getattr_static(owner, name)
            public = not name.startswith("_") or name in ("__aenter__", "__aexit__", "__anext__")
            manager = inspect.isasyncgenfunction(inspect.unwrap(member)) if callable(member) else False
            if public and (inspect.iscoroutinefunction(member) or manager):
                yield f"{owner.__name__}.{name}", member


def _needs_nothing(member: Any) -> bool:
    parameters = list(inspect.signature(member).parameters.values())[1:]
    return inspect.iscoroutinefunction(member) and all(
        one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters
    )


def covered() -> dict[str, list[Operation]]:
    """The entries by member."""
    found: dict[str, list[Operation]] = {}
    for name, member in asynchronous_members():
        if name in ENTRIES:
            found[name] = ENTRIES[name]
        elif name.startswith(("EngineClient.", "EngineCoreClient.")) and _needs_nothing(member):
            owner, _, method = name.partition(".")
            path = method if owner == "EngineClient" else f"core.{method}"
            found[name] = [Operation(name, call(path))]
    return found


def missing() -> list[str]:
    """Members that nobody explores or lists, and entries of members that there are not."""
    names = {name for name, _ in asynchronous_members()}
    functions = {
        f"{owner.__name__}.{name}"
        for owner in CLASSES
        for name in dir(owner)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(owner, name))
    }
    entries = {*ENTRIES, *SYNCHRONOUS}
    return sorted((names | functions) - entries - covered().keys() | (entries - names - functions))


IN_PROCESSES: Final = (
    "abort",
    "EngineClient.is_sleeping",
    "EngineClient.resume_generation",
    "enter, use and leave",
    "leave a block early",
    "paused",
    "read in a block",
    "read to the end",
    "submit and close",
    "two at once",
    "utility_on_all",
)
"""What is explored once more with processes behind ZeroMQ, where each step costs a thousand times as much."""

OPERATIONS: Final[list[Operation]] = [operation for entries in covered().values() for operation in entries]
