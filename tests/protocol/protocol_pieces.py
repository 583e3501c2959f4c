"""What the protocol tests are made of: consumers, requests and outputs."""

from __future__ import annotations

from typing import Any

from anyengine._wire import EngineCoreOutput, EngineCoreRequest, WireSamplingParams

__all__ = ["PREFIX", "Consumer", "nothing", "output", "request"]

PREFIX = 0x1234_5678


class Consumer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self.errors: list[BaseException] = []
        self.aborts = 0

    def push(self, output: EngineCoreOutput) -> None:
        self.outputs.append(output)

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)

    def aborted(self) -> None:
        self.aborts += 1

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.new_token_ids]


def request(request_id: str = "a", **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [1, 2, 3], sampling_params=WireSamplingParams(max_tokens=4), **fields)


def output(request_id: str, *token_ids: int, finish_reason: int | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(request_id, list(token_ids), finish_reason=finish_reason)


def nothing() -> None:
    """Somebody who is told, and does nothing about it."""
