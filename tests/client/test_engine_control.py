"""Sleep, adapters, model facts, health: what a client says of its engines, and has them do, rank by rank."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import pytest
from built_tokenizers import write_model

from anyengine import (
    ClientState,
    EngineAsleepError,
    EngineClient,
    EngineUnresponsiveError,
    LoRARequest,
    ModelInfo,
    RankChanged,
    RankState,
    RequestRejected,
    SamplingParams,
    UtilityError,
)
from anyengine.testing.scripted import Script, ScriptedTwin, UtilityRule

pytestmark = pytest.mark.anyio

ONE = SamplingParams(max_tokens=1)
LORA = {"supports_lora": True, "max_loras": 4}


def calls(scripted: ScriptedTwin, method: str) -> list[Any]:
    return [body[3] for body in scripted.received("utility") if body[2] == method]


def answers(method: str, value: Any, **script: Any) -> ScriptedTwin:
    return ScriptedTwin(Script(utilities=(UtilityRule(method=method, do="reply", value=value),), **script))


@pytest.mark.feature("C15")
async def test_asleep_for_the_length_of_a_block() -> None:
    """Nothing is sent meanwhile; the state says so, as an event and in the figures; awake again whatever happens."""
    scripted = ScriptedTwin()
    states: list[RankState] = []
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            events = client.events()
            await anext(events)
            async with client.sleeping(2, "wait"):
                while not states:
                    event = await anext(events)
                    states += [event.rank_state] if isinstance(event, RankChanged) else []
                assert client.state is ClientState.ASLEEP
                assert client.stats().ranks[0].is_asleep
                with pytest.raises(EngineAsleepError, match="asleep"):
                    await client.submit([1], ONE)
            assert client.state is ClientState.READY and not client.stats().ranks[0].is_asleep
            assert (await client.complete([1], ONE)).finished
            with pytest.raises(ZeroDivisionError):
                async with client.sleeping():
                    raise ZeroDivisionError
            with anyio.CancelScope() as scope:
                async with client.sleeping():
                    scope.cancel()
                    await anyio.sleep_forever()
            assert scope.cancelled_caught and client.state is ClientState.READY
    assert states == [RankState.ASLEEP]
    assert calls(scripted, "sleep") == [[2, "wait"], [1, "abort"], [1, "abort"]]
    assert calls(scripted, "wake_up") == [[None]] * 3
    assert len(scripted.received("add")) == 1


@pytest.mark.feature("C15")
async def test_an_engine_that_does_not_wake_up_says_why() -> None:
    scripted = ScriptedTwin(Script(utilities=(UtilityRule(method="wake_up", do="fail", message="out of memory"),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            with pytest.raises(UtilityError, match="out of memory"):
                async with client.sleeping():
                    pass
            with pytest.raises(ZeroDivisionError):  # comes first, whatever becomes of the engine
                async with client.sleeping():
                    raise ZeroDivisionError


@pytest.mark.feature("C16")
async def test_awake_only_when_every_rank_is_entirely() -> None:
    """One that has only its weights back, or one rank of two that is not: still asleep, and nothing is sent."""
    partly = Script(utilities=(UtilityRule(method="wake_up", nth=1, do="reply", value=False),))
    engines = [ScriptedTwin(partly), ScriptedTwin()]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            await client.sleep(1)
            assert await client.wake_up(["weights"]) is False
            with pytest.raises(EngineAsleepError):
                await client.submit([1], ONE)
            assert await client.wake_up() is True
            assert (await client.complete([1], ONE)).finished
    assert calls(engines[0], "wake_up") == calls(engines[1], "wake_up") == [[["weights"]], [None]]


@pytest.mark.feature("C16")
@pytest.mark.parametrize("still_asleep", [False, True])
async def test_a_release_that_does_not_say_what_is_back_is_asked(still_asleep: bool) -> None:
    rules = (
        UtilityRule(method="wake_up", do="reply", value=None),
        UtilityRule(method="is_sleeping", do="reply", value=still_asleep),
    )
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin(Script(utilities=rules)).engine) as client:
            await client.sleep(1)
            assert await client.wake_up(["weights"]) is not still_asleep


@pytest.mark.feature("C17")
async def test_engines_that_differ_are_named() -> None:
    engines = [answers("is_sleeping", value) for value in (True, False)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            with pytest.raises(UtilityError, match=r"differ in 'is_sleeping': \{0: True, 1: False\}"):
                await client.is_sleeping()
        async with EngineClient(engine=[engines[0].engine, engines[0].engine]) as client:
            assert await client.is_sleeping() is True


@pytest.mark.feature("C26")
async def test_adapters_are_those_of_every_rank(caplog: pytest.LogCaptureFixture) -> None:
    engines = [ScriptedTwin(Script(registration=LORA)) for _ in range(2)]
    one, two = LoRARequest("one", 1, "/1"), LoRARequest("two", 2, "/2")
    with anyio.fail_after(30):
        async with EngineClient(engine=[engine.engine for engine in engines]) as client:
            assert await client.list_loras() == set()
            assert await client.add_lora(one) is True
            assert await client.add_lora(two) is True
            assert await client.list_loras() == {1, 2} and not caplog.records
            assert await client.pin_lora(1) is True
            assert await client.pin_lora(7) is False
            await client.core.utility("remove_lora", 2, rank=1)
            assert await client.list_loras() == {1}
            assert [record.getMessage() for record in caplog.records] == [
                "engine 1 lacks adapters that others have loaded: [2]"
            ]
            assert await client.remove_lora(2) is False  # one rank had it
            assert await client.remove_lora(1) is True
            assert await client.list_loras() == set()
    for engine in engines:
        assert calls(engine, "add_lora") == [
            [["one", 1, "/1", None, False, False]],
            [["two", 2, "/2", None, False, False]],
        ]


@pytest.mark.feature("R39")
async def test_adapters_have_names() -> None:
    """What was loaded, by call or for a request, can be named; what was not is refused as something not found."""
    scripted = ScriptedTwin(Script(registration=LORA))
    one, two = LoRARequest("one", 1, "/1", "base"), LoRARequest("two", 2, "/2")
    with anyio.fail_after(30):
        async with EngineClient(engine=scripted.engine) as client:
            assert client.loras == {}
            await client.add_lora(one)
            await client.complete([1], ONE, lora_request=two)
            assert client.loras == {"one": one, "two": two}
            out = await client.complete([1], ONE, lora_request="one")
            assert out.lora_request == one
            with pytest.raises(RequestRejected, match=r"no adapter of this name.*'one', 'two'") as caught:
                await client.complete([1], ONE, lora_request="three")
            assert (caught.value.status, caught.value.parameter) == (404, "lora_request")
            await client.remove_lora(1)
            assert client.loras == {"two": two}
            with pytest.raises(RequestRejected):
                await client.complete([1], ONE, lora_request="one")
    wire = [add[6] for add in scripted.received("add")]
    assert wire == [["two", 2, "/2", None, False, False], ["one", 1, "/1", "base", False, False]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {"vocab_size": 400, "hidden_size": 64, "max_position_embeddings": 2048, "eos_token_id": 1}
    path = tmp_path_factory.mktemp("facts") / "model"
    return str(write_model(path, config=config, generation_config={"temperature": 0.5}))


@pytest.mark.feature("C34")
async def test_what_the_model_is(directory: str) -> None:
    registration = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 8, "num_gpu_blocks": 10}
    engines = [ScriptedTwin(Script(registration=registration), model_dir=directory) for _ in range(2)]
    with anyio.fail_after(30):
        async with EngineClient(engine=[one.engine for one in engines]) as client:
            info = client.model_info
            assert isinstance(info, ModelInfo)
            assert client.tokenizer.vocab_size > 0
        async with EngineClient(engine=ScriptedTwin().engine) as client:
            bare = client.model_info
    assert (info.directory, info.dtype, info.engine_version) == (directory, "bfloat16", "0.33.0")
    assert (info.max_model_len, info.vocab_size, info.hidden_size, info.eos_token_ids) == (1024, 400, 64, (1,))
    assert (info.num_gpu_blocks, info.max_num_seqs) == (20, 8)
    assert (info.has_tokenizer, info.is_multimodal, info.sampling_defaults) == (True, False, {"temperature": 0.5})
    assert (bare.directory, bare.has_tokenizer, bare.is_multimodal, bare.hidden_size) == (None, False, None, None)


@pytest.mark.feature("C10")
async def test_health_in_one_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    silent = ScriptedTwin(Script(utilities=(UtilityRule(method="is_sleeping", do="never"),)))
    with anyio.fail_after(30):
        async with EngineClient(engine=ScriptedTwin().engine) as client:
            await client.check_health()
        async with EngineClient(engine=[ScriptedTwin().engine, silent.engine], shutdown_grace_s=0) as client:
            with pytest.raises(EngineUnresponsiveError, match=r"1 \(silent\)") as caught:
                await client.check_health(timeout_s=0.05)
    assert caught.value.rank == 1
