"""What a prompt and its parameters become before they are sent.

Owns the client's knowledge of the model (tokenizer, vocabulary, limits) and every check that comes before the first
byte. Sends nothing and registers nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import anyio.to_thread

from anyengine._protocol import EngineLimits, check_prompt, check_token_ids, output_budget
from anyengine._text import Detokenizer, ModelFacts, Tokenizer
from anyengine._wire import EngineCoreReadyResponse, EngineCoreRequest, sampling_to_wire
from anyengine.exceptions import RequestRejected
from anyengine.params import SamplingParams

__all__ = ["RequestBuilder"]

_INLINE_TOKENIZE_CHARS = 16_384  # a few ms of a fast tokenizer; longer texts go to a worker thread
_NO_LIMIT_TOKENS = 1 << 31
_NOT_YET = ("stop", "logprobs", "prompt_logprobs", "structured_outputs", "bad_words")
"""Parameters whose client half does not exist yet: refused, never ignored."""


class RequestBuilder:
    """Makes engine-core requests for one session's model. Lifetime: one session."""

    def __init__(
        self,
        facts: ModelFacts | None,
        tokenizer: Tokenizer | None,
        trouble: RequestRejected | None,
        registrations: Iterable[EngineCoreReadyResponse | None],
        wire_id_prefix: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._trouble = trouble
        self._wire_id_prefix = wire_id_prefix
        self._count = 0
        vocab_size = tokenizer.vocab_size if tokenizer else facts.vocab_size if facts else None
        self._eos_token_ids = tokenizer.eos_token_ids if tokenizer else facts.eos_token_ids if facts else ()
        lengths = [ready.max_model_len for ready in registrations if ready is not None]
        self.limits = EngineLimits(max_model_len=min(lengths, default=_NO_LIMIT_TOKENS), vocab_size=vocab_size)

    @classmethod
    async def load(
        cls,
        model_dir: str | None,
        registrations: Iterable[EngineCoreReadyResponse | None],
        wire_id_prefix: str,
        *,
        text: bool = True,
    ) -> Self:
        """Read the model's files in a worker thread.

        A directory without a usable tokenizer is no error: token ids go in and out; text is refused with the reason.
        The same without ``text``, which an engine may have been told to leave to others.

        Raises:
            RequestRejected: ``model_dir`` is no directory, or one of its files is broken.

        Cancellation: returns at once; a disk that hangs keeps only its worker thread.
        """
        if model_dir is None:
            return cls(None, None, None if text else _text_left_out(), registrations, wire_id_prefix)
        facts, tokenizer, trouble = await anyio.to_thread.run_sync(_read_model_dir, model_dir, abandon_on_cancel=True)
        if not text:
            tokenizer, trouble = None, _text_left_out()
        return cls(facts, tokenizer, trouble, registrations, wire_id_prefix)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            RequestRejected: there is none, for the reason it names.
        """
        if self._tokenizer is not None:
            return self._tokenizer
        if self._trouble is not None:
            raise self._trouble.for_waiter()
        raise RequestRejected(
            "the engine did not say where its model's tokenizer is, so text cannot become tokens",
            parameter="prompt",
            remedy="give token ids; or describe the engine with a model_dir",
        )

    async def encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        """The prompt as token ids, unchecked; long texts are tokenized in a worker thread.

        Raises:
            RequestRejected: text was given and cannot be tokenized.

        Cancellation: returns at once; a worker thread's result is discarded.
        """
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self.tokenizer
        if len(prompt) <= _INLINE_TOKENIZE_CHARS:
            return tokenizer.encode(prompt)
        return await anyio.to_thread.run_sync(tokenizer.encode, prompt, abandon_on_cancel=True)

    def build(
        self, prompt: Sequence[int], params: SamplingParams, label: str | None, priority: int
    ) -> tuple[EngineCoreRequest, Detokenizer | None]:
        """Check everything that can be checked, and make the request. Its wire id is unique whatever the label is.

        Raises:
            RequestRejected: a rule is broken; the error names parameter, value and remedy.
        """
        self._count += 1
        label = f"request-{self._count}" if label is None else label
        _check_label(label)
        limits = self.limits
        prompt_ids = check_prompt(prompt, limits, request_id=label)
        check_token_ids(params.stop_token_ids or (), limits.vocab_size, parameter="stop_token_ids", request_id=label)
        _refuse_unfinished(params, label)
        eos_ids = self._eos_token_ids
        request = EngineCoreRequest(
            request_id=f"{label}-{self._wire_id_prefix}{self._count:x}",
            prompt_token_ids=prompt_ids,
            sampling_params=sampling_to_wire(
                params,
                eos_token_id=eos_ids[0] if eos_ids else None,
                extra_stop_token_ids=eos_ids[1:],
                max_tokens=output_budget(
                    len(prompt_ids), params.max_tokens, params.min_tokens, limits, request_id=label
                ),
            ),
            arrival_time=time.time(),
            priority=priority,
            external_req_id=label,
        )
        if not params.detokenize or self._tokenizer is None:
            return request, None
        return request, self._tokenizer.detokenizer(prompt_ids, skip_special_tokens=params.skip_special_tokens)


def _text_left_out() -> RequestRejected:
    return RequestRejected(
        "the engine was started with skip_tokenizer_init: token ids go in and out, and no text",
        parameter="prompt",
        remedy="give token ids; or leave skip_tokenizer_init out; or describe the engine with a model_dir",
    )


def _read_model_dir(model_dir: str) -> tuple[ModelFacts, Tokenizer | None, RequestRejected | None]:
    try:
        return _read_model_files(model_dir)
    except RequestRejected:
        raise
    except BaseException as exc:
        # An engine named the directory: what is in it can make parsers fail in ways of their own (a RecursionError; a
        # panic of the Rust code, no Exception). Nothing else is raised in a worker thread, which knows no cancellation.
        raise RequestRejected(  # noqa: ASYNC104
            f"the model's files in {model_dir!r:.500} cannot be read: {type(exc).__name__}: {exc!s:.500}",
            parameter="model",
            value=model_dir,
            remedy="repair the directory, or fetch the model again",
        ) from exc


def _read_model_files(model_dir: str) -> tuple[ModelFacts, Tokenizer | None, RequestRejected | None]:
    facts = ModelFacts.read(model_dir)
    try:
        return facts, Tokenizer.from_directory(model_dir), None
    except RequestRejected as trouble:
        if (
            (Path(model_dir) / "tokenizer.json").is_file()
            and trouble.__cause__
            and not isinstance(trouble.__cause__, ImportError)
        ):
            raise  # a broken file is the user's to repair; a missing one, or a missing package, may be what they want
        return facts, None, trouble


def _check_label(label: object) -> None:
    if not isinstance(label, str):
        raise RequestRejected(
            f"request_id={label!r} is a {type(label).__name__}, not a str",
            parameter="request_id",
            value=label,
            remedy="give a str, or None for one of our own",
        )


def _refuse_unfinished(params: SamplingParams, label: str) -> None:
    named = {name: getattr(params, name) for name in _NOT_YET if getattr(params, name) not in (None, ())}
    if params.n > 1:
        named["n"] = params.n
    for name, value in named.items():
        raise RequestRejected(
            f"{name}={value!r} is not supported by this release of the client",
            parameter=name,
            value=value,
            remedy="leave it out" + (" (stop_token_ids works)" if name == "stop" else ""),
            request_id=label,
        )
