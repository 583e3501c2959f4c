"""What we understand of vLLM's arguments is what vLLM understands: names, defaults, values, topologies; and live."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm_engines import make_vllm_model, on_asyncio, on_trio, one_process, tiny_vllm

from anyengine import EngineClient, EngineStartupError, RequestRejected, SamplingParams, VLLMEngine
from anyengine.testing._profiles import deep_profile
from anyengine.vllm.arguments import UnderstoodArguments, understand_arguments
from anyengine.vllm.topology import derive_topology

CHILD = Path(__file__).with_name("vllm_arguments_child.py")
REFUSED = "$refused"

LINES = [
    "",
    "--tokenizer t --tokenizer-mode slow --tokenizer-revision a --revision b --trust-remote-code",
    "--tokenizer None --revision None --hf-config-path None",
    "--served-model-name a b c --skip-tokenizer-init --hf-config-path /c",
    '--hf_overrides {"a":1} --generation-config vllm --override-generation-config {"temperature":0.5}',
    "--hf-overrides.a_b.c 1 --hf_overrides.a_b.d=x --hf-overrides.e+ 1,b --hf-overrides.e+=c --hf-overrides.n 4k",
    '--hf-overrides.a 1.5K --hf-overrides.b None --hf-overrides.c true --hf-overrides.d {"x":[1]}',
    "--runner pooling --convert embed -dp 3 -dpl=2 -dpa 1.2.3.4 -dpp 1234 -dpb ray",
    "-dpr 1 --data-parallel-rank 2 --no-data-parallel-hybrid-lb -dpe -dpm -dph",
    "-tp 2 -pp 3 -pcp 4 -n2 -r=1 --master-addr h --headless -asc 3 --enable-expert-parallel -dcp 2",
    "--max-logprobs -1 --enable-prompt-embeds --enable-lora --max-loras 3 --max-lora-rank 32",
    '--no-enable-lora --structured-outputs-config {"backend":"guidance"} --reasoning-parser deepseek_r1',
    "--structured-outputs-config.backend xgrammar --structured-outputs-config.disable_any_whitespace=true",
    "--scheduling-policy priority --max-num-queued-reqs 5 --max-num-queued-tokens 1.5k --stream-interval 4",
    "--max-num-queued-reqs None --max-num-queued-tokens 2K --shutdown-timeout 30 --disable-log-stats",
    "--aggregate-engine-logging --enable-log-requests --otlp-traces-endpoint http://x:1 --collect-detailed-traces all",
    "--collect-detailed-traces model worker -O3 -O.x --max-model-len 4k -cc.mode 0 -q awq --seed=-1",
    "--mm-processor-cache-gb 0.5 --mm-processor-cache-type shm",
    "--mm-processor-cache-gb x",
    "--max-model-len -1 -O 3 --max-logprobs 7 --max_logprobs=8 --kv-transfer-config.kv_role kv_both",
    '--reasoning-config {"reasoning_start_str":"<t>"} --pooler-config {"use_activation":false} --enable-trace-replay',
    "--pooler-config.dimensions 8 --reasoning-config.reasoning_parser x --enable-fault-tolerance",
    "--pooler-config None --reasoning-config None --no-enable-trace-replay",
    "-dp x",
    "--max-logprobs",
    "--enable-lora=yes",
    "--override-generation-config {",
    "--max-num-queued-tokens 1.5K",
    "--max-log 3",
    "--data-parallel-si 3",
    "--no-such-flag 3",
    "--no-headless",
]
UNKNOWN_TO_US = {"--max-log 3", "--data-parallel-si 3", "--no-such-flag 3", "--no-headless"}
"""Refused by vLLM, and left alone by us."""

MAPPINGS: list[dict[str, Any]] = [
    {},
    {"data_parallel_size": 2, "max_logprobs": -1, "enable_lora": True, "served_model_name": ["a", "b"]},
    {"served_model_name": "a", "hf_overrides": {"a": {"b": 1}}, "collect_detailed_traces": ["all"]},
]

DENSE, MOE = "dense", "moe"
TOPOLOGIES = [
    (model, line)
    for model in (DENSE, MOE)
    for line in [
        "",
        "-dp 4",
        "-dp 4 --api-server-count 2",
        "-dp 4 -dpl 4",
        "-dp 4 -dpl 2",
        "-dp 4 -dpl 1",
        "-dp 4 -dpl 0 -dpa 10.0.0.5",
        "-dp 4 -dpl 2 -dpa ::1 -dpp 5000",
        "-dp 4 -dpl 2 -dpr 2",
        "-dp 4 -dpl 2 -dpr 0",
        "-dp 4 -dpl 1 -dpr 3",
        "-dp 4 -dpl 1 -dph",
        "-dp 4 -dpl 2 -dph",
        "-dp 4 -dpl 4 -dph",
        "-dp 4 -dpr 2",
        "-dp 4 -dpl 2 -dpr 2 --headless",
        "-dp 4 -dpl 2 --headless -dpa 10.0.0.5",
        "--headless",
        "-dp 2 -dpn 0",
        "-dp 2 -dpn 1 -dpa 10.0.0.5",
        "-dp 2 -dpe",
        "-dp 2 -dpn 2",
        "-dpn 0",
        "-dpl 1 -dph",
        "-dp 2 -dpn 1 -dpl 2",
        "-dp 2 -dph",
        "-dp 2 -dpl 3",
        "-dp 2 -dpn 1 -dph",
        "-dp 4 -dpl 2 -dph --headless",
        "--headless --api-server-count 1",
        "-dp 4 -n 2",
        "-dp 4 -n 2 -r 1 --headless --master-addr 10.0.0.7",
        "-dp 4 -n 2 -r 1",
        "-dp 4 -n 2 -r 1 -dpl 2 -dpr 2",
        "-dp 2 -n 4 -r 3 -tp 2 --headless",
        "-dp 2 -n 2 -r 1 -dpe",
        "-dp 3 -n 2",
        "-dp 2 -n 2 -r 2",
        "-dp 2 -n 2 -dpb ray",
    ]
]

FAKE_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0, 1],
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
"""Experts by its configuration, and none that are used."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("moe")
    (directory / "config.json").write_text(json.dumps(FAKE_MOE))
    return directory


