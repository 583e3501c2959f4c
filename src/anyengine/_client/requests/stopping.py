"""Stop strings and patterns between the engine and the consumer: the text of outputs as they arrive, and where it ends.

Owns what a match does to an engine's output: surplus tokens go, and its finish reason is ours. Only requests with stop
strings or patterns have one, since they alone are detokenized before anybody asks for their text.
"""

from __future__ import annotations

from time import thread_time
from typing import Final

from anyengine._text import Detokenizer, PatternText, StopText
from anyengine._wire import EngineCoreOutput, FinishReason
from anyengine.params import SamplingParams

__all__ = ["Stopper"]

_STOP: Final = FinishReason.STOP


class Stopper:
    """The text of one request with stop strings or patterns. Owned by its state; the stream takes from it."""

    __slots__ = ("_include", "_pieces", "_text")

    def __init__(self, params: SamplingParams, detokenizer: Detokenizer) -> None:
        self._include = params.include_stop_str_in_output
        least = params.min_tokens
        self._text = (
            PatternText(
                detokenizer,
                params.stop,
                params.stop_regex,
                clock=thread_time,
                include=self._include,
                min_tokens=least,
            )
            if params.stop_regex
            else StopText(detokenizer, params.stop, include=self._include, min_tokens=least)
        )
        self._pieces: list[str] = []

    @property
    def num_held_tokens(self) -> int:
        """How many of the last tokens have text that is not given yet."""
        return self._text.num_held_tokens

    def look(self, output: EngineCoreOutput) -> bool:
        """Take the tokens of ``output`` and make of it what it is to the consumer; whether the engine, which knows
        nothing of this, must be told to stop."""
        token_ids, reason = output.new_token_ids, output.finish_reason
        kept = self._text.push(token_ids, last_is_silent=reason == _STOP and not self._include)
        if self._text.matched is not None:
            del token_ids[kept:]
            output.finish_reason, output.stop_reason = _STOP, self._text.matched
        self._give(finished=output.finish_reason is not None)
        return reason is None and self._text.matched is not None

    def end(self) -> None:
        """No output will follow: all of the text may be given."""
        self._give(finished=True)

    def take(self) -> str:
        """The text that has been given since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _give(self, *, finished: bool) -> None:
        if finished:
            self._text.finish()
        if text := self._text.take(finished=finished):
            self._pieces.append(text)
