"""Runs logits processors over the requests that ask for them.

Owns the state of each of these requests, and what becomes of a processor that fails: its requests fail, nothing else.
Must not know the sampler, nor what a processor does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyengine.engine.interfaces import FailedSequence, SequenceState
from anyengine.engine.runner.logits_processors import LogitsProcessor

__all__ = ["LogitsProcessing", "StepProcessing"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Processor:
    name: str
    processor: LogitsProcessor[Any]
    states: dict[str, Any] = field(default_factory=dict)
    """Of the requests that it concerns, by their ids."""

    def applied(self, logits: Tensor, states: Sequence[Any]) -> Tensor:
        """Raises whatever the processor raises, or TypeError for what is no such matrix."""
        changed: object = self.processor.apply(logits, states)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            shape = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise TypeError(f"apply has returned {shape}, not a tensor of {list(logits.shape)}")
        return changed


class LogitsProcessing:
    """All processors of an engine, in their order. One thread.

    Invariant: a request that one of them concerns has a state from :meth:`start` to :meth:`finish`.
    """

    def __init__(self, processors: Mapping[str, LogitsProcessor[Any]]) -> None:
        self._processors = [_Processor(name, processor) for name, processor in processors.items()]

    def start(self, seq: SequenceState) -> None:
        """Ask each processor whether ``seq`` concerns it.

        Raises:
            ValueError: one refuses the request, or has failed.
        """
        for one in self._processors:
            try:
                state = one.processor.start(seq)
            except MemoryError:
                raise
            except ValueError as exc:
                raise ValueError(f"logits processor {one.name!r}: {exc}") from exc
            except Exception as exc:  # a processor's trouble is its request's
                raise ValueError(f"logits processor {one.name!r} failed: {type(exc).__name__}: {exc}") from exc
            if state is not None:
                one.states[seq.request_id] = state

    def finish(self, request_id: str) -> None:
        """Forget its states. Unknown ids are ignored."""
        for one in self._processors:
            one.states.pop(request_id, None)

    def of_step(self, seqs: Sequence[SequenceState]) -> StepProcessing | None:
        """What is to be done for ``seqs``, each of which gets a token; ``None``: nothing."""
        parts: list[_Part] = []
        for one in self._processors:
            if states := one.states:
                members = [(row, states[seq.request_id]) for row, seq in enumerate(seqs) if seq.request_id in states]
                if members:
                    parts.append((one, members))
        return StepProcessing(parts) if parts else None


_Part = tuple[_Processor, list[tuple[int, Any]]]
"""A processor with the rows that it concerns, and the state of each."""


class StepProcessing:
    """One step of all processors that have something to do in it."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self.failures: dict[int, FailedSequence] = {}
        """Why the request of a row cannot go on: whatever is sampled from that row means nothing."""

    def __call__(self, logits: Tensor) -> None:
        """Change ``logits`` [num_seqs, vocab], float32, in place. Never raises for what a processor does."""
        for one, members in self._parts:
            going_on = [member for member in members if member[0] not in self.failures]
            if not going_on:
                continue
            try:
                self._apply(one, logits, going_on)
            except Exception:
                _logger.warning("logits processor %r failed for %d rows", one.name, len(going_on), exc_info=True)
                for member in going_on:
                    self._apply_alone(one, logits, member)

    def _apply_alone(self, one: _Processor, logits: Tensor, member: tuple[int, Any]) -> None:
        try:
            self._apply(one, logits, [member])
        except Exception as exc:  # noqa: BLE001 - its request fails, and alone
            reason = f"logits processor {one.name!r} failed: {type(exc).__name__}: {exc}"
            self.failures[member[0]] = FailedSequence(reason, "internal_error")

    def _apply(self, one: _Processor, logits: Tensor, members: Sequence[tuple[int, Any]]) -> None:
        rows = torch.tensor([row for row, _ in members], device=logits.device)
        changed = one.applied(logits[rows], [state for _, state in members])  # of a copy: it may fail half-way
        highest = changed.amax(dim=-1)  # [num_rows]; NaN, if there is any
        if not highest.isfinite().all():
            for (row, _), value in zip(members, highest.tolist(), strict=True):
                if not math.isfinite(value):
                    reason = f"no token can be chosen after logits processor {one.name!r}: the largest logit is {value}"
                    # Minus infinity: all that was left is forbidden, which the request may have asked for.
                    code = "validation_error" if value == -math.inf else "internal_error"
                    self.failures[row] = FailedSequence(reason, code)
        logits[rows] = changed.to(logits.dtype)