# ------------------------------------------------------------------------------------------ held against vLLM's own


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """Command lines of flags that both sides know, spelled in every way."""
    names = st.text("abc_", min_size=1, max_size=3)
    texts = st.sampled_from(["x", "a-b", "None", "1k", "0.5", "a,b", "true", "{}", "=", "é", "-1"])
    numbers = st.integers(-3, 70_000).map(str)
    flags: list[tuple[str, st.SearchStrategy[str] | None]] = [
        *[(flag, texts) for flag in ("--tokenizer", "--revision", "--generation_config", "-dpa", "--hf-config-path")],
        *[(flag, numbers) for flag in ("--max-logprobs", "-dp", "-tp", "--stream_interval", "-n", "-r")],
        *[(flag, None) for flag in ("--enable-lora", "--no-enable_lora", "--disable-log-stats", "--headless", "-dph")],
        ("--max-num-queued-tokens", st.sampled_from(["5", "1k", "2M", "1.25m", "None", "1.5K", "x"])),
        ("--served-model-name", texts.filter(lambda text: text != "None")),
        ("--seed", numbers),
        ("--max-model-len", numbers),
        ("--enforce-eager", None),
    ]
    line: list[str] = []
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.integers(0, 4)) == 0:
            path = ".".join(["--hf_overrides", *draw(st.lists(names, min_size=1, max_size=3))])
            flag, value = path + draw(st.sampled_from(["", "+"])), texts
        else:
            flag, value = draw(st.sampled_from(flags))
        if value is None:
            line.append(flag)
        elif draw(st.booleans()):
            line.append(f"{flag}={draw(value)}")
        else:
            line += [flag, draw(value)]
    return line


def generated(count: int) -> list[list[str]]:
    collected: list[list[str]] = []

    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(lines())
    def collect(line: list[str]) -> None:
        collected.append(line)

    collect()
    return collected


@pytest.fixture(scope="module")
def questions(model: Path, moe_model: Path) -> dict[str, list[Any]]:
    models = {DENSE: str(model), MOE: str(moe_model)}
    return {
        "lines": [*(line.split() for line in LINES), *generated(5000 if deep_profile() else 1500)],
        "mappings": MAPPINGS,
        "topologies": [(models[name], line.split()) for name, line in TOPOLOGIES],
    }


