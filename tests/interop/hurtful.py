"""What hurts an engine, as attempts: how a user would come to send it, and what becomes of it.

``ROWS`` has an entry for every row of the two tables (docs/protocol.md, "What kills an engine"; docs/interop.md,
"Faults"), by a part of its first cell. A row is a list of attempts: refused before anything is sent, harmless when
sent, impossible through the client, or no message at all (a signal, a crash), and then shown elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec
import pytest
from hurtful_values import IN_VOCABULARY, OUT_OF_RANGE, PUBLIC, WRONG_TYPES
from tiny_models import VOCAB_SIZE

from anyengine import (
    EngineClient,
    EngineCoreOutput,
    EngineCoreRequest,
    SamplingParams,
    UtilityError,
)
from anyengine._wire import (
    NEWEST,
    RequestType,
    Tensor,
    WireLoRARequest,
    WirePoolingParams,
    WireSamplingParams,
    WireStructuredOutputs,
)

__all__ = ["MAX_MODEL_LEN", "ROWS", "Attempt", "Collector", "Elsewhere", "Harmless", "Refused"]
__all__ += ["greedy", "request", "send_raw"]

Act = Callable[[EngineClient], Awaitable[Any] | None]
MAX_MODEL_LEN = 1024
LONG = WireSamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Refused:
    """Refused with an error that names ``parameter``; not a frame is sent."""

    parameter: str
    act: Act


@dataclass(frozen=True)
class Harmless:
    """Sent; ``act`` asserts what the engine answers."""

    act: Callable[[EngineClient], Awaitable[None]]


@dataclass(frozen=True)
class Impossible:
    """The client writes no such message: what it sends is checked against ``why`` for the whole walk."""

    why: str


@dataclass(frozen=True)
class Elsewhere:
    """Not a message: it happens to the processes, and is shown by this test (or by none: see ``why``)."""

    test: str | None = None
    why: str = ""


Attempt = Refused | Harmless | Impossible | Elsewhere
Row = list[Attempt]

counter = iter(range(10**9))


def request(prompt: Any = (1, 2, 3), request_id: Any = None, sampling: Any = "greedy", **fields: Any) -> Any:
    """A request of the low level; every one has an id of its own."""
    if sampling == "greedy":
        sampling = WireSamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompt = list(prompt) if isinstance(prompt, tuple | range) else prompt
    request_id = f"low-{next(counter)}" if request_id is None else request_id
    return EngineCoreRequest(request_id, prompt, sampling_params=sampling, **fields)


@dataclass
class Collector:
    """The consumer of one low-level request."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    ended: anyio.Event = field(default_factory=anyio.Event)

    def push(self, output: EngineCoreOutput) -> None:
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.ended.set()

    def fail(self, error: BaseException) -> None:
        raise AssertionError from error

    def aborted(self) -> None:
        raise AssertionError


def add(it: Any) -> Act:
    return lambda client: client.core.add(it, Collector())


def sampling(**fields: Any) -> Act:
    values: dict[str, Any] = {"max_tokens": 4, **fields}
    return lambda client: client.core.add(request(sampling=WireSamplingParams(**values)), Collector())


def submit(prompt: Any, **parameters: Any) -> Act:
    return lambda client: client.submit(prompt, SamplingParams(**parameters))


def utility(*call: Any) -> Act:
    return lambda client: client.core.utility(*call)


async def greedy(client: EngineClient, **fields: Any) -> list[int]:
    """The tokens of a low-level request that must end normally."""
    consumer = Collector()
    client.core.add(request(**fields), consumer)
    await consumer.ended.wait()
    assert consumer.outputs[-1].finish_reason in (0, 1), consumer.outputs[-1]
    return [token for output in consumer.outputs for token in output.new_token_ids]


def send_raw(client: EngineClient, *frames: bytes) -> None:
    """Behind the client's back, and unseen by whoever records what it sends."""
    inputs = client.core.session.endpoints.inputs
    send = type(inputs).send_nowait
    getattr(send, "unrecorded", send)(inputs, [b"\x00\x00", *frames])


