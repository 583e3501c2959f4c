"""The transformers runner on tiny models: the same tokens as ``generate``, whoever else is in the batch."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from reference_generation import Reference, assert_agrees, reference_of
from tiny_models import (
    ARCHITECTURES,
    MAX_POSITIONS,
    VOCAB_SIZE,
    advance,
    generate_staggered,
    give_blocks,
    leave,
    make_sequence,
    make_tiny_model,
    open_runner,
)

from anyengine.config import EmbeddedEngine
from anyengine.engine.interfaces import ModelRunner, ScheduledSequence
from anyengine.engine.runner.fused import FusedForward
from anyengine.engine.runner.kernels.decode_attention import DecodeAttention
from anyengine.engine.runner.kernels.elementwise import Gate, Norm, Rotation
from anyengine.engine.runner.kernels.few_rows import FewRows
from anyengine.engine.runner.kernels.library import Kernels
from anyengine.engine.runner.model_runner import create_runner

MAX_TOKENS = 16
_random = random.Random(2)
PROMPTS = [[_random.randrange(VOCAB_SIZE) for _ in range(_random.randrange(1, 40))] for _ in range(16)]
TEN_TOKENS = list(range(20, 30))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def tiny_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def references(tiny_model: Path) -> list[Reference]:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype="float32")
    return [reference_of(model, prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("models") / "qwen2")


@pytest.fixture
def runner(qwen2: Path) -> Iterator[ModelRunner]:
    runner = open_runner(qwen2)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def tiny_runner(tiny_model: Path) -> ModelRunner:
    return open_runner(tiny_model)


@pytest.mark.feature("F16")
@pytest.mark.parametrize(
    ("num_prompts", "batch_size", "chunk_tokens"),
    [(3, 1, 10**6), (16, 8, 10**6), (16, 8, 7)],
    ids=["alone", "batch of 8", "batch of 8 in chunks"],
)
def test_greedy_ids_equal_generate(
    tiny_model: Path,
    tiny_runner: ModelRunner,
    references: list[Reference],
    num_prompts: int,
    batch_size: int,
    chunk_tokens: int,
    record_property: Callable[[str, object], None],
) -> None:
    seqs = [make_sequence(str(i), prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(PROMPTS[:num_prompts])]
    generate_staggered(tiny_runner, seqs, batch_size=batch_size, chunk_tokens=chunk_tokens)
    assert num_prompts < len(PROMPTS) or len({token for seq in seqs for token in seq.output_token_ids}) > 10, (
        "the model repeats itself: it tests nothing"
    )
    for seq, reference in zip(seqs, references, strict=False):
        if note := assert_agrees(f"{tiny_model.name}, prompt {seq.request_id}", seq.output_token_ids, reference):
            record_property("note", note)
            print(note)


def test_the_family_of_llama_takes_the_lean_pass(tiny_model: Path, tiny_runner: ModelRunner) -> None:
    fused = isinstance(tiny_runner._residency.forward, FusedForward)  # type: ignore[attr-defined]  # two ways to one result
    assert fused is (tiny_model.name in {"llama", "llama_wide", "mistral", "qwen2", "qwen3"})


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_bfloat16_is_as_close_as_transformers_own(architecture: str, tmp_path: Path) -> None:
    """Prompts, chunks and single tokens: what we make of them in bfloat16 is no further from float32 than theirs."""
    model_dir = make_tiny_model(architecture, tmp_path / architecture, initializer_range=0.1)
    prompt = PROMPTS[0] + TEN_TOKENS * 3
    runner = open_runner(model_dir, dtype="bfloat16")
    assert isinstance(runner._residency.forward, FusedForward) is (architecture != "gemma2")  # type: ignore[attr-defined]
    seq = make_sequence("a", prompt, prompt_logprobs=0)
    runner.start(seq)
    scores = None
    for num_tokens in (20, len(prompt) - 23, 1, 1, 1):
        give_blocks(runner, seq, len(prompt))
        (token,) = runner.step([ScheduledSequence(seq, num_tokens)])
        seq.num_computed_tokens += num_tokens
        scores = token.prompt_logprobs if token is not None else None
    assert scores is not None
    ours = torch.frombuffer(bytearray(scores.logprobs.data), dtype=torch.float32)
    exact, theirs = (_prompt_logprobs(model_dir, prompt, dtype) for dtype in ("float32", "bfloat16"))
    assert (ours - exact).square().mean() <= 2 * (theirs - exact).square().mean()


def _prompt_logprobs(model_dir: Path, prompt: list[int], dtype: str) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(dim=-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


def test_a_lean_pass_that_differs_is_not_used(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("anyengine.engine.runner.fused._Norm.__call__", lambda _self, x, _more=None: x)
    runner = open_runner(qwen2)
    assert not isinstance(runner._residency.forward, FusedForward)  # type: ignore[attr-defined]
    assert "does not agree with transformers'" in caplog.text
    expected, seq = (make_sequence(name, PROMPTS[0], max_tokens=4) for name in ("expected", "found"))
    monkeypatch.undo()
    generate_staggered(open_runner(qwen2), [expected], batch_size=1)
    generate_staggered(runner, [seq], batch_size=1)
    assert seq.output_token_ids == expected.output_token_ids


KERNELS = {"attention": DecodeAttention, "few rows": FewRows, "norm": Norm, "rotation": Rotation, "gate": Gate}


def spoil(monkeypatch: pytest.MonkeyPatch, kernel: type) -> None:
    """What ``kernel`` computes is larger by one from now on."""
    compute = kernel.__call__

    def spoiled(self: object, *arguments: Any) -> Any:
        result = compute(self, *arguments)
        changed = arguments[0] if kernel is Rotation else result
        if changed is None:
            changed = next(one for one in reversed(arguments) if isinstance(one, torch.Tensor))
        changed += 1
        return result

    monkeypatch.setattr(kernel, "__call__", spoiled)


@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [*(("llama_wide", kernel) for kernel in KERNELS), ("gemma2", "attention"), ("gemma2", "few rows")],
)
def test_kernels_that_compute_something_else_are_not_used(
    architecture: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_tiny_model(architecture, tmp_path / architecture)
    sound = open_runner(model_dir)
    spoil(monkeypatch, KERNELS[kernel])
    runner = open_runner(model_dir)
    assert "kernels for this processor do not agree with torch" in caplog.text
    assert_torch_computes(runner, sound, monkeypatch)


def assert_torch_computes(runner: ModelRunner, sound: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner._residency.forward.kernels is None is not sound._residency.forward.kernels  # type: ignore[attr-defined]
    found, expected = (make_sequence(name, PROMPTS[0], max_tokens=4) for name in ("found", "expected"))
    generate_staggered(runner, [found], batch_size=1)
    monkeypatch.undo()
    generate_staggered(sound, [expected], batch_size=1)
    assert found.output_token_ids == expected.output_token_ids


@pytest.mark.parametrize("fails", ["check", "compile"])
def test_a_compiler_that_fails_leaves_it_to_torch(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_tiny_model("llama_wide", tmp_path / "llama")
    sound = open_runner(model_dir)

    def fail(*_: object) -> None:
        raise RuntimeError("no memory may become executable")

    package = "anyengine.engine.runner.kernels"
    if fails == "check":
        monkeypatch.setattr(f"{package}.compiler.check_compiler", fail)
    else:
        monkeypatch.setattr(f"{package}._kernels", Kernels)  # none that were made before
        monkeypatch.setattr(f"{package}.decode_attention.compile_function", fail)
    runner = open_runner(model_dir)
    assert "no memory may become executable" in caplog.text
    assert_torch_computes(runner, sound, monkeypatch)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_any_of_torchs_ways_to_compute_attention_will_do(enforce_eager: bool, tmp_path: Path) -> None:
    """What it finds lies in memory as that way has it."""
    runner = open_runner(make_tiny_model("llama_wide", tmp_path / "llama"), enforce_eager=enforce_eager)
    expected, found = (make_sequence(name, PROMPTS[1], max_tokens=4) for name in ("expected", "found"))
    generate_staggered(runner, [expected], batch_size=1, chunk_tokens=5)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        generate_staggered(runner, [found], batch_size=1, chunk_tokens=5)
    assert found.output_token_ids == expected.output_token_ids


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_no_kernels_are_compiled_if_that_is_asked_for(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = make_tiny_model(architecture, tmp_path / architecture)
    eager = open_runner(model_dir, enforce_eager=True)
    assert eager._residency.forward.kernels is None  # type: ignore[attr-defined]
    found, expected = (make_sequence(name, PROMPTS[1], max_tokens=6) for name in ("found", "expected"))
    generate_staggered(open_runner(model_dir), [expected], batch_size=1)
    for kernel in KERNELS.values():
        spoil(monkeypatch, kernel)
    generate_staggered(eager, [found], batch_size=1)
    assert found.output_token_ids == expected.output_token_ids


def test_a_step_is_one_pass_over_the_new_tokens_of_all(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is recomputed or padded when another joins."""
    passes: list[int] = []
    forward = runner._residency.forward  # type: ignore[attr-defined]  # what the runner asks of the model is the point here

    def counting(input_ids: torch.Tensor, *args: Any) -> Any:
        passes.append(len(input_ids))
        return forward(input_ids, *args)

    counting.kernels = forward.kernels  # type: ignore[attr-defined]  # the rest of a forward pass
    monkeypatch.setattr(runner._residency, "_forward", counting)  # type: ignore[attr-defined]
    seqs = [make_sequence(str(index), TEN_TOKENS * (index + 1), max_tokens=50) for index in range(3)]
    running = []
    for seq in seqs:
        runner.start(seq)
        running.append(seq)
        advance(runner, running)
        advance(runner, running)
    assert passes == [10, 1, 21, 2, 32, 3]


