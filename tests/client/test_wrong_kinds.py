"""A parameter of the wrong kind is refused before anything is sent, with its name, its value and what to write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from anyengine import BeamSearchParams, EngineClient, PoolingParams, RequestRejected, SamplingParams, UtilityRejected
from anyengine.testing.pytest_plugin import BACKENDS
from anyengine.testing.scripted import Script, ScriptedTwin

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [BACKENDS["trio"]], ids=["trio"], scope="module"),
]

MAPPING: Any = {"max_tokens": 3}
MESSAGES = [{"role": "user", "content": "hi"}]
Call = Callable[[EngineClient], Any]


@pytest.fixture(scope="module")
async def served(anyio_backend: Any) -> AsyncIterator[tuple[EngineClient, ScriptedTwin]]:
    twin = ScriptedTwin(Script())
    async with EngineClient(engine=twin.engine) as client:
        yield client, twin


def many(params: Any) -> Call:
    return lambda client: anext(client.generate_many([[1]], params))


WRONG_RECORDS: dict[str, tuple[str, Any, str, Call]] = {
    "generate": ("sampling_params", MAPPING, "SamplingParams", lambda c: anext(c.generate([1], MAPPING))),
    "no keys": ("sampling_params", {}, "SamplingParams", lambda c: anext(c.generate([1], {}))),  # type: ignore[arg-type]
    "complete": ("sampling_params", PoolingParams(), "SamplingParams", lambda c: c.complete([1], PoolingParams())),  # type: ignore[arg-type]
    "submit": ("sampling_params", MAPPING, "SamplingParams", lambda c: c.submit([1], MAPPING)),
    "beams": (
        "sampling_params",
        BeamSearchParams(beam_width=2, max_tokens=2),
        "SamplingParams",
        lambda c: c.complete([1], BeamSearchParams(beam_width=2, max_tokens=2)),  # type: ignore[arg-type]
    ),
    "chat": ("sampling_params", "system", "SamplingParams", lambda c: c.chat(MESSAGES, "system").final()),  # type: ignore[arg-type]
    "generate_many": ("sampling_params", MAPPING, "SamplingParams", many(MAPPING)),
    "generate_many text": ("sampling_params", "ab", "SamplingParams", many("ab")),
    "generate_many each": ("sampling_params[0]", MAPPING, "SamplingParams", many([MAPPING])),
    "input_session": ("sampling_params", MAPPING, "SamplingParams", lambda c: c.input_session(MAPPING).__aenter__()),
    "tokenize": ("sampling_params", MAPPING, "SamplingParams", lambda c: c.tokenize([1], MAPPING)),
    "beam_search": ("params", SamplingParams(), "BeamSearchParams", lambda c: c.beam_search([1], SamplingParams())),  # type: ignore[arg-type]
    "encode": ("pooling_params", MAPPING, "PoolingParams", lambda c: c.encode([1], MAPPING)),
    "encode sampling": ("pooling_params", SamplingParams(), "PoolingParams", lambda c: c.encode([1], SamplingParams())),  # type: ignore[arg-type]
}

TEXT_FOR_SEVERAL: dict[str, tuple[str, Any, Call]] = {
    "score": ("documents", "bcd", lambda c: c.score([1], "bcd")),
    "rerank": ("documents", "bcd", lambda c: c.rerank([1], "bcd")),
    "top_n": ("top_n", -1, lambda c: c.rerank([1], [[2]], top_n=-1)),
    "no documents at all": ("documents", 3, lambda c: c.score([1], 3)),  # type: ignore[arg-type]
}

WRONG_ARGUMENTS: dict[str, tuple[str, Any, str, Call]] = {
    "add_lora": ("lora_request", "x", "LoRARequest", lambda c: c.add_lora("x")),  # type: ignore[arg-type]
    "add_lora tuple": ("lora_request", (1,), "LoRARequest", lambda c: c.add_lora((1,))),  # type: ignore[arg-type]
    "wake_up": ("tags", "weights", '["weights"]', lambda c: c.wake_up("weights")),
    "wake_up tag": ("tags", ["x"], "'kv_cache'", lambda c: c.wake_up(["x"])),
    "remove_lora": ("lora_id", "x", "lora_int_id", lambda c: c.remove_lora("x")),  # type: ignore[arg-type]
    "pin_lora": ("lora_id", "x", "lora_int_id", lambda c: c.pin_lora("x")),  # type: ignore[arg-type]
    "collective_rpc": ("args", "abc", "[argument]", lambda c: c.collective_rpc("m", args="abc")),
    "sleep": ("level", 7, "0, 1 or 2", lambda c: c.sleep(7)),
    "weight version": ("new_version", 3, "use a str", lambda c: c.update_weight_version(3)),  # type: ignore[arg-type]
    "pause": ("mode", "never", "'keep'", lambda c: c.pause_generation(mode="never")),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drain_timeout_s": "a"}, "drain_timeout_s='a' must be a number of seconds at least 0"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s=nan must be at least 0"),
        ({"startup_timeout_s": "a"}, "startup_timeout_s='a' must be a number of seconds at least 0, or None"),
        ({"liveness_timeout_s": 0}, "liveness_timeout_s=0 must be above 0, or None for no limit"),
        ({"max_unread_bytes": "a"}, "max_unread_bytes='a' must be an int of at least 1"),
        ({"stats_sinks": print}, "stats_sinks=<built-in function print> must be a sequence of functions"),
        ({"stats_sinks": [3]}, r"stats_sinks=\[3\] must be a sequence of functions"),
        ({"strict": 3}, "strict=3 must be True or False"),
        ({"on_progress": 3}, "on_progress=3 must be a function, or None"),
        ({"on_notification": 3}, "on_notification=3 must be a function, or None"),
    ],
)
async def test_settings_of_a_client(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        EngineClient(**settings)


@pytest.mark.parametrize("name", ["drain", "abort_all", "ping", "health", "aclose"])
async def test_times_are_numbers(served: tuple[EngineClient, ScriptedTwin], name: str) -> None:
    parameter = "drain_timeout_s" if name == "aclose" else "timeout_s"
    with anyio.fail_after(10), pytest.raises(ValueError, match=f"^{parameter}='x' must be a number of seconds"):
        await getattr(served[0], name)(**{parameter: "x"})


@pytest.mark.parametrize("name", WRONG_RECORDS)
async def test_parameters_of_another_kind(served: tuple[EngineClient, ScriptedTwin], name: str) -> None:
    client, twin = served
    parameter, value, remedy, call = WRONG_RECORDS[name]
    with anyio.fail_after(10), pytest.raises(RequestRejected, match=rf"{remedy}\(\.\.\.\)") as caught:
        await call(client)
    assert (caught.value.parameter, caught.value.value) == (parameter, value)
    assert caught.value.remedy == f"use {remedy}(...)"
    assert not twin.received("add")


@pytest.mark.parametrize("name", TEXT_FOR_SEVERAL)
async def test_one_text_is_no_sequence_of_them(served: tuple[EngineClient, ScriptedTwin], name: str) -> None:
    client, twin = served
    parameter, value, call = TEXT_FOR_SEVERAL[name]
    with anyio.fail_after(10), pytest.raises(RequestRejected) as caught:
        await call(client)
    assert (caught.value.parameter, caught.value.value, bool(caught.value.remedy)) == (parameter, value, True)
    assert not twin.received("add")


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
async def test_arguments_of_operations(served: tuple[EngineClient, ScriptedTwin], name: str) -> None:
    client, twin = served
    parameter, value, remedy, call = WRONG_ARGUMENTS[name]
    before = len(twin.received("utility"))
    with anyio.fail_after(10), pytest.raises(UtilityRejected) as caught:
        await call(client)
    assert (caught.value.parameter, caught.value.value) == (parameter, value)
    assert remedy in str(caught.value)
    assert len(twin.received("utility")) == before
    client.check_admission()  # no door was closed
