"""What only some engines send beside tokens, on its way into the outputs of one completion.

Owns the collecting: hand-over parameters, routed experts, sampling masks, speculation figures, weight versions. A state
has one from the first of these on; most have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from anyengine._wire import EngineCoreOutput, Tensor
from anyengine.outputs import OutputDetails, SamplingMask, SpecDecodeMetrics, WeightVersionSpan

__all__ = ["DetailCollector"]

_HANDED_ON: Final = ("kv_transfer_params", "ec_transfer_params")


class DetailCollector:
    """See the module. Owned by its request's state; the completion takes from it."""

    __slots__ = ("_experts", "_last", "_masks", "_new_masks", "_starts")

    def __init__(self) -> None:
        self._experts: list[Tensor] = []
        self._masks: list[tuple[int, ...]] = []
        self._new_masks = 0
        self._starts: list[tuple[str, int]] = []
        self._last: dict[str, Any] = {}

    def step(self, output: EngineCoreOutput) -> None:
        """Take what comes with tokens.

        Raises:
            ValueError: it does not fit them.
        """
        if (mask := output.new_sampling_mask) is not None:
            ids = mask.token_ids.values()
            ends = [0, len(ids)] if mask.offsets is None else [int(end) for end in mask.offsets.values()]
            rows = [tuple(map(int, ids[start:end])) for start, end in pairwise(ends)]
            if len(rows) < len(output.new_token_ids):
                raise ValueError(f"{len(rows)} sampling masks for {len(output.new_token_ids)} tokens")
            self._masks += rows[: len(output.new_token_ids)]  # fewer tokens than rows, if a stop string ended it
            self._new_masks += len(output.new_token_ids)
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)

    def last(self, output: EngineCoreOutput, weights: str | None) -> None:
        """Take what comes with the end; ``weights`` is the label of those that are loaded.

        Raises:
            ValueError: the figures are none.
        """
        kept: dict[str, Any] = {name: value for name in _HANDED_ON if (value := getattr(output, name)) is not None}
        if output.spec_decode_metrics is not None:
            try:
                kept["spec_decode_metrics"] = msgspec.convert(output.spec_decode_metrics, SpecDecodeMetrics)
            except msgspec.ValidationError as exc:
                raise ValueError(f"the engine's figures of speculative decoding cannot be read: {exc}") from exc
        if output.surplus:
            kept["extra"] = dict(output.surplus)
        self._last = kept
        if weights is not None and not self._starts:  # they have been the same all along
            self._starts.append((weights, 0))

    def weights(self, version: str, num_tokens: int) -> None:
        """Tokens from number ``num_tokens`` on are sampled by the weights of this label."""
        if self._starts and self._starts[-1][1] == num_tokens:
            self._starts.pop()
        if not self._starts or self._starts[-1][0] != version:
            self._starts.append((version, num_tokens))

    def take(self, num_tokens: int, *, finished: bool, everything: bool) -> OutputDetails | None:
        """The details of the next item, which has ``num_tokens`` in all; ``None`` if there are none."""
        fields: dict[str, Any] = {}
        masks = self._masks if everything else self._masks[len(self._masks) - self._new_masks :]
        self._new_masks = 0
        if masks:
            fields["sampling_mask"] = SamplingMask(tuple(masks))
        if finished:
            fields |= self._last
            if self._experts:
                fields["routed_experts"] = _joined(self._experts)
            if self._starts and num_tokens:
                fields["weight_versions"] = self._spans(num_tokens)
        return OutputDetails(**fields) if fields else None

    def _spans(self, num_tokens: int) -> tuple[WeightVersionSpan, ...]:
        ends = [start for _, start in self._starts[1:]] + [num_tokens]
        spans = zip(self._starts, ends, strict=True)
        return tuple(WeightVersionSpan(version, start, end) for (version, start), end in spans if start < end)


def _joined(chunks: Sequence[Tensor]) -> Tensor:
    """One tensor of ``chunks``, one behind the other along the first axis."""
    first = chunks[0]
    if len(chunks) == 1:
        return first
    rows = sum(chunk.shape[0] for chunk in chunks)
    return Tensor(first.dtype, (rows, *first.shape[1:]), b"".join(bytes(chunk.data) for chunk in chunks))
