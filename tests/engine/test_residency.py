"""What an engine gives back while it sleeps, other weights in the place of its own, and traces of its steps."""

from __future__ import annotations

import gzip
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_generation import assert_agrees, reference_of
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_tiny_model, open_runner

from anyengine._wire import EngineCoreOutput, EngineCoreRequest, WireLoRARequest, WireSamplingParams
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore

PROMPT = [7 * i % VOCAB_SIZE for i in range(40)]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def other_weights(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state dict and nothing else: trained a little further, so to speak."""
    directory = tmp_path_factory.mktemp("update")
    weights = load_file(model_dir / "model.safetensors")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_file(
            {name: weight + torch.randn_like(weight) for name, weight in weights.items()}, directory / "w.safetensors"
        )
    return directory


@pytest.fixture
def engine(model_dir: Path) -> Iterator[EngineCore]:
    runner = open_runner(model_dir, max_loras=1)
    engine = EngineCore(runner, EmbeddedEngine())
    yield engine
    engine.close()


def add(engine: EngineCore, request_id: str, **fields: Any) -> None:
    sampling = WireSamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    engine.add(EngineCoreRequest(request_id, PROMPT, sampling_params=sampling, **fields))


def run(engine: EngineCore) -> list[EngineCoreOutput]:
    outputs: list[EngineCoreOutput] = []
    while engine.has_work():
        outputs += [output for _, output in engine.step()]
    return outputs


def answer(engine: EngineCore) -> list[int]:
    add(engine, "a")
    return tokens_of(run(engine))


def put_to_sleep(engine: EngineCore, *args: Any) -> None:
    asleep = engine.utility("sleep", [*args])
    assert run(engine) == []
    assert asleep.result(timeout=0) is None


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def parts(engine: EngineCore) -> Any:
    return engine._runner._residency  # type: ignore[attr-defined]


@pytest.mark.feature("C15")
@pytest.mark.feature("C16")
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_given_its_memory_back_and_wakes_as_it_was(engine: EngineCore, level: int) -> None:
    expected = answer(engine)
    weights, cache = weakref.ref(parts(engine).forward), weakref.ref(parts(engine).cache)
    put_to_sleep(engine, level)
    assert engine.utility("is_sleeping", []) is True
    assert cache() is None
    assert (weights() is None) is (level == 2)  # a CPU's weights are where level 1 would put them
    with pytest.raises(RuntimeError, match="wake_up"):
        engine.utility("resume_scheduler", [])
    add(engine, "a")  # waits
    assert not engine.has_work()
    assert engine.utility("wake_up", [["kv_cache"]]) is (level == 1)
    assert engine.utility("wake_up", [["weights", "scheduling"]]) is True
    assert engine.utility("is_sleeping", []) is False
    assert tokens_of(run(engine)) == expected


def test_level_0_keeps_everything(engine: EngineCore) -> None:
    expected = answer(engine)
    put_to_sleep(engine, 0)
    assert not parts(engine).is_sleeping
    assert engine.utility("wake_up", [["scheduling"]]) is True
    add(engine, "b")
    outputs = run(engine)
    assert tokens_of(outputs) == expected
    assert outputs[0].prefill_stats is not None and outputs[0].prefill_stats.num_cached_tokens == 32


def test_kept_requests_go_on_after_the_sleep(engine: EngineCore) -> None:
    expected = answer(engine)
    add(engine, "a")
    outputs = [output for _ in range(3) for _, output in engine.step()]
    put_to_sleep(engine, 2, "keep")
    assert not engine.has_work()
    assert engine.utility("wake_up", []) is True
    outputs += run(engine)
    assert tokens_of(outputs) == expected


def test_running_requests_are_awaited_before_the_memory_goes(engine: EngineCore) -> None:
    add(engine, "a")
    engine.step()
    asleep = engine.utility("sleep", [2, "wait"])
    assert not parts(engine).is_sleeping
    outputs = run(engine)
    assert asleep.result(timeout=0) is None
    assert parts(engine).is_sleeping
    assert len(tokens_of(outputs)) == MAX_TOKENS - 1


@pytest.mark.feature("C18")
def test_the_cache_alone_can_be_given_back_in_a_pause(engine: EngineCore) -> None:
    with pytest.raises(RuntimeError, match="needs a pause"):
        engine.utility("release_kv_cache_memory", [])
    expected = answer(engine)
    add(engine, "a")
    outputs = [output for _ in range(3) for _, output in engine.step()]
    engine.utility("pause_scheduler", ["keep", False])
    cache = weakref.ref(parts(engine).cache)
    engine.utility("release_kv_cache_memory", [])
    assert cache() is None
    with pytest.raises(RuntimeError, match="awake"):
        engine.utility("release_kv_cache_memory", [])
    engine.utility("wake_up", [["kv_cache"]])
    assert tokens_of(outputs + run(engine)) == expected


def test_a_new_front_end_finds_the_engine_awake(engine: EngineCore) -> None:
    expected = answer(engine)
    put_to_sleep(engine, 2)
    engine.reset()
    assert answer(engine) == expected


def test_tags_and_adapters_of_a_sleeping_engine(engine: EngineCore) -> None:
    with pytest.raises(ValueError, match=r"tags=\['weigths'\] is none of weights, kv_cache"):
        engine.utility("wake_up", [["weigths"]])
    put_to_sleep(engine, 2)
    add(engine, "a", lora_request=WireLoRARequest("l", 1, "/nowhere"))
    (output,) = [output for _, output in engine.step()]
    assert output.error is not None and "asleep" in output.error.message


@pytest.mark.feature("C29")
@pytest.mark.parametrize("given", ["directory", "file"])
def test_weights_are_replaced_by_a_state_dict_on_disk(
    engine: EngineCore, model_dir: Path, other_weights: Path, given: str
) -> None:
    """Nothing that the old ones have computed serves the new ones: not a block, and not what runs."""
    before = answer(engine)
    add(engine, "running")
    engine.step()
    path = other_weights if given == "directory" else other_weights / "w.safetensors"
    assert engine.utility("collective_rpc", ["reload_weights", None, [], {"weights_path": str(path)}]) == [None]
    engine.utility("set_weight_version", ["v2"])
    assert engine.weight_version == "v2"
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    model.load_state_dict(load_file(other_weights / "w.safetensors"), strict=False)
    reference = reference_of(model, PROMPT, MAX_TOKENS)
    rest = tokens_of(run(engine))
    going_on = reference_of(model, [*PROMPT, before[0]], MAX_TOKENS - 1)
    assert_agrees("running", rest, going_on)
    add(engine, "new")
    outputs = run(engine)
    assert_agrees("new", tokens_of(outputs), reference)
    assert tokens_of(outputs) != before
    put_to_sleep(engine, 2)
    engine.utility("wake_up", [])
    assert_agrees("after a sleep", answer(engine), reference)
    engine.utility("collective_rpc", ["reload_weights"])
    assert answer(engine) == before


def test_weights_of_another_model_leave_the_present_ones(
    engine: EngineCore, model_dir: Path, tmp_path: Path, other_weights: Path
) -> None:
    expected = answer(engine)
    weights = load_file(other_weights / "w.safetensors")
    first, *_ = weights
    spoilt = {
        "missing_keys": {name: weight for name, weight in weights.items() if name != first},
        "unexpected_keys": {**weights, "model.layers.9.mlp.x.weight": torch.zeros(1)},
        "size|shape": {**weights, first: torch.zeros(3, 3)},
    }
    for reason, tensors in spoilt.items():
        save_file(tensors, tmp_path / "w.safetensors")
        with pytest.raises((ValueError, RuntimeError), match=reason):
            engine.utility("collective_rpc", ["reload_weights", None, [str(tmp_path / "w.safetensors")]])
    with pytest.raises(ValueError, match="No such file"):
        engine.utility("collective_rpc", ["reload_weights", None, [str(tmp_path.parent / "nowhere-at-all")]])
    with pytest.raises(TypeError, match="weights_path"):
        engine.utility("collective_rpc", ["reload_weights", None, [3]])
    assert answer(engine) == expected


@pytest.mark.feature("C11")
def test_the_profiler_writes_a_trace_of_the_steps_in_between(model_dir: Path, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    engine = EngineCore(open_runner(model_dir, profile_dir=str(traces)), EmbeddedEngine())
    engine.utility("profile", [True, "mine", None, None])
    with pytest.raises(RuntimeError, match="runs already"):
        engine.utility("profile", [True])
    answer(engine)
    engine.utility("profile", [False])
    (trace,) = traces.iterdir()
    assert trace.name.startswith("mine-")
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("linear" in str(name) for name in names)
    engine.utility("profile", [True, None, 2, 3])  # two steps later, for three of them
    answer(engine)
    assert len([*traces.iterdir()]) == 2
    engine.utility("profile", [False])
    assert len([*traces.iterdir()]) == 2
    for bad in (["a/b"], [None, -1], [None, None, 0]):
        with pytest.raises(ValueError, match=r"profile_prefix|delay_iterations"):
            engine.utility("profile", [True, *bad])
    engine.close()


def test_without_a_directory_there_is_no_profiler(engine: EngineCore) -> None:
    with pytest.raises(ValueError, match="profile_dir"):
        engine.utility("profile", [True])
