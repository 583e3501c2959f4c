"""Logits processors that were brought along: they change the answers of those who ask for it, and of nobody else."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from tiny_models import VOCAB_SIZE, advance, make_sequence, make_tiny_model, open_runner

from anyengine import EmbeddedEngine, EngineClient, EngineStartupError, RequestFailed, RequestRejected, SamplingParams
from anyengine._wire import EngineCoreOutput, EngineCoreRequest, FinishReason, WirePoolingParams, WireSamplingParams
from anyengine.engine.core.engine_core import EngineCore
from anyengine.engine.runner.logits_processors import find_logits_processors
from anyengine.engine.runner.sampler import sample

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NEVER_TWICE = "never_twice:NeverTwice"
PROMPT = [5, 6, 7]

PLUGINS = '''
import torch

class Seeing:
    """Notes what it is given, and forbids what ``extra_args`` says."""
    def __init__(self, model):
        self.model, self.started, self.seen, self.calls = model, [], [], 0
        made.append(self)
    def start(self, seq):
        self.started.append(seq.request_id)
        return (seq.sampling.extra_args or {}).get("forbid")
    def apply(self, logits, states):
        self.calls += 1
        self.seen.append(logits.clone())
        for row, forbidden in zip(logits, states, strict=True):
            row[forbidden] = -torch.inf
        return logits

class Force:
    """Sets one logit, in a new tensor."""
    def start(self, seq):
        return (seq.sampling.extra_args or {}).get("force")
    def apply(self, logits, states):
        changed = torch.full_like(logits, -torch.inf)
        changed[range(len(states)), states] = 0.0
        return changed

class Breaking:
    """Does what ``extra_args`` says after so many tokens; until then it raises all logits by the same."""
    def __init__(self, model):
        pass
    def start(self, seq):
        how, after = (seq.sampling.extra_args or {}).get("break", (None, 0))
        if how == "start":
            raise KeyError("no such thing")
        return None if how is None else (how, after, seq.output_token_ids)
    def apply(self, logits, states):
        for row, (how, after, output) in zip(logits, states, strict=True):
            row += 1.0
            if len(output) < after:
                continue
            if how == "raise":
                raise RuntimeError(f"as told after {after}")
            if how in ("none", "shape", "list"):
                return {"none": None, "shape": logits[:, :-1], "list": logits.tolist()}[how]
            row[:] = float(how)
        return logits

made = []
number = 7

def force(model):
    return Force()

def cannot_be_made(model):
    raise RuntimeError("not for this model")

def make_nothing(model):
    return None
'''


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on the path with modules of processors, and what an installed distribution with three entry points
    leaves."""
    site = tmp_path / "site"
    installed = site / "processors-1.0.dist-info"
    installed.mkdir(parents=True)
    (site / "processors.py").write_text(PLUGINS)
    (site / "broken_processors.py").write_text("raise RuntimeError('broken on purpose')")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: processors\nVersion: 1.0\n")
    points = {"never-twice": NEVER_TWICE, "force": "processors:force", "gone": "processors:Gone"}
    lines = [f"{name} = {value}" for name, value in points.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[anyengine.logits_processors]", *lines, ""]))
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(EXAMPLES)
    yield site
    for name in ("processors", "broken_processors", "never_twice"):
        sys.modules.pop(name, None)


def open_engine(model_dir: Path, *processors: str, **settings: Any) -> EngineCore:
    runner = open_runner(model_dir, logits_processors=processors, **settings)
    return EngineCore(runner, EmbeddedEngine(max_num_seqs=16))


def add(engine: EngineCore, request_id: str, prompt: list[int] | None = None, **sampling: Any) -> None:
    params = WireSamplingParams(**{"temperature": 0.0, "max_tokens": 40, **sampling})
    engine.add(EngineCoreRequest(request_id, prompt or PROMPT, sampling_params=params))


def run(engine: EngineCore) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    while engine.has_work():
        for _, output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    assert outputs[-1].finish_reason is FinishReason.LENGTH, outputs[-1]
    return [token for output in outputs for token in output.new_token_ids]


def greedy_without_repeats(engine: EngineCore, num_tokens: int) -> list[int]:
    """With the means of vLLM's parameters alone: one token at a time."""
    output: list[int] = []
    for _ in range(num_tokens):
        banned = dict.fromkeys(output, -1e9)
        add(engine, "x", [*PROMPT, *output], max_tokens=1, logit_bias=banned or None)
        output += tokens_of(run(engine)["x"])
    return output


@pytest.mark.feature("R33")
@pytest.mark.parametrize("name", [NEVER_TWICE, "never-twice"])
def test_it_changes_the_answers_of_those_who_ask(name: str, llama: Path) -> None:
    """In one batch with others, found by its module or as an entry point."""
    plain = open_engine(llama)
    add(plain, "x")
    expected = tokens_of(run(plain)["x"])
    assert len({*expected}) < len(expected), "the model does not repeat itself, which shows nothing"
    engine = open_engine(llama, name)
    for number in range(3):
        add(engine, f"asks {number}", extra_args={"never_twice": True})
        add(engine, f"other {number}", extra_args=[None, {"never_twice": False}, {"more": 1}][number])
    outputs = run(engine)
    without_repeats = greedy_without_repeats(plain, 40)
    for number in range(3):
        assert tokens_of(outputs[f"asks {number}"]) == without_repeats
        assert tokens_of(outputs[f"other {number}"]) == expected


@pytest.mark.feature("R33")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_alone_in_a_batch_and_preempted(temperature: float, llama: Path) -> None:
    choose = random.Random(3)
    prompts = [[choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(3, 40))] for _ in range(8)]
    asked = [{"never_twice": True}, {"forbid": [*range(0, VOCAB_SIZE, 2)]}, None, {"never_twice": True, "forbid": [3]}]

    def add_one(engine: EngineCore, number: int) -> None:
        params = {"temperature": temperature, "seed": number, "presence_penalty": number % 2, "max_tokens": 30}
        add(engine, str(number), prompts[number], extra_args=asked[number % 4], **params)

    names = NEVER_TWICE, "processors:Seeing"
    alone = open_engine(llama, *names)
    expected = []
    for number in range(8):
        add_one(alone, number)
        expected.append(tokens_of(run(alone)[str(number)]))
    block_bytes = 3 * 2 * 2 * 8 * 16 * 4  # layers, keys and values, heads, size of a head, tokens, bytes of a float
    small = open_engine(llama, *names, kv_cache_memory_bytes=12 * block_bytes, max_model_len=96)
    for number in range(8):
        add_one(small, number)
    outputs = run(small)
    assert [tokens_of(outputs[str(number)]) for number in range(8)] == expected
    assert small.utility("get_engine_statistics", [])["num_preemptions"] > 0, "the cache is too large for this test"


