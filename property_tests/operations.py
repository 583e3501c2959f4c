"""Everything that can be done with a client, as the cancellation explorer does it.

Owns one entry for each public asynchronous member of the public classes, found by introspection: what has no entry, and
cannot be called without arguments, fails a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

import operation_steps as steps
from anyengine import (
    EngineClient,
    EngineCoreClient,
    EngineDeadError,
    RequestGroup,
    RequestStream,
)
from anyengine._client.engines.kv_events import KVEventStream
from anyengine._client.requests.output_batches import OutputBatches
from anyengine._client.requests.stream_views import TextStream, TokenStream
from anyengine._client.session.events import ClientEvents
from explorer import Case, Operation

__all__ = ["CLASSES", "IN_PROCESSES", "OPERATIONS", "asynchronous_members", "covered", "missing"]

CLASSES: Final = (
    EngineClient,
    EngineCoreClient,
    RequestStream,
    RequestGroup,
    OutputBatches,
    ClientEvents,
    KVEventStream,
    TextStream,
    TokenStream,
)
"""The clients, and everything that their synchronous methods hand out to be awaited or iterated."""

SYNCHRONOUS: Final = frozenset(
    {
        "ClientEvents.next_nowait",
        "EngineClient.chat",
        "EngineClient.check_admission",
        "EngineClient.debug_snapshot",
        "EngineClient.default_sampling_params",
        "EngineClient.events",
        "EngineClient.generate",
        "EngineClient.generate_many",
        "EngineClient.get_kv_event_sources",
        "EngineClient.input_session",
        "EngineClient.kv_events",
        "EngineClient.statistics",
        "EngineClient.stats",
        "EngineCoreClient.abort",
        "EngineCoreClient.add",
        "EngineCoreClient.add_part",
        "EngineCoreClient.debug_snapshot",
        "EngineCoreClient.events",
        "EngineCoreClient.get_kv_event_sources",
        "EngineCoreClient.kv_events",
        "EngineCoreClient.outputs",
        "EngineCoreClient.put",
        "EngineCoreClient.statistics",
        "EngineCoreClient.tell",
        "EngineCoreClient.usable_session",
        "EngineCoreClient.utility_arity",
        "KVEventStream.close_nowait",
        "RequestGroup.close_nowait",
        "RequestStream.abort",
        "RequestStream.close_nowait",
        "RequestStream.disown",
        "RequestStream.give_up",
        "RequestStream.parsed",
        "RequestStream.text_stream",
        "RequestStream.token_stream",
    }
)
"""Methods without an await. What a new one returns, if it can be awaited, belongs into ``CLASSES``."""


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
        Operation("enter, use and leave", steps.whole_session, shielded=True),
        Operation("the engine dies under a reader", steps.die_under_a_reader, shielded=True, errors=(EngineDeadError,)),
        Operation("a call that is never answered", steps.wait_for_no_answer, shielded=True, errors=(ExceptionGroup,)),
    ],
    "EngineClient.__aexit__": [],  # with its __aenter__
    "EngineClient.abort": [Operation("abort", steps.abort)],
    "EngineClient.abort_all": [Operation("abort_all", steps.abort_all, shielded=True)],
    "EngineClient.drain": [Operation("drain", steps.drain, shielded=True)],
    "EngineClient.aclose": [Operation("close from inside", steps.close_from_inside, shielded=True)],
    "EngineClient.add_lora": [Operation("add_lora", call("add_lora", steps.ADAPTER))],
    "EngineClient.beam_search": [],  # with the groups of requests, whose rounds it is made of
    "EngineClient.classify": [Operation("classify", call("classify", [1]))],
    "EngineClient.collective_rpc": [Operation("collective_rpc", call("collective_rpc", "x"))],
    "EngineClient.complete": [Operation("complete", steps.complete)],
    "EngineClient.embed": [Operation("embed", call("embed", [1]))],
    "EngineClient.encode": [Operation("encode", steps.encode)],
    "EngineClient.get_status": [Operation("get_status", call("get_status"), immediate=True)],
    "EngineClient.handle_fault": [],  # a utility call, to engines that were started for it
    "EngineClient.init_weight_transfer_engine": [],  # a collective_rpc, as are those below
    "EngineClient.is_tracing_enabled": [
        Operation("is_tracing_enabled", call("is_tracing_enabled"), immediate=True),
    ],
    "EngineClient.notify_kv_transfer_request_rejected": [],  # in the place of an abort, which is no wait
    "EngineClient.pause_generation": [Operation("pause", call("pause_generation", mode="keep"), pauses=True)],
    "EngineClient.paused": [Operation("paused", steps.paused, shielded=True)],
    "EngineClient.pin_lora": [Operation("pin_lora", call("pin_lora", 1))],
    "EngineClient.rerank": [],  # with its scores
    "EngineClient.score": [Operation("score", call("score", [1], [[2], [3]]))],
    "EngineClient.remove_lora": [Operation("remove_lora", call("remove_lora", 1))],
    "EngineClient.save_sharded_state": [Operation("save_sharded_state", call("save_sharded_state", "/x"))],
    "EngineClient.sleep": [Operation("sleep", call("sleep", 1, "keep"), pauses=True)],
    "EngineClient.sleeping": [Operation("sleeping", steps.sleeping, shielded=True)],
    "EngineClient.tokenize": [Operation("tokenize", call("tokenize", [1]), immediate=True)],
    "EngineClient.submit": [Operation("submit and close", steps.submit_and_close)],
    "EngineClient.update_weight_version": [Operation("update_weight_version", call("update_weight_version", "x"))],
    "EngineClient.update_weights": [],
    "EngineClient.weight_update": [Operation("weight_update", steps.weight_update)],
    "EngineClient.wait_dead": [
        Operation("wait_dead", steps.wait_dead, shielded=True),
        Operation("wait_dead of a rank", partial(steps.wait_dead, rank=0), shielded=True),
    ],
    "EngineCoreClient.__aenter__": [Operation("a session of the core", steps.core_session, shielded=True)],
    "EngineCoreClient.__aexit__": [],
    "EngineCoreClient.aclose": [
        Operation("close the core from inside", steps.close_the_core_from_inside, shielded=True),
    ],
    "EngineCoreClient.receive_outputs": [Operation("receive_outputs", steps.receive_outputs, shielded=True)],
    "EngineCoreClient.utility": [
        Operation("utility", call("core.utility", "is_sleeping")),
        Operation("give up a call", steps.give_up_a_call, shielded=True),
    ],
    "EngineCoreClient.utility_on": [Operation("utility_on", call("core.utility_on", [0], "is_sleeping"))],
    "EngineCoreClient.utility_on_all": [Operation("utility_on_all", call("core.utility_on_all", "is_sleeping"))],
    "EngineCoreClient.wait_dead": [],  # the client's
    "EngineCoreClient.wait_room": [Operation("wait_room", call("core.wait_room"), immediate=True)],
    "RequestGroup.__aenter__": [Operation("leave many early", steps.leave_many_early)],
    "RequestGroup.__aexit__": [],
    "RequestGroup.__anext__": [
        Operation("answer many", partial(steps.answer_many, concurrency=None)),
        Operation("answer many, one by one", partial(steps.answer_many, concurrency=1)),
    ],
    "RequestGroup.aclose": [],  # with __anext__, which closes
    "RequestStream.__aenter__": [
        Operation("read in a block", steps.read_in_a_block),
        Operation("leave a block early", steps.leave_a_block_early),
    ],
    "RequestStream.__aexit__": [],
    "RequestStream.__anext__": [
        Operation("read to the end", steps.read_to_the_end),
        Operation("read in time", steps.in_time),
        Operation("several completions", steps.several_completions),
        Operation("wait for what does not come", steps.wait_for_what_does_not_come, shielded=True),
        Operation("two at once", steps.two_at_once, shielded=True),
        Operation("generate with an adapter", steps.generate_with_an_adapter),
    ],
    "RequestStream.aclose": [],  # with submit
    "RequestStream.final": [Operation("final", steps.final)],
    "TextStream.__aenter__": [Operation("pieces of text", steps.pieces_of_text)],
    **{f"TextStream.{name}": [] for name in ("__aexit__", "__anext__", "aclose")},
    "TokenStream.__aenter__": [Operation("single tokens", steps.single_tokens)],
    **{f"TokenStream.{name}": [] for name in ("__aexit__", "__anext__", "aclose")},
    "RequestStream.start": [Operation("start a stream", steps.start_a_stream, immediate=True)],
    "ClientEvents.__anext__": [Operation("follow a life", steps.follow_a_life, shielded=True)],
    # Its socket is a real one, whose turns nobody can count: tests/client/test_kv_events.py cancels it.
    **{f"KVEventStream.{name}": [] for name in ("__aenter__", "__aexit__", "__anext__", "aclose")},
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
