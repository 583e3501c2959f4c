"""The sampler against an independent reference in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import make_sequence

from anyengine._wire import WireSamplingParams
from anyengine.engine.runner.sampler import sample, unsupported_sampling

VOCAB_SIZE = 64
NUM_DRAWS = 20_000
_rng = np.random.default_rng(1)
LOGITS = _rng.normal(scale=2.0, size=VOCAB_SIZE).astype(np.float32)

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_k all": {"top_k": -1},
    "top_p": {"top_p": 0.7},
    "top_p tiny": {"top_p": 0.001},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
}


def reference_probs(
    logits: NDArray[np.float32], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> NDArray[np.float64]:
    """Straight from the definitions, one token after the other."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0.0
    order = np.argsort(-probs)
    if top_k > 0:
        probs[order[top_k:]] = 0.0
    probs /= probs.sum()
    mass = 0.0
    for token in order:
        if mass >= top_p:
            probs[token] = 0.0
        mass += probs[token]
    return probs / probs.sum()


def draws_of(logits: NDArray[np.float32], num_draws: int, **params: Any) -> NDArray[np.int64]:
    seqs = [make_sequence(str(index), [0], **{"temperature": 1.0, **params}) for index in range(num_draws)]
    rows = torch.from_numpy(logits).expand(num_draws, -1)
    return np.array(sample(rows, seqs, range(num_draws)))


@pytest.mark.feature("R05")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_frequencies_and_support(params: dict[str, Any]) -> None:
    expected = reference_probs(LOGITS, **params)
    counts = np.bincount(draws_of(LOGITS, NUM_DRAWS, **params), minlength=VOCAB_SIZE)
    assert not counts[expected == 0].any(), "a token outside the support was drawn"
    likely = expected * NUM_DRAWS >= 5
    assert counts[likely].all(), "a token of the support was never drawn"
    # Chi-square over the likely tokens and one bin for the rest; the seeds are fixed, so this does not flicker.
    observed = np.append(counts[likely], counts[~likely].sum())
    wanted = np.append(expected[likely], expected[~likely].sum()) * NUM_DRAWS
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    chi_square = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi_square <= degrees + 4 * np.sqrt(2 * degrees) + 1e-9


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.05, 2.0),
    top_k=st.integers(-1, VOCAB_SIZE + 1),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_the_support_is_exact(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=VOCAB_SIZE).astype(np.float32)
    params = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    # Where a cut falls within rounding of a token's own mass, either side is right.
    widest = reference_probs(logits, **{**params, "top_p": min(top_p + 1e-5, 1.0), "min_p": min_p * (1 - 1e-5)}) > 0
    drawn = set(draws_of(logits, 50, **params).tolist())
    assert drawn <= set(np.flatnonzero(widest).tolist())


@pytest.mark.feature("R06")
def test_a_seed_gives_the_same_token_alone_and_in_any_slot_of_any_batch() -> None:
    logits = torch.from_numpy(_rng.normal(scale=2.0, size=(16, VOCAB_SIZE)).astype(np.float32))
    params = [dict(list(PARAMS.values())[index % len(PARAMS)]) for index in range(16)]
    seqs = [make_sequence(str(index), [0], **{"temperature": 1.0, **params[index]}) for index in range(16)]
    for position in range(20):
        together = sample(logits, seqs, range(16))
        alone = [sample(logits[index : index + 1], [seqs[index]], [index])[0] for index in range(16)]
        order = torch.randperm(16, generator=torch.Generator().manual_seed(position)).tolist()
        shuffled = sample(logits[order], [seqs[index] for index in order], order)
        assert together == alone == [shuffled[order.index(index)] for index in range(16)]
        for seq, token in zip(seqs, together, strict=True):
            seq.output_token_ids.append(token)


def test_the_noise_depends_on_the_seed_and_on_the_position() -> None:
    seq = make_sequence("a", [0], temperature=1.0)
    flat = torch.zeros(1, 1000)
    by_seed = {sample(flat, [seq], [seed])[0] for seed in range(50)}
    by_position = set()
    for _ in range(50):
        seq.output_token_ids += sample(flat, [seq], [0])
        by_position.add(seq.output_token_ids[-1])
    assert len(by_seed) > 40
    assert len(by_position) > 40


def test_greedy_takes_the_first_of_the_best_next_to_rows_that_draw() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]]).repeat(3, 1)
    seqs = [
        make_sequence("a", [0]),
        make_sequence("b", [0], temperature=5.0),
        make_sequence("c", [0], temperature=1e-6),
    ]
    tokens = sample(logits, seqs, [1, 2, 3])
    assert tokens[0] == tokens[2] == 1


