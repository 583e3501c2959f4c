"""Why a model could not be had, source by source.

Owns the two exceptions only.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ModelNotFoundError", "SourceFailure"]


class SourceFailure(Exception):  # one source's failure is not yet an error: the next one may have the model
    """One source does not have the model: ``source`` names it, ``reason`` and ``remedy`` say why and what to do."""

    def __init__(self, source: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{source}: {reason}" + (f" ({remedy})" if remedy else ""))
        self.source = source
        self.reason = reason
        self.remedy = remedy


class ModelNotFoundError(LookupError):
    """No source has the model.

    ``model`` is what was asked for, ``failures`` has one entry for each source that was tried.
    """

    def __init__(self, model: str, failures: Sequence[SourceFailure]) -> None:
        lines = [f"model={model!r} could not be found. Tried, in this order:"]
        lines += [f"  {number}. {failure}" for number, failure in enumerate(failures, 1)]
        super().__init__("\n".join(lines))
        self.model = model
        self.failures: tuple[SourceFailure, ...] = tuple(failures)
