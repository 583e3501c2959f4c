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