def test_any_subset_and_order_of_sequences_may_be_scheduled(runner: ModelRunner) -> None:
    """Results come back in the order of the schedule."""
    seqs = [make_sequence(str(index), PROMPTS[index], max_tokens=12) for index in range(5)]
    expected = [make_sequence(f"alone {index}", PROMPTS[index], max_tokens=12) for index in range(5)]
    generate_staggered(runner, expected, batch_size=1)
    for seq in seqs:
        runner.start(seq)
    choose = random.Random(3)
    while unfinished := [seq for seq in seqs if len(seq.output_token_ids) < 12]:
        advance(runner, choose.sample(unfinished, choose.randrange(1, len(unfinished) + 1)))
    assert [seq.output_token_ids for seq in seqs] == [seq.output_token_ids for seq in expected]


def test_a_preempted_sequence_resumes_with_the_same_tokens(runner: ModelRunner) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 12}
    expected, seq = make_sequence("whole", PROMPTS[1], **sampling), make_sequence("interrupted", PROMPTS[1], **sampling)
    generate_staggered(runner, [expected], batch_size=1)
    runner.start(seq)
    for _ in range(5):
        advance(runner, [seq])
    leave(runner, seq)
    seq.num_computed_tokens = 0
    generate_staggered(runner, [seq], batch_size=1)
    assert seq.output_token_ids == expected.output_token_ids