@pytest.fixture(scope="module")
def answers(vllm_python: str, questions: dict[str, list[Any]]) -> Iterator[dict[str, list[Any]]]:
    """vLLM's, of one process."""
    # Offline, vLLM looks for the model as soon as it has its name.
    left_out = ("PYTHONPATH", "HF_HUB_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    read, write = os.pipe()
    with subprocess.Popen(
        [vllm_python, str(CHILD), str(write)],
        stdin=subprocess.PIPE,
        pass_fds=[write],
        env={**environment, "VLLM_LOGGING_LEVEL": "ERROR"},
    ) as child:
        os.close(write)
        assert child.stdin is not None
        child.stdin.write(json.dumps(questions).encode())
        child.stdin.close()
        with os.fdopen(read) as result:
            yield json.loads(result.read())


def ours(args: Any) -> dict[str, Any]:
    try:
        return msgspec.structs.asdict(understand_arguments(args))
    except ValueError as exc:
        return {REFUSED: str(exc)}


def our_topology(line: list[str], *, is_moe: bool) -> dict[str, Any]:
    try:
        topology = derive_topology(understand_arguments(line), is_moe=is_moe)
    except ValueError as exc:
        return {REFUSED: str(exc)}
    return dict(json.loads(msgspec.json.encode(topology)))


def as_vllm_has_it(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Their values of our names, in our spelling."""
    same = {name: theirs[name] for name in mine if name in theirs}
    # Its command line leaves a switch open where its class says False.
    same["enable_lora"] = bool(same["enable_lora"])
    for name in ("structured_outputs_config", "reasoning_config", "pooler_config"):
        if mine[name] is not None:  # of its config object, what was given
            same[name] = {key: same[name][key] for key in mine[name]}
    return same


@pytest.mark.feature("F02", "F03", "F04")
def test_command_lines(questions: dict[str, list[Any]], answers: dict[str, list[Any]]) -> None:
    refused = 0
    differences = []
    for line, theirs in zip(questions["lines"], answers["lines"], strict=True):
        mine = ours(line)
        if REFUSED in theirs:
            refused += 1
            same = REFUSED in mine or " ".join(line) in UNKNOWN_TO_US
        else:
            same = REFUSED not in mine and mine == as_vllm_has_it(mine, theirs)
        if not same:
            differences.append((line, mine, theirs))
    assert not differences
    assert 0 < refused < len(questions["lines"]) / 2


@pytest.mark.feature("F02", "F03", "F04")
def test_mappings_and_defaults(answers: dict[str, list[Any]]) -> None:
    for mapping, theirs in zip(MAPPINGS, answers["mappings"], strict=True):
        mine = ours(mapping)
        for name in ("headless", "api_server_count"):  # vllm serve's, not the engine's
            mine.pop(name)
        assert mine == as_vllm_has_it(mine, theirs), mapping
    assert len(UnderstoodArguments.__struct_fields__) == 56


@pytest.mark.feature("F03")
def test_topologies(questions: dict[str, list[Any]], answers: dict[str, list[Any]]) -> None:
    refused = 0
    differences = []
    cases = zip(TOPOLOGIES, questions["topologies"], answers["topologies"], strict=True)
    for (name, _), (_, line), theirs in cases:
        mine = our_topology(line, is_moe=name == MOE)
        if REFUSED in theirs:
            refused += 1
            same = REFUSED in mine
        else:
            same = {fact: mine.get(fact) for fact in theirs} == theirs
        if not same:
            differences.append((name, line, mine, theirs))
    assert not differences
    assert 0 < refused < len(TOPOLOGIES) / 2


# ------------------------------------------------------------------------------------------------------------- live

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


async def tokens(client: EngineClient) -> list[int]:
    return [token async for output in client.generate([1, 2, 3], GREEDY) for token in output.token_ids]


def with_strings(engine: VLLMEngine, *strings: str) -> VLLMEngine:
    """``engine`` with its arguments as the strings of a command line, and some more."""
    own = ["--dtype=float32", "--enforce-eager", "--max_num_seqs", "8"]
    return msgspec.structs.replace(engine, args=[*own, *strings])


@pytest.mark.anyio
@pytest.mark.feature("F01", "F02", "F03")
@on_asyncio
async def test_two_ranks_of_one_engine_by_command_line(vllm_python: str, model: Path) -> None:
    engine = with_strings(
        tiny_vllm(vllm_python, model, env=one_process),
        *("-dp", "2", "--max-model-len", "1k", "--skip-tokenizer-init", "--no-enable-prefix-caching"),
        *("--compilation-config.mode=0", "--shutdown-timeout", "1"),
    )
    with anyio.fail_after(200):
        async with EngineClient(engine=engine, startup_timeout_s=150) as client:
            assert client.ranks == (0, 1)
            assert [ready and ready.max_model_len for ready in client.core.registrations.values()] == [1000, 1000]
            assert client.core.engine_arguments == engine.understood
            streams = [await client.submit([1, 2, 3], GREEDY) for _ in range(4)]
            answers = [[token async for output in one for token in output.token_ids] for one in streams]
            assert [one.rank for one in streams] == [0, 1, 0, 1]
            assert answers == [answers[0]] * 4 and len(answers[0]) == 8
            with pytest.raises(RequestRejected, match="skip_tokenizer_init"):
                await client.submit("text", GREEDY)


@pytest.mark.anyio
@pytest.mark.feature("F01")
@on_trio
async def test_vllm_refuses_strings_and_experts_in_ranks(vllm_python: str, model: Path, moe_model: Path) -> None:
    """At the same time, since most of it is importing vLLM; and long before anything could hang."""
    errors: dict[str, EngineStartupError] = {}

    async def start(name: str, engine: VLLMEngine) -> None:
        with pytest.raises(EngineStartupError) as caught:
            async with EngineClient(engine=engine, startup_timeout_s=120):
                pytest.fail("it must not become ready")
        errors[name] = caught.value

    base = tiny_vllm(vllm_python, model)
    experts = tiny_vllm(vllm_python, moe_model, skip_tokenizer_init=True, data_parallel_size=2)
    with anyio.fail_after(150):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start, "flag", with_strings(base, "--no-such-flag", "3"))
            tasks.start_soon(start, "experts", experts)
    assert {(error.exit_code, error.stage) for error in errors.values()} == {(1, "configuring")}
    assert errors["flag"].child_exception == "ValueError: unrecognized arguments: --no-such-flag 3"
    assert "is a mixture of experts: its data-parallel ranks (data_parallel_size=2" in str(errors["experts"])