# ------------------------------------------------------------------------------------------------- types and ranges


def with_value(name: str, value: Any) -> Any:
    it = request()
    setattr(it, name, value)
    return it


wrong_types: Row = [
    Refused(name, add(with_value(name, value))) for name, values in WRONG_TYPES.items() for value in values
]
out_of_range: Row = [
    Refused(f"sampling_params.{name}", sampling(**{name: value}))
    for name, values in OUT_OF_RANGE.items()
    for value in values
]
out_of_range += [
    Refused(name, submit([1, 2], **{"max_tokens": 4, name: value}))
    for name, values in OUT_OF_RANGE.items()
    for value in values
    if name in PUBLIC
]
out_of_range += [Refused(f"sampling_params.{name}", sampling(**{name: value})) for name, value in IN_VOCABULARY.items()]


def changed_tensor() -> Any:
    embeds = Tensor("float32", (3, 128), bytes(4 * 3 * 128))
    embeds.data = b"too few"
    return request(prompt=None, prompt_embeds=embeds)


# ---------------------------------------------------------------------------------------------------- what is harmless


async def duplicate_while_running(client: EngineClient) -> None:
    first = request(sampling=LONG)
    client.core.add(first, Collector())
    try:
        client.core.add(request(request_id=first.request_id), Collector())
    finally:
        client.core.abort(first.request_id)


async def reuse_after_abort(client: EngineClient) -> None:
    first = request(sampling=LONG)
    client.core.add(first, Collector())
    client.core.abort(first.request_id)
    client.core.add(request(request_id=first.request_id), Collector())


async def reuse_after_finish(client: EngineClient) -> None:
    assert await greedy(client, request_id="again") == await greedy(client, request_id="again")


async def resolved_max_tokens(client: EngineClient) -> None:
    prompt = [1] * (MAX_MODEL_LEN - 3)
    outputs = [out async for out in client.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True))]
    assert outputs[-1].finish_reason == "length"


async def beyond_the_models_length(client: EngineClient) -> None:
    far = WireSamplingParams(max_tokens=10**6, temperature=0.0, ignore_eos=True)
    assert len(await greedy(client, prompt=[1] * (MAX_MODEL_LEN - 3), sampling=far)) == 3


def fails_alone(**constraint: Any) -> Callable[[EngineClient], Awaitable[None]]:
    async def act(client: EngineClient) -> None:
        consumer = Collector()
        structured = WireStructuredOutputs(backend="xgrammar", **constraint)
        it = request(sampling=WireSamplingParams(max_tokens=4, structured_outputs=structured))
        client.core.add(it, consumer)
        await consumer.ended.wait()
        assert consumer.outputs[-1].finish_reason == 3

    return act


async def unknown_positions(client: EngineClient) -> None:
    """As a newer client would write them."""
    expected = await greedy(client)
    it, consumer = request(), Collector()
    kind, payload = NEWEST.encode_add(it)
    fields = msgspec.msgpack.decode(payload)
    fields[3]["unknown"] = 7
    client.core.session.connection.requests.open(it.request_id, 0, consumer)
    send_raw(client, bytes(kind), msgspec.msgpack.encode([*fields, "unknown"]))
    await consumer.ended.wait()
    assert [token for output in consumer.outputs for token in output.new_token_ids] == expected


async def ids_of_nobody(client: EngineClient) -> None:
    client.core.abort("nobody")
    client.core.abort(["nobody", "either"])
    send_raw(client, RequestType.ABORT.value, b"\x91\xa6nobody")
    assert await client.core.utility("is_sleeping") is False


async def bad_argument(client: EngineClient) -> None:
    with pytest.raises(UtilityError, match="no such mode"):
        await client.core.utility("pause_scheduler", "no such mode", True)


async def too_few_arguments(client: EngineClient) -> None:
    with pytest.raises(UtilityError, match="lora_id"):
        await client.core.utility("remove_lora")


def ignored(*frames: bytes) -> Callable[[EngineClient], Awaitable[None]]:
    async def act(client: EngineClient) -> None:
        send_raw(client, *frames)
        assert await client.core.utility("is_sleeping") is False

    return act