@pytest.mark.feature("R06")
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch_of_16(runner: ModelRunner) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 16, "top_p": 0.95}
    alone, crowded = make_sequence("alone", PROMPTS[2], **sampling), make_sequence("crowded", PROMPTS[2], **sampling)
    generate_staggered(runner, [alone], batch_size=1)
    others = [make_sequence(str(index), PROMPTS[index], temperature=1.0, max_tokens=30) for index in range(15)]
    generate_staggered(runner, [*others, crowded], batch_size=16, steps_between=1)
    assert crowded.output_token_ids == alone.output_token_ids


def test_requests_without_a_seed_differ(runner: ModelRunner) -> None:
    seqs = [make_sequence(str(index), PROMPTS[2], temperature=1.0, max_tokens=16) for index in range(2)]
    generate_staggered(runner, seqs, batch_size=2)
    assert seqs[0].output_token_ids != seqs[1].output_token_ids


def test_min_tokens_keep_the_end_away(runner: ModelRunner) -> None:
    free = make_sequence("free", PROMPTS[3], max_tokens=4)
    generate_staggered(runner, [free], batch_size=1)
    first = free.output_token_ids[0]
    bound = make_sequence(
        "bound", PROMPTS[3], max_tokens=4, min_tokens=2, eos_token_id=first, all_stop_token_ids={first}
    )
    generate_staggered(runner, [bound], batch_size=1)
    assert first not in bound.output_token_ids[:2]