@pytest.mark.feature("R33")
def test_its_place_is_between_bias_and_penalties(llama: Path) -> None:
    """As in vLLM's sampler: what is seen is what allowed ids, bad words, length and bias have left, and nothing later.
    Log-probabilities are those of the model."""
    engine = open_engine(llama, "processors:Seeing", "processors:force")
    (seeing,) = sys.modules["processors"].made
    assert (seeing.model.vocab_size, seeing.model.model_dir) == (VOCAB_SIZE, llama)
    assert (seeing.model.eos_token_ids, seeing.model.device) == ((), torch.device("cpu"))
    add(engine, "raw", extra_args={"forbid": []}, logprobs=-1, max_tokens=1)
    raw = run(engine)["raw"][0]
    (logits,) = seeing.seen.pop()
    best = int(logits.argmax())
    assert raw.new_token_ids == [best] and raw.new_logprobs is not None
    later = {"temperature": 0.5, "repetition_penalty": 3.0, "presence_penalty": 2.0, "top_k": 1, "min_p": 0.5}
    earlier = {"allowed_token_ids": [9, 6, 7, best], "logit_bias": {6: 2.5}, "bad_words_token_ids": [[9]]}
    assert 6 in PROMPT, "repetition_penalty would not show"
    asked = {"forbid": [best], "force": 200}
    add(engine, "a", extra_args=asked, logprobs=-1, max_tokens=1, min_tokens=1, stop_token_ids=[7], **later, **earlier)
    output = run(engine)["a"][0]
    (seen,) = seeing.seen.pop()
    expected = torch.full_like(logits, -math.inf)
    expected[6], expected[best] = logits[6] + 2.5, logits[best]
    torch.testing.assert_close(seen, expected)
    assert output.new_token_ids == [200]  # by the second one, which comes last
    assert output.new_logprobs is not None
    columns = torch.frombuffer(bytearray(output.new_logprobs.logprob_token_ids.data), dtype=torch.int32)
    values = torch.frombuffer(bytearray(output.new_logprobs.logprobs.data), dtype=torch.float32)
    torch.testing.assert_close(values, logits.log_softmax(-1)[columns.long()])


def test_the_logits_of_the_step_stay_as_they_were() -> None:
    """They are computed in place where steps are recorded, and log-probabilities are taken from them."""
    logits = torch.arange(12.0).reshape(2, 6)
    before = logits.clone()
    seqs = [make_sequence(name, [0]) for name in "ab"]

    def process(rows: torch.Tensor) -> None:
        rows[0, 5] = -1.0

    assert sample(logits, seqs, [0, 0], process) == [4, 5]
    assert torch.equal(logits, before)


