"""LoRA adapters beside each other: the tokens of PEFT's own models, in one batch, and no block shared by mistake."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import peft
import pytest
import torch
import transformers
from reference_generation import assert_agrees, reference_of
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_tiny_model, open_runner

from anyengine import EngineClient, LoRARequest, RequestRejected, SamplingParams
from anyengine._wire import EngineCoreOutput, EngineCoreRequest, FinishReason, WireLoRARequest, WireSamplingParams
from anyengine.config import EmbeddedEngine
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.runner.fused import FusedForward

MAX_TOKENS = 8
PROMPT = [7 * i % VOCAB_SIZE for i in range(20)]
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "everything": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "dense", "fc1", "down_proj", "up_proj"],
        "rank_pattern": {"k_proj": 6},
        "alpha_pattern": {"layers.1.*": 20.0, "k_proj": 5.0},
        "layers_to_transform": [1, 2],
    },
}


def make_adapter(model_dir: Path, directory: Path, *, seed: int = 3, **config: Any) -> Path:
    """One with random weights, written by PEFT."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data *= 5.0  # so that what comes out is another's
    adapted.save_pretrained(directory)
    return directory


def peft_model(model_dir: Path, adapter: Path | None) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(llama, directory / name, **config) for name, config in KINDS.items()}


@pytest.fixture
def engine(llama: Path) -> Iterator[EngineCore]:
    engine = open_engine(llama)
    yield engine
    engine.close()


def open_engine(model_dir: Path, max_loras: int = 3, **settings: Any) -> EngineCore:
    runner = open_runner(model_dir, max_loras=max_loras, **settings)
    return EngineCore(runner, EmbeddedEngine(max_num_batched_tokens=24))


def lora(path: Path, lora_id: int, **fields: Any) -> WireLoRARequest:
    return WireLoRARequest(path.name, lora_id, str(path), **fields)


def add(
    engine: EngineCore,
    request_id: str,
    adapter: WireLoRARequest | None,
    prompt: list[int] = PROMPT,
    max_tokens: int = MAX_TOKENS,
    **fields: Any,
) -> None:
    sampling = WireSamplingParams(temperature=0.0, max_tokens=max_tokens)
    engine.add(EngineCoreRequest(request_id, prompt, sampling_params=sampling, lora_request=adapter, **fields))


