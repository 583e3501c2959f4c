"""One answer to a request, as its consumer takes it: the tokens of its state, with their text and scores.

Owns the detokenizing of what is taken and everything that was taken so far. Knows neither the wire nor the waiting. A
request with ``n > 1`` has several, each with its own index.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from anyengine.outputs import RequestOutput, TokenDecoder
from anyengine.params import OutputKind, SamplingParams

from .scores import ScoredRequestState, Scores
from .state import RequestState

if TYPE_CHECKING:
    from anyengine._text import Detokenizer

__all__ = ["Completion"]


class Completion:
    """See the module. Owned by the task that iterates the stream."""

    __slots__ = (
        "_detokenizer",
        "_everything",
        "_num_prompt_tokens",
        "_plain",
        "_scores",
        "_shows_stop",
        "_text",
        "_token_ids",
        "index",
        "over",
        "state",
    )

    def __init__(
        self,
        index: int,
        state: RequestState,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
        num_prompt_tokens: int,
        decode: TokenDecoder | None,
    ) -> None:
        self.index = index
        self.state = state
        self.over = False
        """Whether the final output has been taken."""
        self._detokenizer = detokenizer if state.stopper is None else None  # else the stopper has it
        self._everything = params.output_kind is not OutputKind.DELTA
        self._shows_stop = params.include_stop_str_in_output
        self._num_prompt_tokens = num_prompt_tokens
        self._scores = Scores(params, decode) if isinstance(state, ScoredRequestState) else None
        self._token_ids: list[int] = state.taken
        self._text: list[str] = []
        self._plain = not self._everything and self._scores is None and state.stopper is None

    def take(self, num_running: int = 0, *, everything: bool = False) -> RequestOutput:
        """Empty the merge buffer into an output. Synchronous, so nothing can be lost between the buffer and the caller.

        ``num_running``: how many other completions of the request go on. ``everything``: not only what is new, whatever
        the request's kind of output is.
        """
        state = self.state
        finished = state.finish_reason is not None
        ids = state.token_ids or []
        if self._plain and not finished and not everything and state.details is None:
            # The hot loop, the middle of a stream of deltas: what follows does the same, in more calls.
            text = "" if self._detokenizer is None else self._detokenizer.push(ids)
            state.token_ids, state.readable, state.unmarked = None, state.error is not None, 0
            self._token_ids += ids
            if text:
                self._text.append(text)
            return RequestOutput(
                state.label,
                text,
                ids,
                self._num_prompt_tokens,
                len(self._token_ids),
                num_running,
                self.index,
                state.facts or state.make_facts(),
                state.latest_token_s,
            )
        text = self._detokenize(ids, finished=finished)
        self._keep(state, ids, text)
        self.over = finished
        everything = everything or self._everything
        if everything:
            text, ids = "".join(self._text), self._token_ids.copy()
        return self._output(text, ids, num_running, everything=everything)

    def snapshot(self) -> RequestOutput:
        """Everything that has arrived. Never fails: what cannot be detokenized has no text."""
        ids = self.state.token_ids
        if ids:
            text = ""
            with suppress(Exception):  # an error is on its way already, perhaps this one
                text = self._detokenize(ids, finished=False)
            self._keep(self.state, ids, text)
        elif self.state.stopper is not None and (text := self.state.stopper.take()):
            self._text.append(text)  # of tokens that were taken before: it was held back, and none will follow
        return self._output("".join(self._text), self._token_ids.copy(), 0, everything=True)

    def _keep(self, state: RequestState, ids: list[int], text: str) -> None:
        # With an error still to be raised there is more to come, and nobody will wake the consumer for it again.
        state.token_ids, state.readable, state.unmarked = None, state.error is not None, 0
        self._token_ids += ids
        if self._scores is not None:  # together with the tokens, always: a row for each
            assert isinstance(state, ScoredRequestState)
            self._scores.take(state)
        if text:
            self._text.append(text)

    def _detokenize(self, ids: list[int], *, finished: bool) -> str:
        stopper = self.state.stopper
        if stopper is not None:
            return stopper.take()
        detokenizer = self._detokenizer
        if detokenizer is None:
            return ""
        if not finished:
            return detokenizer.push(ids)
        if self.state.finish_reason == "stop" and not self._shows_stop:
            ids = ids[:-1]  # the token that ended it is among the ids, but no part of the text (as in vLLM)
        return detokenizer.push(ids) + detokenizer.finish()

    def _output(self, text: str, ids: list[int], num_running: int, *, everything: bool) -> RequestOutput:
        state = self.state
        output = RequestOutput(
            request_id=state.label,
            text=text,
            token_ids=ids,
            index=self.index,
            finish_reason=state.finish_reason,
            stop_reason=state.stop_reason,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=len(self._token_ids),
            num_running=num_running,
            facts=state.facts or state.make_facts(),
            last_token_s=state.latest_token_s,
        )
        # Not in the same call: what few requests have would double what an output without it costs.
        if state.stopper is not None:
            output = replace(output, num_held_tokens=state.stopper.num_held_tokens)
        if state.details is not None:
            finished, count = state.finish_reason is not None, len(self._token_ids)
            output = replace(output, details=state.details.take(count, finished=finished, everything=everything))
        return output if self._scores is None else replace(output, **self._scores.fields(everything=everything))
