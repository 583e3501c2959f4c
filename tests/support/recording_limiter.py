"""A limiter that notes what it is told, in front of another one."""

from __future__ import annotations

from anyengine import Limiter, TokenBuckets, TokenDemand, Usage

__all__ = ["RecordingLimiter"]


class RecordingLimiter:
    def __init__(self, inner: Limiter | None = None) -> None:
        self.inner = inner or TokenBuckets()
        self.reserved: list[TokenDemand] = []
        self.settled: list[tuple[TokenDemand, Usage]] = []

    def reserve(self, demand: TokenDemand) -> None:
        self.inner.reserve(demand)
        self.reserved.append(demand)

    def settle(self, demand: TokenDemand, usage: Usage) -> None:
        self.settled.append((demand, usage))
        self.inner.settle(demand, usage)

    def bills(self) -> list[tuple[int, int]]:
        """Prompt and completion tokens of each request, in the order of their ends; each was settled exactly once."""
        assert sorted(id(demand) for demand, _ in self.settled) == sorted(map(id, self.reserved))
        return [(usage.prompt_tokens, usage.completion_tokens) for _, usage in self.settled]
