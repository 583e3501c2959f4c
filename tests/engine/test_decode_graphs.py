"""Recorded steps, with a recorder that only calls again what it was given: whatever a step needs must be in the inputs
at their place, or come out as it was recorded. What CUDA adds needs a GPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from reference_generation import assert_greedy
from tiny_models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    advance,
    generate_staggered,
    give_blocks,
    make_sequence,
    make_tiny_model,
    open_runner,
)

from anyengine._wire import WirePoolingParams
from anyengine.engine.interfaces import ModelRunner
from anyengine.engine.runner import decode_graphs, model_runner
from anyengine.engine.runner.decode_graphs import Recorder, Recording

rng = random.Random(3)
PROMPTS = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 17, 40, 150)))] for _ in range(10)]


class Tape:
    """What was recorded and replayed, by the size of the logits. A recording has memory of its own, as on a device."""

    def __init__(self, spoil: Callable[[torch.Tensor], object] = lambda _logits: None) -> None:
        self.recorded: list[int] = []
        self.num_replays = 0
        self._spoil = spoil

    def recorder(self) -> Recorder:
        def record(compute: Callable[[], torch.Tensor]) -> Recording:
            place = torch.full_like(compute(), torch.nan)
            self.recorded.append(len(place))

            def replay() -> None:
                self.num_replays += 1
                place.copy_(compute())
                self._spoil(place)

            return Recording(replay, place)

        return record


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    return use(Tape(), monkeypatch)


def use(tape: Tape, monkeypatch: pytest.MonkeyPatch) -> Tape:
    monkeypatch.setattr(model_runner, "recorders_for", lambda _device: tape.recorder)
    return tape


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.feature("F16")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_ids_equal_generate(architecture: str, tape: Tape, tmp_path: Path) -> None:
    """Batches that grow and shrink over several sizes, with prompts in chunks between them; windows, soft caps."""
    path = make_tiny_model(architecture, tmp_path / architecture)
    runner = open_runner(path)
    seqs = [make_sequence(str(number), prompt, max_tokens=12) for number, prompt in enumerate(PROMPTS)]
    generate_staggered(runner, seqs, batch_size=6, chunk_tokens=30)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    for seq in seqs:
        assert len(seq.output_token_ids) == 12
        assert_greedy(f"{architecture}, {seq.request_id}", model, seq.prompt_token_ids, seq.output_token_ids)
    assert {1, 2, 4, 8} >= {*tape.recorded} >= {1, 4}
    assert len(tape.recorded) <= 8 < tape.num_replays  # of four batch sizes with two lengths of tables


def test_it_is_recorded_once_for_each_size(llama: Path, tape: Tape) -> None:
    runner = open_runner(llama)
    seqs = [make_sequence(name, [1, 2, 3], max_tokens=20) for name in "abc"]
    for seq in seqs:
        runner.start(seq)
    advance(runner, seqs)  # prompts
    assert tape.recorded == []
    for _ in range(5):
        advance(runner, seqs)
    advance(runner, seqs[:2])
    advance(runner, seqs[1:])
    assert tape.recorded == [4, 2]
    assert tape.num_replays == 7


def test_no_block_of_another_sequence_is_touched(llama: Path, tape: Tape) -> None:
    """Not by the rows that pad the batch, either: they have a block that the scheduler knows nothing of."""
    runner = open_runner(llama)
    seqs = [make_sequence(name, [5, 6, 7], max_tokens=20) for name in "abc"]
    for seq in seqs:
        runner.start(seq)
    advance(runner, seqs)
    cache = caches(runner)
    assert len(cache[0]) == runner.num_kv_blocks + 1
    with torch.inference_mode():
        for layer in cache:
            layer.fill_(7.0)
    advance(runner, seqs)
    assert tape.num_replays == 1
    own = {seq.block_ids[0] for seq in seqs}
    for layer in cache:
        changed = (layer != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert {*changed} == {*own, runner.num_kv_blocks}
        for block in own:  # at one position
            assert (layer[block] != 7.0).any(-1).any(1).any(0).sum() == 1


def caches(runner: ModelRunner) -> list[torch.Tensor]:
    assert isinstance(runner, model_runner.TransformersRunner)
    cache = runner._residency.cache
    return [cache.memory(layer) for layer in range(3)]


def test_very_unequal_lengths_are_not_padded(tape: Tape, tmp_path: Path) -> None:
    runner = open_runner(make_tiny_model("llama", tmp_path / "model", max_position_embeddings=4096))
    long, *short = [
        make_sequence(str(number), [1] * num_tokens, max_tokens=9)
        for number, num_tokens in enumerate([2000, *[4] * 15])
    ]
    for seq in (long, *short):
        runner.start(seq)
        advance(runner, [seq])
    advance(runner, [long, *short])
    assert tape.recorded == []
    advance(runner, [long])
    advance(runner, short)
    assert tape.recorded == [1, 16]


@pytest.mark.parametrize("what", ["prompt scores", "pooling"])
def test_steps_that_want_more_than_logits_are_not_recorded(llama: Path, tape: Tape, what: str) -> None:
    runner = open_runner(llama)
    seq = make_sequence("a", [1], max_tokens=3, prompt_logprobs=0 if what == "prompt scores" else None)
    if what == "pooling":
        seq.pooling = WirePoolingParams(task="embed")
    runner.start(seq)
    give_blocks(runner, seq, 1)
    (result,) = runner.step([model_runner.ScheduledSequence(seq, 1)])
    assert result is not None
    assert tape.recorded == []


def test_recordings_go_with_what_they_refer_to(llama: Path, tape: Tape) -> None:
    """Weights and cache may come back elsewhere."""
    runner = open_runner(llama)
    assert isinstance(runner, model_runner.TransformersRunner)
    for number, leave in enumerate(
        (lambda: runner.sleep(1), lambda: runner.sleep(2), runner.release_kv_cache_memory, runner.reload_weights)
    ):
        seq = make_sequence(str(number), [1, 2, 3], max_tokens=20)
        runner.start(seq)
        for _ in range(3):
            advance(runner, [seq])
        assert len(tape.recorded) == number + 1
        leave()
        graphs = runner._residency.graphs
        assert graphs is not None and not graphs._graphs
        runner.wake_up()


@pytest.mark.parametrize("trouble", ["wrong", "not a number", "raises", "no memory"])
def test_what_cannot_be_recorded_is_computed_as_ever(
    llama: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spoils: dict[str, Callable[[torch.Tensor], object]] = {
        "wrong": lambda logits: logits.mul_(1.01),
        "not a number": lambda logits: logits.fill_(torch.nan),
        "raises": fail,
        "no memory": lambda _logits: None,
    }
    if trouble == "no memory":  # for what is padded
        monkeypatch.setattr(decode_graphs._PaddedStep, "attend", fail)
    use(Tape(spoils[trouble]), monkeypatch)
    runner, plain = open_runner(llama), open_runner(llama, enforce_eager=True)
    tokens: list[list[int]] = []
    for each in (runner, plain):
        seq = make_sequence("a", PROMPTS[3], max_tokens=10)
        each.start(seq)
        for _ in range(10):
            advance(each, [seq])
        tokens.append(seq.output_token_ids)
    assert tokens[0] == tokens[1]
    (record,) = [record for record in caplog.records if "without recordings" in record.getMessage()]
    assert record.levelname == "WARNING"


def fail(*_args: object, **_options: object) -> None:
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def test_enforce_eager_records_nothing(llama: Path, tape: Tape) -> None:
    runner = open_runner(llama, enforce_eager=True)
    seq = make_sequence("a", [1, 2], max_tokens=5)
    runner.start(seq)
    for _ in range(4):
        advance(runner, [seq])
    assert tape.recorded == []
    assert len(caches(runner)[0]) == runner.num_kv_blocks


def test_a_device_without_recordings_has_none() -> None:
    assert model_runner.recorders_for(torch.device("cpu")) is None
