"""A limiter that notes what it is told, in front of another one."""

from __future__ import annotations

from collections import Counter

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

    def faults(self) -> list[str]:
        """What is wrong when all has ended: each request is settled exactly once, for no more than was reserved."""
        times = Counter(id(demand) for demand, _ in self.settled)
        wrong = [demand for demand in self.reserved if times.pop(id(demand), 0) != 1]
        wrong += [one for one, usage in self.settled if id(one) in times or usage.total_tokens > one.max_total_tokens]
        return [f"not settled once, with what was reserved: {demand}" for demand in wrong]

    def bills(self) -> list[tuple[int, int]]:
        """Prompt and completion tokens of each request, in the order of their ends."""
        assert self.faults() == []
        return [(usage.prompt_tokens, usage.completion_tokens) for _, usage in self.settled]
