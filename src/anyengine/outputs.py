"""What a consumer of a request stream receives.

Owns the public output records. They share no mutable state with each other or with the client: every list was made for
the one object that holds it.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

import msgspec

from anyengine._logprobs import FlatLogprobs, Logprob, LogprobsOnePosition, TensorLike, TokenDecoder
from anyengine._output_records import (
    OutputDetails,
    PrefillUsage,
    RequestFacts,
    RequestMetrics,
    SamplingMask,
    SpecDecodeMetrics,
    WeightVersionSpan,
)
from anyengine.params import LoRARequest

__all__ = [
    "FinishReason",
    "FlatLogprobs",
    "Logprob",
    "LogprobsOnePosition",
    "OutputDetails",
    "PoolingOutput",
    "PrefillUsage",
    "RequestFacts",
    "RequestMetrics",
    "RequestOutput",
    "SamplingMask",
    "SpecDecodeMetrics",
    "TensorLike",
    "TokenDecoder",
    "Usage",
    "WeightVersionSpan",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "repetition"] | str
"""``"stop"`` (an end-of-sequence token, a stop id or a stop string), ``"length"``, ``"abort"``, ``"error"``,
``"repetition"``; an engine newer than this client may send another, which reads ``"unknown:<n>"``."""

_NO_FACTS: Final = RequestFacts()
_NO_DETAILS: Final = OutputDetails()


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a request used, in tokens; ``completion_tokens`` of all its completions together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completions."""
        return self.prompt_tokens + self.completion_tokens


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """One item of a request stream.

    With ``output_kind=DELTA`` (the default) ``text``, ``token_ids`` and ``logprobs`` hold what is new since the item
    before; with ``CUMULATIVE`` and ``FINAL_ONLY`` everything so far. A request with ``n > 1`` has ``n`` completions:
    an item belongs to the one that ``index`` names, and each of them has exactly one item with a ``finish_reason``,
    its last. With ``FINAL_ONLY`` there is one item for all: that of completion 0, with the others beside it.

    Attributes:
        request_id: the caller's label, or the one the client made.
        text: detokenized output; never half a character. Empty when detokenizing is off.
        token_ids: output token ids. They run ahead of ``text`` where a character is not complete yet, and where text
            may be the beginning of a stop string.
        index: which of the ``n`` completions this is.
        stop_reason: the stop id or stop string that ended it; ``None`` at the end-of-sequence token.
        num_prompt_tokens, num_output_tokens: totals so far, in tokens.
        num_held_tokens: how many of the last tokens have text that is held back, for requests with stop strings.
        num_running: how many other completions of the request go on after this item.
        others: the other completions, in the item of a stream with ``FINAL_ONLY`` and in what ``final()`` returns.
        logprobs: one position for each of ``token_ids``, if they were asked for.
        cumulative_logprob: the sum over all tokens so far.
        prompt_logprobs: one position for each token of the prompt, the first of them ``None``. A delta stream has them
            once, in the item with the first token.
        prompt_token_id_logprobs: what ``prompt_logprob_token_ids`` asked for: [num_scored_positions, k]; delivered like
            ``prompt_logprobs``.
        facts: what all items of the completion have in common; most of it can be read here, by vLLM's names.
        last_token_s: when its latest token came, on this host's monotonic clock.
        details: what only some engines send; ``None`` where nothing of it came.
    """

    request_id: str
    text: str
    token_ids: list[int]
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_running: int = 0
    index: int = 0
    facts: RequestFacts = _NO_FACTS
    last_token_s: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_held_tokens: int = 0
    others: tuple[RequestOutput, ...] = ()
    logprobs: FlatLogprobs | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: FlatLogprobs | None = None
    prompt_token_id_logprobs: TensorLike | None = None
    details: OutputDetails | None = None

    @property
    def finished(self) -> bool:
        """Whether this is the stream's last item."""
        return self.finish_reason is not None and not self.num_running

    @property
    def metrics(self) -> RequestMetrics:
        """How the completion has fared so far."""
        return RequestMetrics.of(self.facts, self.last_token_s, self.num_output_tokens)

    @property
    def prompt(self) -> str | None:
        """The text of the prompt; ``None`` where nobody gave a text."""
        return self.facts.prompt

    @property
    def prompt_token_ids(self) -> tuple[int, ...] | None:
        """The tokens of the prompt, as they were sent."""
        return self.facts.prompt_token_ids

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter that was used."""
        return self.facts.lora_request

    @property
    def encoder_prompt(self) -> None:
        """Models with an encoder are not served: always ``None``."""
        return None

    @property
    def encoder_prompt_token_ids(self) -> None:
        """Models with an encoder are not served: always ``None``."""
        return None

    @property
    def prefill(self) -> PrefillUsage | None:
        """Where the prompt's tokens came from; ``None`` before the first token, and where the engine does not say."""
        return self.facts.prefill

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose keys and values came from a cache."""
        return 0 if self.facts.prefill is None else self.facts.prefill.num_cached_tokens

    @property
    def num_cache_creation_tokens(self) -> int:
        """Prompt tokens that were written to the engine's prefix cache for this request."""
        return 0 if self.facts.prefill is None else self.facts.prefill.num_cache_creation_tokens

    @property
    def kv_transfer_params(self) -> Any:
        """What the engine's KV connector has to say, for another engine."""
        return (self.details or _NO_DETAILS).kv_transfer_params

    @property
    def ec_transfer_params(self) -> Any:
        """What the engine's encoder-cache connector has to say, for another engine."""
        return (self.details or _NO_DETAILS).ec_transfer_params

    @property
    def routed_experts(self) -> TensorLike | None:
        """Which experts the tokens went to, [num_tokens, num_layers, k]; with the ``finish_reason``."""
        return (self.details or _NO_DETAILS).routed_experts

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """What each token was sampled from."""
        return (self.details or _NO_DETAILS).sampling_mask

    @property
    def spec_decode_metrics(self) -> SpecDecodeMetrics | None:
        """How speculative decoding fared; with the ``finish_reason``."""
        return (self.details or _NO_DETAILS).spec_decode_metrics

    @property
    def weight_versions(self) -> tuple[WeightVersionSpan, ...] | None:
        """Which weights sampled which tokens; with the ``finish_reason``."""
        return (self.details or _NO_DETAILS).weight_versions

    @property
    def extra(self) -> dict[str, Any]:
        """What an engine newer than this client said that has no name here."""
        return dict((self.details or _NO_DETAILS).extra)

    @property
    def outputs(self) -> tuple[RequestOutput, ...]:
        """All completions in this item, by index."""
        return (self, *self.others)

    @property
    def usage(self) -> Usage:
        """What the completions in this item have used so far."""
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=sum(output.num_output_tokens for output in self.outputs),
            cached_tokens=self.num_cached_tokens,
        )


class PoolingOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed from a prompt's hidden states.

    Attributes:
        request_id: the caller's label, or the one the client made.
        data: the result: [size] for one vector or score vector of the whole prompt, [num_tokens, size] for one of each
            token.
        num_prompt_tokens: in tokens.
        num_cached_tokens: prompt tokens whose keys and values came from a cache.
    """

    request_id: str
    data: TensorLike
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def embedding(self) -> list[float]:
        """The vector of the whole prompt.

        Raises:
            ValueError: there is one of each token, or something else.
        """
        if len(self.data.shape) != 1:
            raise ValueError(f"data of shape {self.data.shape} is no vector")
        numbers: list[float] = self.data.tolist()
        return numbers

    @property
    def probs(self) -> list[float]:
        """The probability of each class.

        Raises:
            ValueError: see :attr:`embedding`.
        """
        return self.embedding

    @property
    def score(self) -> float:
        """The one number that a cross-encoder gives.

        Raises:
            ValueError: there are several.
        """
        numbers = self.data.tolist()
        while isinstance(numbers, list) and len(numbers) == 1:
            numbers = numbers[0]
        if isinstance(numbers, list):
            raise ValueError(f"data of shape {self.data.shape} is no score")
        return float(numbers)
