"""What transformers' own ``generate`` answers, and whether an answer of ours agrees with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

TOO_CLOSE_TO_CALL = 1e-3
"""Where the two best logits are closer than this, float32 arithmetic in another order may choose the other one."""


@dataclass(frozen=True)
class Reference:
    token_ids: list[int]
    gaps: list[float]  # between the two best logits, for each token


def reference_of(model: Any, prompt: Sequence[int], max_tokens: int) -> Reference:
    answer = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(answer.logits).topk(2, dim=-1).values  # [num_tokens, 2]
    return Reference(answer.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def assert_agrees(name: str, token_ids: Sequence[int], reference: Reference) -> str | None:
    """Fail unless the ids are equal, up to a token that was too close to call; then answer with a note that says so."""
    if list(token_ids) == reference.token_ids:
        return None
    pairs = enumerate(zip(token_ids, reference.token_ids, strict=False))
    where = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    assert where is not None, f"{name}: one answer is longer: {token_ids} and {reference.token_ids}"
    gap = reference.gaps[where]
    assert gap < TOO_CLOSE_TO_CALL, f"{name}: token {where} differs, with the two best logits {gap:.6f} apart"
    return f"{name}: parts from the reference at token {where}, where its two best logits are {gap:.2e} apart"


def assert_greedy(name: str, model: Any, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
    """Fail unless ``generate`` would answer ``token_ids``, or part from them where it was too close to call.

    By induction: each is what the model likes best after those before it, which one pass tells of all.
    """
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *token_ids[:-1]]])).logits[0, len(prompt) - 1 :].float()
    gaps = logits.amax(dim=-1) - logits[range(len(token_ids)), list(token_ids)]  # [num_tokens]
    where = int(gaps.argmax())
    assert gaps[where] < TOO_CLOSE_TO_CALL, f"{name}: token {where} is {gaps[where]:.6f} behind the best one"
