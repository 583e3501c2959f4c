"""The prompt of a request: token ids and lengths.

Owns the rules that an engine does not check (PROTOCOL §12: an empty prompt, a prompt that is too long or an id outside
the vocabulary kills a real vLLM engine for everybody).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

from anyengine._rules import a_type
from anyengine.exceptions import RequestRejected

from .limits import EngineLimits

__all__ = ["check_in_vocabulary", "check_prompt", "check_prompt_length", "check_token_ids", "output_budget"]

_NO_SEQUENCE = (str, bytes, bytearray, memoryview, Mapping, AbstractSet)  # iterable, but not as token ids in an order


def check_prompt(
    prompt_token_ids: object, limits: EngineLimits, *, generates: bool = True, request_id: str | None = None
) -> list[int]:
    """A private copy of the prompt, as a list of ints. ``generates``: room for an output token is needed.

    Raises:
        RequestRejected: it is empty, not a sequence of integers, has an id outside the vocabulary, or is too long.
    """
    try:
        if isinstance(prompt_token_ids, _NO_SEQUENCE):
            raise TypeError
        ids: list[int] = list(prompt_token_ids)  # type: ignore[call-overload]  # finding out is the point
    except TypeError:
        raise RequestRejected(
            f"prompt={_short(prompt_token_ids)} is neither text nor a sequence of token ids",
            parameter="prompt",
            value=prompt_token_ids,
            remedy="give a str, or a sequence of ints",
            request_id=request_id,
        ) from None
    check_prompt_length(len(ids), limits, generates=generates, request_id=request_id)
    check_token_ids(ids, limits.vocab_size, parameter="prompt", request_id=request_id)
    return ids


def check_prompt_length(
    num_tokens: int,
    limits: EngineLimits,
    *,
    parameter: str = "prompt",
    generates: bool = True,
    request_id: str | None = None,
) -> None:
    """Check the length of a prompt.

    Raises:
        RequestRejected: it is empty, too long, or leaves no room for an output token that ``generates`` calls for.
    """
    if not num_tokens:
        raise RequestRejected(
            f"the prompt is empty ({parameter}=[]): an engine needs at least one token to continue from",
            parameter=parameter,
            value=[],
            remedy="give at least one token (for an unconditional sample: the model's bos token)",
            request_id=request_id,
        )
    longest = limits.max_model_len - generates
    if num_tokens > longest:
        room = ", prompt and output together, so at least one token of room is needed" if generates else ""
        raise RequestRejected(
            f"the prompt has {num_tokens} tokens; the engine's max_model_len is {limits.max_model_len}{room}",
            parameter=parameter,
            value=num_tokens,
            remedy=f"shorten it to at most {longest} tokens, or start the engine with a larger max_model_len",
            request_id=request_id,
        )


def check_token_ids(
    ids: Collection[int], vocab_size: int | None, *, parameter: str, request_id: str | None = None
) -> None:
    """Check that all of ``ids`` are token ids.

    Raises:
        RequestRejected: one is not an int, is negative, or is not below ``vocab_size``.
    """
    if set(map(type, ids)) - {int}:
        position, token_id = next((i, token_id) for i, token_id in enumerate(ids) if type(token_id) is not int)
        raise RequestRejected(
            f"{parameter}[{position}]={_short(token_id)} is {a_type(token_id)}, not an int",
            parameter=parameter,
            value=token_id,
            remedy="give plain ints (for an array: .tolist())",
            request_id=request_id,
        )
    check_in_vocabulary(ids, vocab_size, parameter=parameter, request_id=request_id)


def check_in_vocabulary(
    ids: Collection[int], vocab_size: int | None, *, parameter: str, request_id: str | None = None
) -> None:
    """Check that all of ``ids``, which are ints, are token ids.

    Raises:
        RequestRejected: one is negative, or is not below ``vocab_size``.
    """
    if not ids:
        return
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        value = lowest if lowest < 0 else highest
        bound = "unknown" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise RequestRejected(
            f"{parameter}: token id {value} is outside the vocabulary ({bound})",
            parameter=parameter,
            value=value,
            remedy="use the tokenizer of the model that the engine serves",
            request_id=request_id,
        )


def output_budget(
    num_prompt_tokens: int,
    max_tokens: int | None,
    min_tokens: int,
    limits: EngineLimits,
    *,
    request_id: str | None = None,
) -> int:
    """How many output tokens to ask for: ``max_tokens``, or all the room that the prompt leaves when it is ``None``.

    Raises:
        RequestRejected: ``min_tokens`` cannot be reached.
    """
    room = limits.max_model_len - num_prompt_tokens
    budget = room if max_tokens is None else min(max_tokens, room)
    if min_tokens > budget:
        raise RequestRejected(
            f"min_tokens={min_tokens} cannot be reached: only {budget} output tokens are possible "
            f"(max_tokens={max_tokens}, max_model_len={limits.max_model_len}, prompt of {num_prompt_tokens})",
            parameter="min_tokens",
            value=min_tokens,
            remedy="lower min_tokens, raise max_tokens, or shorten the prompt",
            request_id=request_id,
        )
    return budget


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
