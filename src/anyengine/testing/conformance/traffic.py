"""What is remembered of the traffic with an engine: each request, each call, and whatever was against the rules.

Owns the records and the rules that hold for every message whoever asked for it. A rule that is broken is noted here
and judged by the check that it belongs to; so one fault fails one check. Knows no sockets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from anyengine._wire import EngineCoreOutput, EngineCoreOutputs, Frame, SchedulerStats, UtilityOutput
from anyengine._wire.codec import BAD_BYTES

__all__ = ["Call", "Evidence", "TrackedRequest"]

_KEPT = 20  # of each kind of trouble: enough for a person
_LOOSE = msgspec.msgpack.Decoder(list[Any])


@dataclass(eq=False)
class TrackedRequest:
    """A request that was sent, and the outputs that came for it, on whichever client's socket."""

    request_id: str
    client: int
    """Where its outputs must come."""
    via: int
    """The input socket that it was sent by."""
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    clients: set[int] = field(default_factory=set)
    """The output sockets that its outputs came on."""
    aborted: bool = False
    fenced: bool = False
    """An abort was sent, and a call sent after it has been answered: nothing may come any more."""

    @property
    def last(self) -> EngineCoreOutput | None:
        """The output with a finish reason, once it is there."""
        return next((output for output in self.outputs if output.finish_reason is not None), None)

    @property
    def finish_reason(self) -> int | None:
        return self.last.finish_reason if self.last else None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.new_token_ids]


@dataclass(eq=False)
class Call:
    """A utility call that was sent, and its reply."""

    call_id: int
    method: str
    client: int
    reply: UtilityOutput | None = None
    reply_client: int | None = None
    order: int | None = None
    """Its place among all replies."""


class Evidence:
    """Facts about the messages of one engine since its start. Lists are bounded: the first of each kind are kept."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last_timestamp_s: dict[int, float] = {}
        self.num_messages: int = 0
        self.num_replies: int = 0
        self.outputs_lengths: set[int] = set()
        self.output_lengths: set[int] = set()
        self.finish_reasons: set[Any] = set()
        self.undecodable: list[str] = []
        self.strays: list[str] = []
        self.wrong_index: list[Any] = []
        self.time_went_back: list[str] = []
        self.surplus_frames: list[str] = []
        self.mixed_replies: list[str] = []
        self.after_finish: list[str] = []
        self.after_abort: list[str] = []
        self.no_news: list[str] = []
        self.statistics: deque[tuple[SchedulerStats, int]] = deque(maxlen=256)
        """The latest statistics, each with the number of outputs in its message."""
        self.weight_versions: set[str | None] = set()
        """Of messages with outputs that the model made."""
        self.last_raw: Sequence[Any] = ()
        """The latest message with outputs, as plain data."""

    def look(self, frames: Sequence[Frame]) -> None:
        """Take note of a message as it came."""
        self.num_messages += 1
        try:
            raw = _LOOSE.decode(frames[0])
        except BAD_BYTES:
            return  # the typed decoder says what is wrong with it
        self.outputs_lengths.add(len(raw))
        outputs = raw[1] if len(raw) > 1 and isinstance(raw[1], list) else []
        self.output_lengths |= {len(output) for output in outputs if isinstance(output, list)}
        if outputs:
            self.last_raw = raw
        if surplus := set(range(1, len(frames))) - _named_frames(raw):
            named = len(frames) - 1 - len(surplus)
            note(self.surplus_frames, f"{len(frames) - 1} auxiliary frames, of which the payload names {named}")

    def take(self, client: int, message: EngineCoreOutputs) -> None:
        """Take note of a decoded message."""
        if message.engine_index != self._rank:
            note(self.wrong_index, message.engine_index)
        before = self._last_timestamp_s.get(client, 0.0)
        if message.timestamp < before or message.timestamp <= 0.0:
            note(self.time_went_back, f"{message.timestamp} after {before}")
        self._last_timestamp_s[client] = max(before, message.timestamp)
        if message.utility_output is not None and (message.outputs or message.scheduler_stats):
            note(self.mixed_replies, f"a reply together with {len(message.outputs)} outputs or statistics")
        if message.scheduler_stats is not None:
            self.statistics.append((message.scheduler_stats, len(message.outputs)))
        if any(output.new_token_ids for output in message.outputs):
            self.weight_versions.add(message.weight_version)

    def take_output(self, tracked: TrackedRequest | None, client: int, output: EngineCoreOutput) -> None:
        """Take note of an output and give it to its request."""
        if tracked is None:
            note(self.strays, f"an output for request {output.request_id!r}")
            return
        if tracked.last is not None:
            note(self.after_finish, f"{output.request_id!r}: {output.new_token_ids}")
            return
        if tracked.fenced:
            note(self.after_abort, f"{output.request_id!r}: {output.new_token_ids}")
        if output.finish_reason is not None:
            self.finish_reasons.add(output.finish_reason)
        elif not output.new_token_ids and output.new_prompt_logprobs_tensors is None:
            note(self.no_news, f"{output.request_id!r}")
        tracked.outputs.append(output)
        tracked.clients.add(client)


def note(list_: list[Any], what: Any) -> None:
    """Keep ``what``, if there is room."""
    if len(list_) < _KEPT:
        list_.append(what)


def _named_frames(value: Any) -> set[int]:
    """The auxiliary frames in which tensors in ``value`` have their bytes. No recursion: it may be nested deeply."""
    named: set[int] = set()
    parts = [value]
    while parts:
        part = parts.pop()
        if type(part) is dict:
            parts += part.values()
        elif type(part) is list:
            if len(part) == 3 and type(part[0]) is str and type(part[1]) is list and type(part[2]) is int:
                named.add(part[2])
            parts += part
    return named