def test_logits_stay_as_they_were() -> None:
    logits = torch.from_numpy(LOGITS.copy())[None]
    params = {"temperature": 1.0, "top_p": 0.5, "logit_bias": {1: 2.0}, "presence_penalty": 1.0, "min_tokens": 2}
    sample(logits, [make_sequence("a", [0], eos_token_id=3, **params)], [0])
    assert np.array_equal(logits[0].numpy(), LOGITS)


BEST, SECOND = (int(token) for token in np.argsort(-LOGITS)[:2])
SECOND_LEADS_BY_1 = {SECOND: float(LOGITS[BEST] - LOGITS[SECOND]) + 1.0}


@pytest.mark.feature("R02", "R03", "R24", "R25")
@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        ({"min_tokens": 1, "eos_token_id": BEST}, [], SECOND),
        ({"min_tokens": 1, "stop_token_ids": [BEST]}, [], SECOND),
        ({"min_tokens": 1, "all_stop_token_ids": {BEST}}, [], SECOND),
        ({"min_tokens": 1, "all_stop_token_ids": {BEST, 10**6}}, [], SECOND),
        ({"min_tokens": 1, "eos_token_id": BEST}, [0], BEST),
        ({"logit_bias": {7: 100.0}}, [], 7),
        ({"allowed_token_ids": [5, SECOND]}, [], SECOND),
        ({"bad_words_token_ids": [[BEST]]}, [], SECOND),
        ({"bad_words_token_ids": [[8, BEST]]}, [8], SECOND),
        ({"bad_words_token_ids": [[8, BEST]]}, [9], BEST),
        ({"bad_words_token_ids": [[8, 9, BEST]]}, [9], BEST),
        ({"presence_penalty": 1.1, "logit_bias": SECOND_LEADS_BY_1}, [SECOND], BEST),
        ({"presence_penalty": 0.9, "logit_bias": SECOND_LEADS_BY_1}, [SECOND] * 2, SECOND),
        ({"frequency_penalty": 0.6, "logit_bias": SECOND_LEADS_BY_1}, [SECOND] * 2, BEST),
        ({"frequency_penalty": 0.6, "logit_bias": SECOND_LEADS_BY_1}, [SECOND], SECOND),
        ({"repetition_penalty": 1e3}, [BEST], SECOND),
    ],
)
def test_what_changes_the_logits(params: dict[str, Any], output: list[int], expected: int) -> None:
    seq = make_sequence("a", [0], **params)
    seq.output_token_ids = output
    assert sample(torch.from_numpy(LOGITS)[None], [seq], [0]) == [expected]


@pytest.mark.feature("R02", "R03")
def test_penalties_follow_the_definitions() -> None:
    """Compared through greedy ties: a bias that undoes the penalty exactly makes the penalised token win by a hair."""
    prompt, output = [2, 2, 3], [3, 4, 4, 4]
    expected = LOGITS.astype(np.float64)
    for token in {*prompt, *output}:
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token in set(output):
        expected[token] -= 0.7 * output.count(token) + 0.3
    for token in (2, 3, 4, 5):
        for hair, wins in ((1e-3, True), (-1e-3, False)):
            others = np.delete(expected, token).max()
            bias = dict.fromkeys(range(VOCAB_SIZE), 0.0)
            lift = others - expected[token] + hair
            # Bias comes before penalties: lift the raw logit so that the penalties leave what is wanted.
            raw = float(LOGITS[token])
            wanted = expected[token] + lift + (0.7 * output.count(token) + 0.3 if token in output else 0.0)
            target = wanted if token == 5 else (wanted * 1.5 if wanted > 0 else wanted / 1.5)
            bias[token] = target - raw
            seq = make_sequence(
                "a", prompt, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.3, logit_bias=bias
            )
            seq.output_token_ids = list(output)
            assert (sample(torch.from_numpy(LOGITS)[None], [seq], [0]) == [token]) is wins


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids contains -1"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias contains {VOCAB_SIZE}"),
        ({"bad_words_token_ids": [[0, VOCAB_SIZE]]}, "_bad_words_token_ids"),
        ({"bad_words_token_ids": [[]]}, "empty word"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_what_it_cannot_do_is_named(params: dict[str, Any], named: str) -> None:
    refusal = unsupported_sampling(WireSamplingParams(**params), VOCAB_SIZE)
    assert refusal is not None
    assert named in refusal


def test_what_it_can_do_is_not_refused() -> None:
    params = WireSamplingParams(
        temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=1, min_tokens=1, stop=[], bad_words=[], watermarking=True,
        logprobs=2, prompt_logprobs=0, logprob_token_ids=[0, 1], presence_penalty=1.0, stop_token_ids=[10**6],
        logit_bias={0: 1.0},
    )  # fmt: skip
    assert unsupported_sampling(params, VOCAB_SIZE) is None