@pytest.mark.feature("R33")
def test_it_is_called_once_for_a_step_and_only_for_those_who_ask(llama: Path) -> None:
    engine = open_engine(llama, "processors:Seeing")
    (seeing,) = sys.modules["processors"].made
    add(engine, "other", max_tokens=12)
    pooling = WirePoolingParams(task="embed")
    engine.add(EngineCoreRequest("pooling", PROMPT, pooling_params=pooling))
    for _ in range(3):
        engine.step()
    assert seeing.calls == 0
    for name in "abc":
        add(engine, name, max_tokens=5, extra_args={"forbid": [1]})
    run(engine)
    assert [len(rows) for rows in seeing.seen] == [3] * 5
    assert seeing.started == ["other", "a", "b", "c"]  # each once; nothing is sampled for a pooling request
    assert not any(part.states for part in engine._runner._processing._processors)  # type: ignore[attr-defined]


@pytest.mark.feature("R33")
def test_a_request_that_it_refuses_fails_alone(llama: Path) -> None:
    engine = open_engine(llama, NEVER_TWICE, "processors:Breaking")
    add(engine, "refused", extra_args={"never_twice": 3})
    add(engine, "broken", extra_args={"never_twice": True, "break": ["start", 0]})
    add(engine, "good", extra_args={"never_twice": True})
    outputs = run(engine)
    assert len({*tokens_of(outputs["good"])}) == 40
    for name, message in (
        ("refused", f"logits processor '{NEVER_TWICE}': never_twice=3 must be True or False"),
        ("broken", "logits processor 'processors:Breaking' failed: KeyError: 'no such thing'"),
    ):
        (output,) = outputs[name]
        assert output.finish_reason is FinishReason.ERROR and output.error is not None
        assert (output.error.code, output.error.message) == ("validation_error", message)
    assert engine.scheduler_stats().kv_cache_usage == 0.0