def run(engine: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while engine.has_work():
        for _, output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def error_of(outputs: list[EngineCoreOutput]) -> str:
    (output,) = outputs
    assert output.finish_reason is FinishReason.ERROR and output.error is not None
    return output.error.message


@pytest.mark.feature("R39")
@pytest.mark.parametrize("architecture", ["llama", "phi"])
def test_several_adapters_in_one_batch_give_pefts_tokens(
    architecture: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Chunks of prompts and single tokens of four kinds in each step; the lean pass, and transformers' own."""
    model_dir = make_tiny_model(architecture, tmp_path / architecture)
    engine = open_engine(model_dir)
    assert isinstance(engine._runner._residency.forward, FusedForward) is (architecture == "llama")  # type: ignore[attr-defined]
    names = [*KINDS, None]
    paths: dict[str | None, Path | None] = {None: None}
    for name, config in KINDS.items():
        paths[name] = make_adapter(model_dir, tmp_path / name, **config)
    prompts = [[(seed * 31 + 7 * i) % VOCAB_SIZE for i in range(10 + seed)] for seed in range(3)]
    references = {}
    for name in names:
        model = peft_model(model_dir, paths[name])
        references[name] = [reference_of(model, prompt, MAX_TOKENS) for prompt in prompts]
    for number, prompt in enumerate(prompts):
        for lora_id, name in enumerate(names, start=1):
            path = paths[name]
            add(engine, f"{name} {number}", lora(path, lora_id) if path else None, prompt)
    outputs = run(engine)
    answers = set()
    for name in names:
        for number, reference in enumerate(references[name]):
            found = tokens_of(outputs[f"{name} {number}"])
            answers.add((number, tuple(found)))
            if note := assert_agrees(f"{architecture} with {name}, prompt {number}", found, reference):
                record_property("note", note)
    assert len(answers) > 9, "the adapters change nothing: it tests nothing"


def test_adapters_do_not_share_blocks(engine: EngineCore, adapters: dict[str, Path]) -> None:
    """Not with each other, nor with the model; nor with what had the same id before."""
    first, second = lora(adapters["attention"], 1), lora(adapters["everything"], 2)
    prompt = PROMPT * 3

    def cached(adapter: WireLoRARequest | None, **fields: Any) -> int:
        add(engine, "r", adapter, prompt, max_tokens=1, **fields)
        ((output,),) = run(engine).values()
        assert output.prefill_stats is not None
        return output.prefill_stats.num_cached_tokens

    assert [cached(first), cached(None), cached(second)] == [0, 0, 0]
    assert [cached(first), cached(None), cached(second)] == [48, 48, 48]
    assert [cached(first, cache_salt="x"), cached(None, cache_salt="x"), cached(None, cache_salt="1:1")] == [0, 0, 0]
    assert cached(lora(adapters["attention"], 1, load_inplace=True)) == 0
    assert engine.utility("remove_lora", [1]) is True
    assert cached(first) == 0
    assert cached(first) == 48


def test_a_request_keeps_its_adapter_to_its_end(engine: EngineCore, adapters: dict[str, Path]) -> None:
    request = lora(adapters["everything"], 1)
    add(engine, "whole", request)
    expected = tokens_of(run(engine)["whole"])
    add(engine, "a", request)
    outputs = [output for _, output in engine.step()]
    engine.utility("remove_lora", [1])
    engine.utility("add_lora", [["other", 1, str(adapters["attention"])]])
    engine.utility("reset_prefix_cache", [True])  # and it is computed again
    engine.utility("sleep", [2, "keep"])
    engine.utility("wake_up", [])  # with weights that are loaded anew
    outputs += run(engine)["a"]
    assert tokens_of(outputs) == expected


@pytest.mark.feature("C26")
def test_adapters_are_added_listed_pinned_and_removed(engine: EngineCore, adapters: dict[str, Path]) -> None:
    def wire(lora_id: int) -> list[Any]:
        return [f"adapter {lora_id}", lora_id, str(adapters["attention"])]

    assert engine.ready_response().supports_lora is True
    assert engine.ready_response().max_loras == 3
    assert all(engine.utility("add_lora", [wire(lora_id)]) for lora_id in (5, 1, 3))
    assert engine.utility("list_loras", []) == [1, 3, 5]
    assert engine.utility("pin_lora", [5]) is True
    assert engine.utility("add_lora", [wire(7)]) is True  # in the place of 1, which was used longest ago
    assert engine.utility("list_loras", []) == [3, 5, 7]
    add(engine, "a", lora(adapters["attention"], 3), max_tokens=1)
    engine.utility("add_lora", [wire(8)])
    assert engine.utility("list_loras", []) == [3, 5, 8]
    assert engine.utility("remove_lora", [3]) is True
    assert engine.utility("remove_lora", [3]) is False
    with pytest.raises(ValueError, match=r"no LoRA adapter 3 is loaded; there are \[5, 8\]"):
        engine.utility("pin_lora", [3])
    engine.utility("add_lora", [wire(9)])
    for lora_id in (8, 9):
        engine.utility("pin_lora", [lora_id])
    with pytest.raises(ValueError, match="all of max_loras=3 adapters are pinned"):
        engine.utility("add_lora", [wire(10)])
    with pytest.raises(ValueError, match=r"lora_int_id=8 is the adapter from"):
        engine.utility("add_lora", [["other", 8, "/elsewhere"]])


def test_an_adapter_that_cannot_be_served_fails_its_request_alone(
    engine: EngineCore, adapters: dict[str, Path], tmp_path: Path
) -> None:
    def variant(name: str, weights: Callable[[dict[str, torch.Tensor]], Any] | None = None, **config: Any) -> Path:
        directory = tmp_path / name.replace(" ", "-")
        directory.mkdir()
        known = json.loads((adapters["attention"] / "adapter_config.json").read_text())
        (directory / "adapter_config.json").write_text(json.dumps({**known, **config}))
        tensors = load_file(adapters["attention"] / "adapter_model.safetensors")
        if weights is not None:
            weights(tensors)
        save_file(tensors, directory / "adapter_model.safetensors")
        return directory

    one = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    head = "base_model.model.lm_head.lora_A.weight"
    bare = variant("no weights")
    (bare / "adapter_model.safetensors").rename(bare / "adapter_model.bin")
    garbage = variant("garbage")
    (garbage / "adapter_model.safetensors").write_bytes(b"\x80\x04.")
    bad = {
        "No such file": tmp_path / "nowhere",
        "weights in pickle files are not read": bare,
        "adapter_model.safetensors: ": garbage,
        "peft_type is 'LOHA'": variant("loha", peft_type="LOHA"),
        "use_dora=True is not served": variant("dora", use_dora=True),
        "modules_to_save=['lm_head']": variant("modules", modules_to_save=["lm_head"]),
        "adapter_config.json: ": variant("type", r="four"),
        "only one of its two weights": variant("half", lambda tensors: tensors.pop(one)),
        "not a LoRA weight": variant("odd", lambda tensors: tensors.update(x=torch.zeros(1))),
        "no linear layer of this model": variant(
            "head",
            lambda tensors: tensors.update(
                {head: tensors[one].clone()} | {head.replace("_A", "_B"): tensors[one].clone()}
            ),
        ),
        "not the model's": variant("shape", lambda tensors: tensors.update({one: torch.zeros(4, 5)})),
    }
    for lora_id, (reason, path) in enumerate(bad.items(), start=1):
        add(engine, reason, lora(path, lora_id))
    add(engine, "good", lora(adapters["attention"], 99))
    outputs = run(engine)
    assert outputs["good"][-1].finish_reason is FinishReason.LENGTH
    for reason in bad:
        assert reason in error_of(outputs[reason])
    assert engine.utility("list_loras", []) == [99]


@pytest.mark.anyio
@pytest.mark.feature("R39")
@pytest.mark.feature("C26")
async def test_a_client_uses_adapters_of_our_engine(llama: Path, adapters: dict[str, Path]) -> None:
    engine = EmbeddedEngine(model=str(llama), num_threads=1, in_process=True, max_loras=2)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    answers = []
    with anyio.fail_after(60):
        async with EngineClient(engine=engine) as client:
            for name in ("attention", "everything", None):
                lora_request = LoRARequest(name, len(answers) + 1, str(adapters[name])) if name else None
                output = await client.generate(PROMPT, params, lora_request=lora_request).final()
                answers.append(tuple(output.outputs[0].token_ids))
            assert await client.list_loras() == {1, 2}
            assert await client.pin_lora(1) and await client.remove_lora(2)
            assert await client.list_loras() == {1}
            with pytest.raises(RequestRejected, match="adapter_config"):
                await client.generate(PROMPT, params, lora_request=LoRARequest("none", 9, "/nowhere")).final()
    assert len(set(answers)) == 3


def test_without_room_for_adapters_they_are_refused(llama: Path, adapters: dict[str, Path]) -> None:
    engine = open_engine(llama, max_loras=0)
    assert engine.ready_response().supports_lora is False
    add(engine, "a", lora(adapters["attention"], 1))
    assert "max_loras" in error_of(run(engine)["a"])
    with pytest.raises(NotImplementedError, match="max_loras"):
        engine.utility("add_lora", [["x", 1, "/x"]])
    assert engine.utility("list_loras", []) == []
