"""Cases for the differential test of the text side: bytes in, a request and what its engine sends out.

A case is read off a string of bytes, so that Hypothesis can draw many of them in one example and shrink each.
"""

from __future__ import annotations

from typing import Any

from built_tokenizers import built, ids_of_bytes

TOKENIZERS = ("byte_level", "byte_fallback")
WORDS = ("the", "is", "a", "ab", "fox.", "capital of", "é", "🦙", "東京", "👩‍👩‍👧", "ü", " ", ". ", "\n")
STOPS = ("a", "ab", "the", "x.", "🦙", "é", "東京", ". ", "e i", "👩", "is the", "京a")
FINISHES = (0, 0, 1, 4)  # stop, length, repetition
KINDS = (1, 1, 0, 2)  # delta, cumulative, final only
EOS, OTHER_EOS, STOP_ID = 1, 3, 60


class Choices:
    """Small numbers from bytes; zero when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def below(self, limit: int) -> int:
        return next(self._data, 0) % limit

    def of(self, options: Any) -> Any:
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1  # not with bytes that are used up


def make_case(data: bytes) -> dict[str, Any]:
    """A request (``params``, ``prompt``) and ``events``: frames of outputs, takes, an abort."""
    choices = Choices(data)
    name = choices.of(TOKENIZERS)
    params = make_params(choices, texts=name == "byte_level")
    prompt: Any = "the fox is a" if name == "byte_level" and choices.chance(4) else make_ids(choices, name, 2)
    events = make_events(
        choices,
        name,
        params,
        num_prompt_tokens=len(built(name).encode(prompt)) if isinstance(prompt, str) else len(prompt),
    )
    return {"tokenizer": name, "params": params, "prompt": prompt, "events": events}


def make_params(choices: Choices, *, texts: bool) -> dict[str, Any]:
    n = choices.of((1, 1, 1, 2, 3))
    params: dict[str, Any] = {"n": n, "max_tokens": 100, "output_kind": choices.of(KINDS)}
    params["temperature"] = choices.of((0.7, 1.0)) if n > 1 else choices.of((0.0, 0.7, 0.001))
    if choices.chance(2):
        params["stop"] = [choices.of(STOPS) for _ in range(choices.of((1, 1, 2, 3)))]
        params["include_stop_str_in_output"] = choices.chance(2)
        params["min_tokens"] = choices.of((0, 0, 1, 4))
    elif choices.chance(8):
        params["detokenize"] = False
    if choices.chance(3):
        params["logprobs"] = choices.of((0, 1, 3))
    elif choices.chance(8):
        params["logprob_token_ids"] = [7, 9]
    if choices.chance(4):
        params["prompt_logprobs"] = choices.of((0, 2))
    if params["output_kind"] == 1 and choices.chance(4):
        params["stream_interval"] = choices.of((2, 3, 5))
    if choices.chance(3):
        params["skip_special_tokens"] = False
        params["spaces_between_special_tokens"] = choices.chance(2)
    if choices.chance(3):
        params |= rare_params(choices, texts=texts)
    return params


def rare_params(choices: Choices, *, texts: bool) -> dict[str, Any]:
    """What only the engine acts on."""
    every: list[dict[str, Any]] = [
        {"seed": choices.of((0, 7, -1, 2**40))},
        {"presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25},
        {"top_p": 0.5, "top_k": choices.of((-1, 0, 5)), "min_p": 0.25},
        {"stop_token_ids": [STOP_ID, EOS, STOP_ID]},
        {"ignore_eos": True},
        {"max_tokens": None},
        {"logit_bias": {5: 100.0, 6: -1.0}},
        {"allowed_token_ids": [5, 6, 7]},
        {"extra_args": {"kv": {"a": [1, 2.5, None]}}},
        {"skip_reading_prefix_cache": True},
        {"repetition_detection": None},
        {"bad_words": ["the", " fox", "is the"]} if texts else {},
    ]
    chosen: dict[str, Any] = {}
    for _ in range(choices.of((1, 2, 3))):
        chosen |= choices.of(every)
    return chosen


def make_ids(choices: Choices, name: str, num_words: int) -> list[int]:
    """Tokens of whole characters, and characters byte by byte: none is a part of one character and all of another."""
    tokenizer = built(name)
    ids: list[int] = []
    for _ in range(num_words):
        if choices.chance(8):
            ids.append(choices.of(added_tokens(name)))
            continue
        word = choices.of(WORDS)
        for character in [word] if choices.chance(3) else word:
            tokens = tokenizer.encode(character, add_special_tokens=False)
            broken = "\ufffd" in tokenizer.decode(
                tokens
            )  # the added token "é" of byte_level, which is half a character
            ids += ids_of_bytes(tokenizer, character.encode()) if len(character) > 1 or broken else tokens
    return ids or [5]


def added_tokens(name: str) -> list[int]:
    """Special tokens but for those that end an output, and others."""
    added = built(name)._backend.get_added_tokens_decoder()
    return [token for token, one in added.items() if token not in (EOS, OTHER_EOS) and one.content != "é"]


def make_events(choices: Choices, name: str, params: dict[str, Any], num_prompt_tokens: int) -> list[dict[str, Any]]:
    left = [make_ids(choices, name, 1 + choices.below(12)) for _ in range(params["n"])]
    reasons = [choices.of(FINISHES) for _ in left]
    for ids, reason in zip(left, reasons, strict=True):
        if choices.chance(8):
            del ids[-1]  # perhaps in the middle of a character
        if reason == 0 or not ids:
            ids.append(EOS)
    always = params.get("stream_interval") is not None  # what is merged may be cut elsewhere: docs/differences.md
    frame_size = choices.of((1, 2, 4, 8))
    events: list[dict[str, Any]] = []
    started = [False] * len(left)
    while any(left):
        outputs = []
        for index, ids in enumerate(left):
            if not ids or (len(left) > 1 and choices.chance(3)):
                continue
            frame, left[index] = ids[: (count := 1 + choices.below(frame_size))], ids[count:]
            reason = None if left[index] else reasons[index]
            stop = choices.of((None, STOP_ID)) if reason == 0 else None
            prompt = None if started[index] else prompt_rows(params, num_prompt_tokens)
            outputs.append([index, frame, reason, stop, sample_rows(choices, params, frame), prompt])
            started[index] = True
        events.append({"do": "frame", "outputs": outputs})
        if always or not choices.chance(3):
            events.append({"do": "take"})
        if choices.chance(32):
            events.append({"do": "abort"})
    return [*events, {"do": "take"}]


def sample_rows(choices: Choices, params: dict[str, Any], ids: list[int]) -> Any:
    """Rows as an engine sends them: now and then with more columns than were asked for."""
    asked = len(params.get("logprob_token_ids", ())) or params.get("logprobs")
    if asked is None:
        return None
    columns = asked + choices.of((0, 0, 2))
    rows = [[token, *[(token + 11 * (c + 1)) % 200 for c in range(columns)]] for token in ids]
    return [rows, [[-(1 + c + token % 7) / 8 for c in range(columns + 1)] for token in ids], [1 + t % 5 for t in ids]]


def prompt_rows(params: dict[str, Any], num_prompt_tokens: int) -> Any:
    if (asked := params.get("prompt_logprobs")) is None:
        return None
    rows = range(num_prompt_tokens - 1)
    return [
        [[10 + row, *[40 + 3 * row + c for c in range(asked)]] for row in rows],
        [[-(row + c) / 4 for c in range(asked + 1)] for row in rows],
        [1 + row for row in rows],
    ]