# ----------------------------------------------------------------------------------------------------------- the rows

ONLY_ITS_TYPES = Impossible("the client writes messages of the types ADD, ABORT and UTILITY only")
ONLY_WHOLE = Impossible("every message that it writes has a type and a payload, which decode as what they are")
pooling = request(sampling=None, pooling_params=WirePoolingParams(task="embed"))
empty: Row = [
    Refused("prompt_token_ids", add(request(prompt=[]))),
    Refused("prompt", submit([])),
]
too_long: Row = [
    Refused("prompt_token_ids", add(request(prompt=[1] * MAX_MODEL_LEN))),
    Refused("prompt_token_ids", add(request(prompt=[1] * (MAX_MODEL_LEN + 500)))),
    Refused("prompt", submit([1] * MAX_MODEL_LEN)),
    Harmless(resolved_max_tokens),
]
outside: Row = [
    Refused("prompt_token_ids", add(request(prompt=[1, VOCAB_SIZE]))),
    Refused("prompt_token_ids", add(request(prompt=[1, -1]))),
    Refused("prompt", submit([100_000])),
    Refused("prompt", submit([-1])),
]
nothing_to_do: Row = [
    Refused("prompt_token_ids", add(request(prompt=None))),
    Refused("prompt", submit(None)),
    Refused("sampling_params.max_tokens", sampling(max_tokens=None)),
    Refused("sampling_params", add(request(sampling=None))),
    Refused(
        "sampling_params.structured_outputs.backend", sampling(structured_outputs=WireStructuredOutputs(regex="a"))
    ),
    Refused(
        "sampling_params.structured_outputs.backend",
        sampling(structured_outputs=WireStructuredOutputs(regex="a", backend="none")),
    ),
]
wrong_client: Row = [
    Refused("client_index", add(request(client_index=5))),
    Refused("client_index", add(request(client_index=-1))),
    Impossible("utility calls name the client's own index"),
]
mute: Row = [
    Refused("args[0]", utility("collective_rpc", "get_kv_cache_spec")),
    Refused("args[0]", lambda client: client.collective_rpc("get_kv_cache_spec")),
    Refused("args[0]", lambda client: client.collective_rpc("get_model")),
    Refused("args[0]", utility("collective_rpc", "__class__")),
    Refused("method", utility("step")),
    Refused("args[0]", utility("set_weight_version", 7)),
]
bad_aborts: Row = [
    Refused("request_ids", lambda client: client.core.abort(5)),  # type: ignore[arg-type]
    Refused("request_ids", lambda client: client.core.abort(None)),  # type: ignore[arg-type]
    Refused("request_ids", lambda client: client.core.abort([5])),  # type: ignore[list-item]
]
reused: Row = [Refused("request_id", duplicate_while_running), Refused("request_id", reuse_after_abort)]
wrong_task: Row = [Refused("pooling_params.task", add(pooling))]
two_kinds = WireStructuredOutputs(regex="a", json_object=True, backend="xgrammar")

