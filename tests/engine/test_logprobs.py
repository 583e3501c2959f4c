"""Log-probabilities against transformers' logits: of what is sampled and of the prompt, whole or in chunks, alone or in
company."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_models import VOCAB_SIZE, advance, give_blocks, make_sequence, make_tiny_model, open_runner

from anyengine import _wire
from anyengine.engine.interfaces import ModelRunner, SampledToken, ScheduledSequence, SequenceState

PROMPT = [5, 250, 17, 17, 99, 4, 120]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("qwen2", tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="module")
def model(model_dir: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype="float32")


@pytest.fixture
def runner(model_dir: Path) -> ModelRunner:
    return open_runner(model_dir)


def expected_logprobs(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Of the token behind each position: [num_tokens, vocab]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


def unpacked(tensor: _wire.Tensor) -> torch.Tensor:
    dtypes = {"<i4": torch.int32, "<f4": torch.float32, "<i8": torch.int64, "int32": torch.int32}
    dtype = dtypes.get(tensor.dtype, torch.float32)
    return torch.from_numpy(tensor.numpy().copy()).to(dtype)


def step(runner: ModelRunner, *seqs: SequenceState, chunk_tokens: int = 10**6) -> list[SampledToken | None]:
    chunks = [ScheduledSequence(seq, min(seq.num_tokens - seq.num_computed_tokens, chunk_tokens)) for seq in seqs]
    for item in chunks:
        give_blocks(runner, item.seq, item.seq.num_computed_tokens + item.num_new_tokens)
    tokens = runner.step(chunks)
    for item, token in zip(chunks, tokens, strict=True):
        item.seq.num_computed_tokens += item.num_new_tokens
        if token is not None:
            item.seq.output_token_ids.append(token.token_id)
    return tokens


def check_rows(ids: _wire.Tensor, values: _wire.Tensor, ranks: _wire.Tensor, expected: torch.Tensor, k: int) -> None:
    """Each row: the token itself, then the ``k`` likeliest; its rank among all."""
    columns = unpacked(ids).long()
    torch.testing.assert_close(unpacked(values), expected.gather(-1, columns), atol=1e-4, rtol=1e-4)
    likeliest = expected.topk(k, dim=-1)
    torch.testing.assert_close(expected.gather(-1, columns[:, 1:]), likeliest.values, atol=1e-4, rtol=1e-4)
    own = expected.gather(-1, columns[:, :1])
    assert unpacked(ranks).tolist() == (expected >= own - 1e-6).sum(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_the_sampled_token_and_the_likeliest(
    runner: ModelRunner, model: transformers.PreTrainedModel, temperature: float
) -> None:
    """Before temperature, bias and truncation: they do not show in it."""
    seq = make_sequence("a", PROMPT, logprobs=3, temperature=temperature, seed=4, logit_bias={7: 3.0}, top_k=40)
    silent = make_sequence("b", PROMPT[:3], max_tokens=50)
    for each in (seq, silent):
        runner.start(each)
    for _ in range(6):
        token, other = step(runner, seq, silent)
        assert token is not None
        assert token.logprobs is not None
        assert other is not None
        assert other.logprobs is None
        lists = token.logprobs
        assert (lists.logprob_token_ids.dtype, lists.logprob_token_ids.shape) == ("<i4", (1, 4))
        assert unpacked(lists.logprob_token_ids)[0, 0] == token.token_id
        expected = expected_logprobs(model, PROMPT + seq.output_token_ids[:-1])[-1:]
        check_rows(lists.logprob_token_ids, lists.logprobs, lists.sampled_token_ranks, expected, k=3)


def test_zero_is_the_token_alone_and_minus_one_is_everything(runner: ModelRunner) -> None:
    zero, everything = make_sequence("zero", PROMPT, logprobs=0), make_sequence("all", PROMPT, logprobs=-1)
    runner.start(zero)
    runner.start(everything)
    first, second = step(runner, zero, everything)
    assert first is not None
    assert first.logprobs is not None
    assert first.logprobs.logprobs.shape == (1, 1)
    assert second is not None
    assert second.logprobs is not None
    assert second.logprobs.logprobs.shape == (1, VOCAB_SIZE + 1)
    assert sorted(unpacked(second.logprobs.logprob_token_ids)[0, 1:].tolist()) == list(range(VOCAB_SIZE))


def test_chosen_token_ids(runner: ModelRunner, model: transformers.PreTrainedModel) -> None:
    seq = make_sequence("a", PROMPT, logprob_token_ids=[9, 250])
    runner.start(seq)
    (token,) = step(runner, seq)
    assert token is not None
    assert token.logprobs is not None
    assert unpacked(token.logprobs.logprob_token_ids).tolist() == [[token.token_id, 9, 250]]
    expected = expected_logprobs(model, PROMPT)[-1, [token.token_id, 9, 250]]
    torch.testing.assert_close(unpacked(token.logprobs.logprobs)[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [100, 4, 3, 1])
def test_the_prompt(runner: ModelRunner, model: transformers.PreTrainedModel, chunk_tokens: int) -> None:
    seq, mate = make_sequence("a", PROMPT, prompt_logprobs=2), make_sequence("b", PROMPT)
    runner.start(seq)
    runner.start(mate)
    tokens = step(runner, seq, mate, chunk_tokens=chunk_tokens)
    while tokens[0] is None:
        tokens = step(runner, seq, mate, chunk_tokens=chunk_tokens)
    assert tokens[0].prompt_logprobs is not None
    assert tokens[1] is not None
    assert tokens[1].prompt_logprobs is None
    tensors = tokens[0].prompt_logprobs
    assert (tensors.logprob_token_ids.dtype, tensors.logprobs.dtype) == ("int32", "float32")
    assert unpacked(tensors.logprob_token_ids)[:, 0].tolist() == PROMPT[1:]
    expected = expected_logprobs(model, PROMPT)[:-1]
    check_rows(tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks, expected, k=2)
    (later,) = step(runner, seq)
    assert later is not None
    assert later.prompt_logprobs is None


@pytest.mark.feature("R14")
@pytest.mark.parametrize("chunk_tokens", [100, 4, 3, 1])
@pytest.mark.parametrize("start", [None, 0, 2, 5, 6])
@pytest.mark.parametrize("k", [None, 1])
def test_named_ids_of_the_prompt(
    runner: ModelRunner, model: transformers.PreTrainedModel, chunk_tokens: int, start: int | None, k: int | None
) -> None:
    """A row for each position that has a next token; what pads a row has no probability."""
    num_rows = len(PROMPT) - 1 - (start or 0)
    ids = np.random.default_rng(7).integers(-1, VOCAB_SIZE, (num_rows, 3), dtype=np.int32)
    asked = {"prompt_logprob_token_ids": _wire.Tensor.from_array(ids), "prompt_logprob_start": start}
    seq, mate = make_sequence("a", PROMPT, prompt_logprobs=k, **asked), make_sequence("b", PROMPT)
    runner.start(seq)
    runner.start(mate)
    tokens = step(runner, seq, mate, chunk_tokens=chunk_tokens)
    while tokens[0] is None:
        tokens = step(runner, seq, mate, chunk_tokens=chunk_tokens)
    assert tokens[1] is not None and tokens[1].prompt_token_id_logprobs is None
    assert (tokens[0].prompt_logprobs is None) == (k is None)
    scores = tokens[0].prompt_token_id_logprobs
    assert scores is not None and scores.dtype == "float32"
    # vLLM's definition, element by element: row i is about the token at start + i + 1.
    expected = expected_logprobs(model, PROMPT)
    rows = [
        [float(expected[(start or 0) + row, id_]) if id_ >= 0 else -math.inf for id_ in ids[row]]
        for row in range(num_rows)
    ]
    torch.testing.assert_close(unpacked(scores), torch.tensor(rows).reshape(num_rows, 3), atol=1e-4, rtol=1e-4)


def test_a_prompt_of_one_token_has_none(runner: ModelRunner) -> None:
    seq = make_sequence("a", [5], prompt_logprobs=2)
    runner.start(seq)
    (token,) = step(runner, seq)
    assert token is not None
    assert token.prompt_logprobs is None


def test_asking_does_not_change_the_tokens(runner: ModelRunner) -> None:
    asking = make_sequence("a", PROMPT, logprobs=5, prompt_logprobs=5)
    plain = make_sequence("b", PROMPT)
    for seq in (asking, plain):
        runner.start(seq)
        for _ in range(8):
            advance(runner, [seq])
        runner.finish(seq.request_id)
    assert asking.output_token_ids == plain.output_token_ids
