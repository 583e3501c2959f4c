"""What a client knows of its engines: by registration, arguments in either form, files, and their own word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec
import pytest
from engines import misbehaving, toy

from anyengine import (
    CommandEngine,
    EmbeddedEngine,
    EngineClient,
    InheritedEngine,
    PoolingParams,
    RemoteEngine,
    RequestRejected,
    RunningEngine,
    SamplingParams,
    VLLMEngine,
)
from anyengine._client.engines.engine_limits import limits_of
from anyengine._protocol import EngineLimits
from anyengine._text import ModelFacts
from anyengine._wire import EngineCoreReadyResponse

READY = EngineCoreReadyResponse(64, vllm_version="0.32.0", max_loras=2)
UNKNOWN = EngineLimits.unknown()
ADDRESS = "tcp://127.0.0.1:1"


def vllm(args: Mapping[str, Any] | Sequence[str], ready: EngineCoreReadyResponse = READY) -> EngineLimits:
    return limits_of(ready, VLLMEngine("m", args=args))


# Each argument of vLLM that a request depends on: its name and value, its command line, what follows.
ARGUMENTS: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    ({}, [], {}),
    ({"max_logprobs": 5}, ["--max-logprobs", "5"], {"max_logprobs": 5}),
    ({"enable_prompt_embeds": True}, ["--enable-prompt-embeds"], {"prompt_embeds": True}),
    ({"enable_lora": True}, ["--enable-lora"], {"lora": True}),
    ({"enable_fault_tolerance": True}, ["--enable-fault-tolerance"], {"fault_tolerance": True}),
    ({"skip_tokenizer_init": True}, ["--skip-tokenizer-init"], {"tokenizer": False}),
    ({"scheduling_policy": "priority"}, ["--scheduling-policy", "priority"], {"priorities": True}),
    ({"enable_trace_replay": True}, ["--enable-trace-replay"], {"trace_replay": True}),
    ({"mm_processor_cache_gb": 0}, ["--mm-processor-cache-gb", "0"], {"mm_cache": False}),
    ({"mm_processor_cache_type": "shm"}, ["--mm-processor-cache-type", "shm"], {"mm_cache": False}),
    ({"data_parallel_size": 2}, ["-dp", "2"], {"mm_cache": False}),
    ({"reasoning_parser": "x"}, ["--reasoning-parser", "x"], {"reasoning": True}),
    ({"reasoning_config": {"reasoning_parser": "x"}}, ["--reasoning-config.reasoning_parser=x"], {"reasoning": True}),
    (
        {"structured_outputs_config": {"backend": "guidance", "reasoning_parser": "x"}},
        ["--structured-outputs-config", '{"backend": "guidance", "reasoning_parser": "x"}'],
        {"structured_outputs_backend": "guidance", "reasoning": True},
    ),
    ({"pooler_config": {"dimensions": 8}}, ["--pooler-config.dimensions", "8"], {"pooler": {"dimensions": 8}}),
]


@pytest.mark.feature("F02")
@pytest.mark.parametrize(("names", "strings", "known"), ARGUMENTS)
def test_arguments_mean_the_same_in_every_form(
    names: dict[str, Any], strings: list[str], known: dict[str, Any]
) -> None:
    defaults = EngineLimits(
        64, lora=False, prompt_embeds=False, fault_tolerance=False, known_methods_only=True, priorities=False,
        max_loras=2, mm_cache=True,
    )  # fmt: skip
    expected = msgspec.structs.replace(defaults, **known)
    assert vllm(names) == vllm(strings) == expected
    in_full = msgspec.structs.asdict(VLLMEngine("m", args=strings).understood)
    assert limits_of(READY, RemoteEngine(handshake=ADDRESS, args=in_full)) == expected


SAID = {"max_logprobs": 5, "enable_lora": True}


@pytest.mark.parametrize(
    "engine",
    [
        CommandEngine(argv=("x",), args=SAID),
        RemoteEngine(handshake=ADDRESS, args=SAID),
        RunningEngine(inputs=ADDRESS, outputs=ADDRESS, registrations={0: None}, args=SAID),
        InheritedEngine(input_fd=4, output_fd=5, args=SAID),
    ],
    ids=lambda engine: type(engine).__name__,
)
def test_what_nobody_says_of_somebody_elses_engine_stays_unknown(engine: Any) -> None:
    known = msgspec.structs.replace(UNKNOWN, max_logprobs=5, lora=True)
    is_vllm = not isinstance(engine, CommandEngine)
    assert limits_of(None, engine) == msgspec.structs.replace(known, known_methods_only=is_vllm)
    silent = msgspec.structs.replace(engine, args={})
    assert limits_of(None, silent) == msgspec.structs.replace(UNKNOWN, known_methods_only=is_vllm)
    assert silent.understood is None and engine.understood.max_logprobs == 5
    for wrong in (["--max-logprobs", "5"], {"max_logprobs": "5"}, {5: 5}, None):
        with pytest.raises(ValueError, match=r"args must|max_logprobs='5' cannot be right"):
            type(engine)(**{**msgspec.structs.asdict(engine), "args": wrong})


def test_a_running_engine_keeps_what_was_said() -> None:
    engine = RunningEngine(inputs=ADDRESS, outputs=ADDRESS, registrations={0: None}, args={"max_logprobs": 5})
    assert msgspec.json.decode(msgspec.json.encode(engine), type=RunningEngine) == engine


def test_the_registration_the_files_and_the_release() -> None:
    facts = ModelFacts("/m", vocab_size=100, hidden_size=8)
    limits = limits_of(READY, VLLMEngine("/m"), facts)
    assert (limits.max_model_len, limits.vocab_size, limits.hidden_size) == (64, 100, 8)
    for says in (True, False):  # it knows better than its arguments
        assert vllm({"enable_lora": not says}, EngineCoreReadyResponse(64, supports_lora=says)).lora is says
    assert vllm({"max_loras": 3}, EngineCoreReadyResponse(64, vllm_version="0.28.0")).max_loras == 3
    assert not vllm({}, EngineCoreReadyResponse(64, vllm_version="9.0.0")).known_methods_only
    embedded = limits_of(None, EmbeddedEngine())
    assert embedded == msgspec.structs.replace(UNKNOWN, structured_outputs_backend="guidance", embedded=True)
    assert limits_of(None, EmbeddedEngine(max_logprobs=-1)).max_logprobs == -1


def test_what_several_engines_take() -> None:
    generate, embed = frozenset(("generate",)), frozenset(("generate", "embed"))
    one = EngineLimits(
        64, 100, 8, generate, lora=True, prompt_embeds=True, max_loras=2, max_logprobs=-1, reasoning=True
    )
    two = EngineLimits(32, None, 8, embed, lora=False, prompt_embeds=None, max_logprobs=5, reasoning=False)
    both = EngineLimits(32, 100, 8, generate, lora=False, prompt_embeds=None, max_logprobs=5)
    assert EngineLimits.common([one, two]) == EngineLimits.common([two, one]) == both
    assert EngineLimits.common([one]) == one
    assert EngineLimits.common([one, UNKNOWN]).tasks is None
    assert EngineLimits.common([one, UNKNOWN]).lora is None
    assert EngineLimits.common([msgspec.structs.replace(one, max_logprobs=-1)] * 2).max_logprobs == -1


@pytest.mark.anyio
async def test_tasks_are_known_in_one_place() -> None:
    """An engine is asked at the first request, after which both levels know."""
    with anyio.fail_after(30):
        async with EngineClient(engine=toy()) as client:
            limits = client.core.session.connection.limits
            assert limits[0].tasks is None
            await client.generate([1], SamplingParams(max_tokens=1)).final()
            assert limits[0].tasks == {"generate"}
        async with EngineClient(engine=misbehaving("pooler")) as client:
            limits = client.core.session.connection.limits
            assert limits[0].tasks is None
            await client.encode([1, 2], PoolingParams(task="embed"))
            assert "embed" in (limits[0].tasks or ())
            with pytest.raises(RequestRejected, match="does not generate"):
                await client.submit([1])