ROWS: dict[str, dict[str, Row]] = {
    "protocol.md": {
        "unknown type byte": [ONLY_ITS_TYPES],
        "type without payload": [ONLY_WHOLE],
        "wrong type at any position": wrong_types,
        "out-of-range sampling parameter": out_of_range,
        "aux index without such a frame": [Refused("prompt_embeds", add(changed_tensor())), ONLY_WHOLE],
        "UTILITY payload not a 4-array": [
            Refused("method", utility("handle_fault_tolerance", {"instruction": "retry"})),
            ONLY_WHOLE,
        ],
        "ADD or UTILITY with client_index": wrong_client,
        "result cannot be encoded": mute,
        "ADD with the id of an unfinished request": [*reused, Harmless(reuse_after_finish)],
        "empty prompt; prompt longer": [*empty, *too_long, *outside],
        "pooling params on a generation model": wrong_task,
        "ABORT payload an int; nil": [*bad_aborts, ONLY_ITS_TYPES],
        "a worker process dies": [
            Elsewhere("test_vllm_failures.py::test_a_killed_worker_takes_the_engine_with_it"),
        ],
        "max_tokens nil; neither": nothing_to_do,
        "LoRA although not enabled": [
            Refused("lora_request", add(request(lora_request=WireLoRARequest("l", 1, "/l"))))
        ],
        "prompt_embeds although not enabled": [
            Refused("prompt_embeds", add(request(prompt=None, prompt_embeds=Tensor("float32", (3, 128), bytes(1536))))),
        ],
        "unknown trailing positions": [Harmless(unknown_positions)],
        "ABORT: unknown ids": [Harmless(ids_of_nobody), *bad_aborts],
        "unknown method, too many args": [
            Refused("method", utility("no_such_method")),
            Refused("args", utility("is_sleeping", 1, 2)),
            Refused("method", utility(5)),
            Refused("args[0]", utility("collective_rpc", print)),
            Harmless(bad_argument),
        ],
        "START_DP_WAVE to an engine without DP": [
            ONLY_ITS_TYPES,
            Harmless(ignored(RequestType.START_DP_WAVE.value, b"\x92\x00\xc0")),
        ],
    },
    "interop.md": {
        "kill -9 engine (generating": [Elsewhere("test_vllm_failures.py::test_kill_9")],
        "SIGTERM or SIGINT, timeout 0": [Elsewhere("test_vllm_failures.py::test_sigterm_from_outside")],
        "SIGTERM, shutdown_timeout=30": [Elsewhere(why="a signal; what it ends is told as an end")],
        "SIGTERM twice": [Elsewhere(why="a signal; the client sends one, and SIGKILL after the grace period")],
        "SIGSTOP engine or worker": [Elsewhere(why="a signal")],
        "kill -9 worker": [Elsewhere("test_vllm_failures.py::test_a_killed_worker_takes_the_engine_with_it")],
        "exception in the step": [Elsewhere(why="vLLM's own fault, not of a message; it says ENGINE_CORE_DEAD")],
        "token id out of vocab": outside,
        "prompt > or == max_model_len": too_long,
        "empty prompt": empty,
        "duplicate id while running": reused,
        "pooling task not supported": [*wrong_task, Elsewhere("test_vllm_hurts.py::test_adapters_and_pooling_models")],
        "ADD with unloadable LoRA path": [Elsewhere("test_vllm_hurts.py::test_adapters_and_pooling_models")],
        "ABORT with non-list": bad_aborts,
        "prompt null, max_tokens null": [
            *nothing_to_do,
            Harmless(fails_alone(regex="(")),
            Harmless(fails_alone(choice=["a", "b"])),
        ],
        "prompt+max_tokens > max_model_len": [Harmless(beyond_the_models_length)],
        "max_tokens 0, temperature -1": [
            Refused("sampling_params.max_tokens", sampling(max_tokens=0)),
            Refused("sampling_params.temperature", sampling(temperature=-1.0)),
            Refused("sampling_params.structured_outputs", sampling(structured_outputs=two_kinds)),
            *wrong_types,
            ONLY_WHOLE,
        ],
        "client_index out of range": [*wrong_client, *mute],
        "ABORT unknown id, WAKEUP byte 05": [
            Harmless(ids_of_nobody),
            Harmless(ignored(b"\x05", b"\xc0")),
            Harmless(ignored(RequestType.START_DP_WAVE.value, b"\x92\x00\xc0")),
        ],
        "utility wrong arity": [Refused("args", utility("is_sleeping", 1)), Harmless(too_few_arguments)],
        "type byte 04 from a client": [ONLY_ITS_TYPES],
        'utility "shutdown"': [Refused("method", utility("shutdown"))],
        "front-end kill -9": [Elsewhere("test_vllm_failures.py::test_an_engine_ends_with_its_host")],
        "CLI: kill -9 engine": [Elsewhere(why="a process that this client does not start; the sockets tell")],
        "CLI: kill -9 launcher": [Elsewhere(why="the engines live on, and go on serving")],
    },
}