@pytest.mark.feature("R33")
@pytest.mark.parametrize(
    ("how", "reason", "code"),
    [
        ("raise", "failed: RuntimeError: as told after 3", "internal_error"),
        (
            "none",
            f"failed: TypeError: apply has returned NoneType, not a tensor of [1, {VOCAB_SIZE}]",
            "internal_error",
        ),
        ("shape", f"failed: TypeError: apply has returned [1, {VOCAB_SIZE - 1}]", "internal_error"),
        ("list", "failed: TypeError: apply has returned list", "internal_error"),
        ("nan", ": the largest logit is nan", "internal_error"),
        ("inf", ": the largest logit is inf", "internal_error"),
        ("-inf", ": the largest logit is -inf", "validation_error"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_ends_its_requests_alone(
    how: str, reason: str, code: str, temperature: float, llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor those that have something to do with the same processor, in the same step."""
    engine = open_engine(llama, "processors:Breaking", "processors:Seeing", NEVER_TWICE)
    plain = open_engine(llama)
    for one, asked in ((engine, {"break": ["raise", 99]}), (plain, None)):
        for number in range(3):  # among those that fail
            add(one, f"good {number}", seed=number, temperature=temperature, extra_args=asked)
            if one is engine:
                doomed = {"break": [how, 3], "forbid": [1], "never_twice": True}
                add(one, f"bad {number}", extra_args=doomed, temperature=temperature)
    with caplog.at_level(logging.WARNING):
        outputs, expected = run(engine), run(plain)
    for number in range(3):
        assert tokens_of(outputs[f"good {number}"]) == tokens_of(expected[f"good {number}"])
        *before, last = outputs[f"bad {number}"]
        assert len(before) == 3
        assert last.finish_reason is FinishReason.ERROR and last.error is not None
        assert last.error.code == code
        assert "logits processor 'processors:Breaking'" in last.error.message and reason in last.error.message
    assert ("Traceback" in caplog.text) == ("failed" in reason)
    assert [len(rows) for rows in sys.modules["processors"].made[0].seen] == [3] * 3
    add(engine, "later", max_tokens=2)
    assert tokens_of(run(engine)["later"])
    assert engine.scheduler_stats().kv_cache_usage == 0.0


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nothing", "'nothing' cannot be loaded: LookupError: there is no such entry point"),
        ("gone", "'gone' cannot be loaded: AttributeError: .*Gone"),
        ("no_such_module:f", "'no_such_module:f' cannot be loaded: ModuleNotFoundError: No module named"),
        ("processors:Gone.inner", "cannot be loaded: AttributeError: .*Gone"),
        ("broken_processors:f", "cannot be loaded: RuntimeError: broken on purpose"),
        ("processors:number", "'processors:number' is of type int, and cannot be called to make one"),
    ],
)
def test_a_name_that_cannot_be_loaded(name: str, why: str) -> None:
    """What was looked for, and what there is."""
    known = "It must be 'module:attribute', or an entry point of the group anyengine.logits_processors"
    with pytest.raises(ValueError, match=rf"^logits_processors: .*{why}.*{known} \('force', 'gone', 'never-twice'\)$"):
        find_logits_processors(["processors:force", name])


def test_an_entry_point_of_two_distributions_is_none(site: Path) -> None:
    other = site / "other-2.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 2.0\n")
    (other / "entry_points.txt").write_text("[anyengine.logits_processors]\nforce = elsewhere:Force\n")
    with pytest.raises(ValueError, match="elsewhere:Force of other, processors:force of processors"):
        find_logits_processors(["force"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("processors:cannot_be_made", "'processors:cannot_be_made' cannot be made: RuntimeError: not for this model"),
        ("processors:make_nothing", "'processors:make_nothing' has made a NoneType, which is no logits processor"),
        ("builtins:object", "'builtins:object' cannot be made: TypeError"),
    ],
)
def test_a_processor_that_cannot_be_made(name: str, why: str, llama: Path) -> None:
    with pytest.raises(ValueError, match=f"^logits_processors: {why}"):
        open_runner(llama, logits_processors=[name])


def test_a_name_is_looked_up_before_anything_that_takes_time() -> None:
    with pytest.raises(ValueError, match="there is no such entry point"):
        open_runner("/no/such/model", logits_processors=["nothing"])


def test_a_model_that_classifies_has_none(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_labels=3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path / "labels")
    with pytest.raises(ValueError, match="logits_processors: this model classifies"):
        open_runner(tmp_path / "labels", logits_processors=[NEVER_TWICE])


def test_a_failed_start_leaves_nothing(llama: Path) -> None:
    runner = open_runner(llama, logits_processors=[NEVER_TWICE])
    seq = make_sequence("a", PROMPT, extra_args={"never_twice": True}, max_tokens=9)
    runner.start(seq)
    runner.finish("a")
    again = make_sequence("a", PROMPT, max_tokens=9)
    runner.start(again)
    for _ in range(30):
        advance(runner, [again])
    assert len({*again.output_token_ids}) < 30


# ------------------------------------------------------------------ through a client


@pytest.mark.anyio
@pytest.mark.feature("R33")
async def test_requests_of_a_client(llama: Path) -> None:
    """``SamplingParams.extra_args`` reach the engine, for each of several completions too."""
    engine = EmbeddedEngine(str(llama), num_threads=1, in_process=True, logits_processors=["never-twice", "force"])
    with anyio.fail_after(60):
        async with EngineClient(engine=engine) as client:
            asked = SamplingParams(max_tokens=30, temperature=1.0, seed=2, n=3, extra_args={"never_twice": True})
            completions = (await client.complete(PROMPT, asked)).outputs
            assert [len({*one.token_ids}) for one in completions] == [30] * 3
            forced = SamplingParams(max_tokens=4, extra_args={"force": 42})
            assert (await client.complete(PROMPT, forced)).token_ids == [42] * 4
            for bad, error in (({"never_twice": 1}, "never_twice=1"), ({"force": VOCAB_SIZE}, "IndexError")):
                with pytest.raises((RequestFailed, RequestRejected), match=error) as caught:
                    await client.complete(PROMPT, SamplingParams(max_tokens=4, extra_args=bad))
                assert caught.value.status == (400 if "never_twice" in bad else 500)


@pytest.mark.anyio
@pytest.mark.feature("R33")
@pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"])
async def test_an_engine_in_a_process_of_its_own(llama: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the same names on its own path; one that it does not find is an error of the start."""
    path = os.pathsep.join([str(site), str(EXAMPLES), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    with anyio.fail_after(120):
        engine = EmbeddedEngine(str(llama), num_threads=1, logits_processors=["never-twice"])
        async with EngineClient(engine=engine) as client:
            out = await client.complete(PROMPT, SamplingParams(max_tokens=30, extra_args={"never_twice": True}))
            assert len({*out.token_ids}) == 30
        with pytest.raises(EngineStartupError, match=r"logits_processors: 'no-such' .*'force', 'gone', 'never-twice'"):
            async with EngineClient(engine=EmbeddedEngine(str(llama), logits_processors=["no-such"])):
                pass
