"""The arguments of vLLM that a client understands, in both forms (``tests/interop`` holds them against vLLM's own)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from anyengine import CommandEngine, EmbeddedEngine, EngineCoreClient, RemoteEngine, VLLMEngine
from anyengine.vllm.arguments import UnderstoodArguments, understand_arguments


def given(args: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """What differs from the defaults."""
    understood, defaults = (msgspec.structs.asdict(it) for it in (understand_arguments(args), UnderstoodArguments()))
    return {name: value for name, value in understood.items() if value != defaults[name]}


@pytest.mark.feature("F02", "F03", "F04")
@pytest.mark.parametrize(
    ("strings", "values"),
    [
        ([], {}),
        (["--max-logprobs", "5"], {"max_logprobs": 5}),
        (["--max_logprobs=5"], {"max_logprobs": 5}),
        (["--mm-processor-cache-gb", "0.5"], {"mm_processor_cache_gb": 0.5}),
        (["--mm-processor-cache-type=shm"], {"mm_processor_cache_type": "shm"}),
        (["-dp", "2", "-tp=4"], {"data_parallel_size": 2, "tensor_parallel_size": 4}),
        (["-n2", "-r", "1"], {"nnodes": 2, "node_rank": 1}),
        (["--enable-lora", "--no-enable-prompt-embeds"], {"enable_lora": True}),
        (["--skip-tokenizer-init", "--no-skip-tokenizer-init"], {}),
        (["--max-logprobs", "5", "--max-logprobs", "6"], {"max_logprobs": 6}),
        (["--max-num-queued-tokens", "1.5k"], {"max_num_queued_tokens": 1500}),
        (["--max-num-queued-tokens", "2K"], {"max_num_queued_tokens": 2048}),
        (["--served-model-name", "a", "b", "--headless"], {"served_model_name": ["a", "b"], "headless": True}),
        (["--revision", "None", "--tokenizer", "None"], {"tokenizer": "None"}),
        (["--hf-overrides", '{"a_b": 1}'], {"hf_overrides": {"a_b": 1}}),
        (["--hf_overrides.a_b.c", "1", "--hf-overrides.a_b.d=x"], {"hf_overrides": {"a_b": {"c": 1, "d": "x"}}}),
        (["--hf-overrides.l+", "a,b", "--hf-overrides.l+=c"], {"hf_overrides": {"l": ["a", "b", "c"]}}),
        (["--structured-outputs-config.backend", "xgrammar"], {"structured_outputs_config": {"backend": "xgrammar"}}),
        # What is not understood, its values, and what looks like more than it is.
        (["--no-such-flag", "x", "-O3", "-cc.mode", "3", "-q=awq", "--watermark", "0.5", "--x=-dp"], {}),
        (["--compilation-config.mode", "-dp", "--max-logprobs", "5"], {"max_logprobs": 5}),
    ],
)
def test_strings(strings: list[str], values: dict[str, Any]) -> None:
    assert given(strings) == values


def test_names() -> None:
    args = {
        "max_logprobs": 5,
        "served_model_name": ("a", "b"),
        "hf_overrides": {"a": 1},
        "revision": None,
        "enable_lora": None,
        "no_such_argument": object,
    }
    assert given(args) == {"max_logprobs": 5, "served_model_name": ["a", "b"], "hf_overrides": {"a": 1}}


def test_nothing_is_shared_with_the_caller() -> None:
    overrides = {"a": [1]}
    understood = understand_arguments({"hf_overrides": overrides})
    overrides["a"].append(2)
    assert understood.hf_overrides == {"a": [1]}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max_logprobs": "5"}, "max_logprobs='5' cannot be right: Expected `int`, got `str`"),
        ({"data_parallel_size": True}, "data_parallel_size=True"),
        ({"structured_outputs_config": [1]}, "structured_outputs_config"),
        ({"collect_detailed_traces": [1]}, r"collect_detailed_traces=\[1\]"),
        (["-dp", "two"], "--data-parallel-size/-dp: invalid int value: 'two'"),
        (["--max-num-queued-tokens", "1.5K"], "--max-num-queued-tokens: invalid int"),
        (["--max-logprobs"], "--max-logprobs: expected one argument"),
        (["--enable-lora=yes"], "ignored explicit argument 'yes'"),
        (["--override-generation-config", "{"], "invalid JSON value"),
        (["--hf-overrides.a"], r"--hf-overrides.a stands without a value"),
        (["--config", "f.yaml"], "'--config' refers to a file"),
        (["--config=f.yaml"], "file of arguments"),
    ],
)
def test_what_cannot_be_right(args: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        understand_arguments(args)
    with pytest.raises(ValueError, match=words):
        VLLMEngine("m", args=args)


@pytest.mark.parametrize("form", ["names", "strings"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("headless", True),
        ("data_parallel_rank", 0),
        ("data_parallel_start_rank", 1),
        ("data_parallel_address", "10.0.0.5"),
        ("data_parallel_rpc_port", 29550),
        ("data_parallel_hybrid_lb", True),
        ("data_parallel_external_lb", True),
        ("data_parallel_multi_port_external_lb", True),
        ("data_parallel_backend", "ray"),
        ("data_parallel_size_local", 3),
        ("data_parallel_size", 0),
        ("api_server_count", 4),
    ],
)
def test_what_contradicts_being_started_by_a_client(form: str, name: str, value: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    strings = ["-dp", "2", flag] if value is True else ["-dp", "2", f"{flag}={value}"]
    args = {"data_parallel_size": 2, name: value} if form == "names" else strings
    with pytest.raises(ValueError, match=rf"{name}={value!r}") as caught:
        VLLMEngine("m", args=args)
    assert any(word in str(caught.value) for word in ("leave it out", "RemoteEngine", "at least 1"))


def test_ranks_on_several_nodes_are_not_started() -> None:
    with pytest.raises(ValueError, match="nnodes=2"):
        VLLMEngine("m", args=["-n", "2", "-dp", "2"])
    assert VLLMEngine("m", args=["-n", "2", "-tp", "2"]).understood.nnodes == 2  # one rank, vLLM's own affair


@pytest.mark.feature("F03")
def test_one_engine_can_stand_for_all_ranks() -> None:
    engine = VLLMEngine("m", args={"data_parallel_size": 3, "data_parallel_size_local": 3})
    assert EngineCoreClient(engine)._settings.engines == (engine,) * 3
    assert EngineCoreClient(VLLMEngine("m", args=["-dp", "2"]))._settings.engines[1:]
    with pytest.raises(ValueError, match="data_parallel_size=3 stands for all ranks"):
        EngineCoreClient([engine, VLLMEngine("m")])


@pytest.mark.feature("F04")
def test_what_a_client_does_with_them() -> None:
    engine = VLLMEngine("some/model", args=["--shutdown-timeout", "30", "--structured-outputs-config.backend=guidance"])
    core = EngineCoreClient(engine)
    assert core._settings.shutdown_grace_s >= 30 + 20
    assert core.engine_arguments is not None
    assert core.engine_arguments.model == "some/model"
    assert core.engine_arguments.structured_outputs_backend == "guidance"
    assert EngineCoreClient(engine, shutdown_grace_s=1)._settings.shutdown_grace_s == 1
    assert EngineCoreClient(VLLMEngine("m"))._settings.shutdown_grace_s == 20
    for other in (EmbeddedEngine(), CommandEngine(argv=("x",)), RemoteEngine(handshake="tcp://127.0.0.1:1")):
        assert EngineCoreClient(other).engine_arguments is None
        assert EngineCoreClient(other)._settings.shutdown_grace_s == 5


@pytest.mark.feature("F02")
def test_a_tokenizer_that_is_skipped() -> None:
    assert EngineCoreClient(VLLMEngine("m", args=["--skip-tokenizer-init"])).skips_text
    assert not EngineCoreClient(VLLMEngine("m", args=["--skip-tokenizer-init"], model_dir="/m")).skips_text
    assert not EngineCoreClient(VLLMEngine("m")).skips_text