def test_start_refuses_what_cannot_be_done_and_keeps_nothing(runner: ModelRunner) -> None:
    for refused in ({"thinking_token_budget": 1}, {"logit_bias": {VOCAB_SIZE: 1.0}}, {"bad_words": ["word"]}):
        with pytest.raises(ValueError, match=next(iter(refused))):
            runner.start(make_sequence("refused", PROMPTS[0], **refused))
    runner.start(make_sequence("refused", PROMPTS[0]))


def test_the_cache_is_as_large_as_the_settings_say(qwen2: Path) -> None:
    block_bytes = 3 * 2 * 2 * 8 * 16 * 4  # layers, keys and values, heads, head_dim, tokens, float32
    runner = open_runner(qwen2, max_num_seqs=2)
    assert (runner.num_kv_blocks, runner.kv_block_tokens) == (2 * MAX_POSITIONS // 16, 16)
    assert open_runner(qwen2, kv_cache_memory_bytes=50 * block_bytes).num_kv_blocks == 50
    small = open_runner(qwen2, kv_cache_memory_bytes=4 * block_bytes + 1)
    assert (small.num_kv_blocks, small.max_model_len) == (4, 64)
    with pytest.raises(ValueError, match=r"room for the keys and values of 64 tokens.*max_model_len=65"):
        open_runner(qwen2, kv_cache_memory_bytes=4 * block_bytes, max_model_len=65)


def test_limits_of_the_model(qwen2: Path) -> None:
    runner = open_runner(qwen2)
    assert (runner.vocab_size, runner.max_model_len, runner.dtype) == (VOCAB_SIZE, MAX_POSITIONS, "float32")
    assert runner.eos_token_ids == ()
    assert open_runner(qwen2, max_model_len=64, dtype="bfloat16").max_model_len == 64
    with pytest.raises(ValueError, match=f"max_model_len={MAX_POSITIONS + 1}.*{MAX_POSITIONS}"):
        open_runner(qwen2, max_model_len=MAX_POSITIONS + 1)


def test_a_sequence_may_fill_the_model_to_its_last_position(qwen2: Path) -> None:
    runner = open_runner(qwen2, max_model_len=16)
    seq = make_sequence("long", TEN_TOKENS, max_tokens=1000)
    runner.start(seq)
    while seq.num_tokens < 16:
        advance(runner, [seq])
    assert seq.num_tokens == 16


def test_all_end_ids_of_the_generation_config_are_known(tmp_path: Path) -> None:
    model_dir = make_tiny_model("qwen2", tmp_path / "model", eos_token_id=7)
    assert open_runner(model_dir).eos_token_ids == (7,)
    transformers.GenerationConfig(eos_token_id=[7, 9]).save_pretrained(model_dir)
    assert open_runner(model_dir).eos_token_ids == (7, 9)


def test_pickled_weights_are_not_read(qwen2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((qwen2 / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(ValueError, match="safetensors"):
        open_runner(tmp_path)


def test_progress_is_reported(qwen2: Path) -> None:
    reports: list[Any] = []
    create_runner(EmbeddedEngine(model=str(qwen2)), reports.append)
    assert [report.stage for report in reports] == ["resolving", "resolving", "loading", "loading"]
    assert reports[1].model_dir == str(qwen2)
    assert [report.fraction for report in reports[2:]] == [0.0, 1.0]


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_a_missing_package_names_the_extra(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import anyengine.engine.runner.model_runner"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert 'pip install "anyengine[torch]"' in done.stderr.splitlines()[-1]


def test_a_step_may_be_all_chunks(runner: ModelRunner) -> None:
    seq = make_sequence("chunked", TEN_TOKENS)
    runner.start(seq)
    give_blocks(runner, seq, 4)
    assert runner.step([ScheduledSequence(seq, 4)]) == [None]


def test_blocks_that_others_have_computed_serve_as_well(runner: ModelRunner) -> None:
    first, second = (make_sequence(name, TEN_TOKENS * 4, max_tokens=8) for name in ("first", "second"))
    generate_staggered(runner, [first], batch_size=1)
    runner.start(first)
    runner.start(second)
    first.num_computed_tokens = 0
    advance(runner, [first])  # 48 tokens, three blocks
    second.block_ids += first.block_ids[:2]
    second.num_computed_tokens = 32
    while len(second.output_token_ids) < 8:
        advance(runner, [second])
    assert second.output_token_ids == first.output_token_ids[:8]
