"""What a prompt and its parameters become before they are sent.

Owns the client's knowledge of the model (tokenizer, vocabulary, limits) and every check that comes before the first
byte. Sends nothing and registers nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from anyengine._client.engines.model_info import ModelInfo, model_info
from anyengine._client.worker_threads import WorkerThreads
from anyengine._protocol import EngineLimits, check_prompt, num_prompt_tokens, output_budget
from anyengine._rules import a_type, reject
from anyengine._text import Detokenizer, Tokenizer, compile_pattern, settle_structured_outputs, tokenize_bad_words
from anyengine._wire import (
    EngineCoreReadyResponse,
    EngineCoreRequest,
    WirePoolingParams,
    WireSamplingParams,
    lora_to_wire,
    pooling_to_wire,
    sampling_to_wire,
)
from anyengine.exceptions import RequestRejected
from anyengine.outputs import TokenDecoder
from anyengine.params import PoolingParams, SamplingParams

from .model_files import ModelFiles
from .multimodal import (
    MultiModalPreprocessor,
    MultiModalPrompt,
    MultiModalTokens,
    Preprocessing,
    as_multimodal,
    fields_with_features,
)
from .pooling_checks import POOLING_TASKS, settle_pooling
from .prompts import Embeddings, Prompt, embeddings_bytes, is_embeddings, take_embeddings
from .request_fields import RequestFields, check_fields, check_multimodal
from .sampling_checks import check_sampling
from .text_prompts import Tokenization, is_text, num_chars, tokenize, without_dictionary

__all__ = ["RequestBuilder"]

ResultT = TypeVar("ResultT")

_INLINE_TOKENIZE_CHARS = 16_384  # a few ms of a fast tokenizer; longer texts go to a worker thread
_TOKENIZER_THREADS = 4
_INLINE_COPY_BYTES = 1 << 20  # a few ms of looking through embeddings


class RequestBuilder:
    """Makes engine-core requests for one session's model. Lifetime: one session."""

    def __init__(
        self,
        files: ModelFiles,
        limits: EngineLimits,
        wire_id_prefix: str,
        mm_preprocessor: MultiModalPreprocessor | None = None,
    ) -> None:
        self._model, self._tokenizer, self._trouble = model, tokenizer, _ = files
        self.client_id: str = wire_id_prefix
        """What tells the requests of this session from all others."""
        self._count = 0
        self._eos_token_ids = tokenizer.eos_token_ids if tokenizer else model.eos_token_ids if model else ()
        self.take_limits(limits)
        self._backend: str | None = None
        self._preprocessing = None if mm_preprocessor is None else Preprocessing(mm_preprocessor)
        # Of their own, so that nobody waits behind other threads of the application, nor they behind long prompts.
        self._threads = WorkerThreads(_TOKENIZER_THREADS)

    def take_limits(self, limits: EngineLimits) -> None:
        """Go by ``limits``, which are those of every engine, from now on."""
        if limits.vocab_size is None and self._tokenizer is not None:
            limits = msgspec.structs.replace(limits, vocab_size=self._tokenizer.vocab_size)
        self.limits: EngineLimits = limits

    def model_info(self, ready: EngineCoreReadyResponse | None) -> ModelInfo:
        """What the model is; ``ready`` is what the engines have said of themselves."""
        return model_info(ready, self.limits, self._model, has_tokenizer=self._tokenizer is not None)

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

    @property
    def token_texts(self) -> TokenDecoder | None:
        """What tells the texts of single tokens; ``None`` without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_texts

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends an output, the first if there are several."""
        return self._eos_token_ids[0] if self._eos_token_ids else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole output; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def encode(self, prompt: Prompt, params: object = None, options: object = None) -> Sequence[int] | Embeddings:
        """The prompt as token ids, unchecked, or as embeddings; long ones are worked on in a worker thread.

        ``options`` are the request's ``tokenization_kwargs``; ``params`` say how much room its output needs.

        Raises:
            RequestRejected: text was given and cannot be tokenized, or what was given are no embeddings.

        Cancellation: returns at once; a worker thread's result is discarded.
        """
        if is_embeddings(prompt):
            if embeddings_bytes(prompt) <= _INLINE_COPY_BYTES:
                return take_embeddings(prompt)
            return await self._in_thread(take_embeddings, prompt)
        if isinstance(prompt := as_multimodal(prompt), MultiModalPrompt):
            return await self._preprocess(prompt, options)
        tokenization = Tokenization.of(options)
        prompt = without_dictionary(prompt)
        token_ids = cast("Sequence[int]", prompt)  # checked when the request is built
        if is_text(prompt):
            work = partial(tokenize, self.tokenizer, prompt, tokenization)
            token_ids = work() if num_chars(prompt) <= _INLINE_TOKENIZE_CHARS else await self._in_thread(work)
        if tokenization.truncate_prompt_tokens is None:
            return token_ids
        room = getattr(params, "max_tokens", None) or 1
        return tokenization.cut(token_ids, max(self.limits.max_model_len - room, 1))

    async def _preprocess(self, prompt: MultiModalPrompt, options: object) -> MultiModalTokens:
        """Everything that can be refused is, before the hook is asked."""
        if self._preprocessing is None:
            raise RequestRejected(
                "multi_modal_data: the client has nothing that makes features of it",
                parameter="multi_modal_data",
                value=prompt.multi_modal_data,
                remedy="make the client with mm_preprocessor=...; or give the token ids, with their placeholders, and "
                "mm_features=[MultiModalFeatureSpec(...), ...] as a processor of the engine's release made them",
            )
        check_multimodal("multi_modal_data", prompt.multi_modal_data, self._model.multimodal if self._model else None)
        if options:
            problem = "are for text alone; mm_preprocessor makes the tokens of this prompt"
            reject("tokenization_kwargs", options, problem, "leave them out, or give the hook mm_processor_kwargs")
        return await self._preprocessing.tokens(prompt)

    async def _in_thread(self, work: Callable[..., ResultT], *args: Any) -> ResultT:
        return await self._threads.run(work, *args)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """See :meth:`EngineClient.default_sampling_params`."""
        model: dict[str, Any] = dict(self._model.sampling) if self._model else {}
        return SamplingParams(**model | given)

    def build(
        self,
        prompt: Sequence[int] | Embeddings,
        params: SamplingParams | PoolingParams,
        label: str | None,
        fields: RequestFields,
    ) -> EngineCoreRequest:
        """Check everything that can be checked, and make the request. Its wire id is unique whatever the label is.

        Raises:
            RequestRejected: a rule is broken; the error names parameter, value and remedy.
        """
        label, wire_id = self.next_ids(label)
        request = EngineCoreRequest(
            request_id=wire_id,
            prompt_token_ids=None,
            arrival_time=time.time(),
            external_req_id=label,
        )
        try:
            self._put_prompt(request, prompt, generates=isinstance(params, SamplingParams))
            self._put_fields(request, fields_with_features(fields, prompt))
            if isinstance(params, PoolingParams):
                request.pooling_params = self._pooling(params)
            else:
                request.sampling_params = self._sampling(params, request)
        except RequestRejected as refusal:
            refusal.request_id = label
            raise
        return request

    def detokenizer(self, request: EngineCoreRequest, params: SamplingParams) -> Detokenizer | None:
        """A detokenizer for one completion of ``request``, if there will be text."""
        if not params.detokenize or self._tokenizer is None:
            return None
        return self._tokenizer.detokenizer(
            request.prompt_token_ids or (),
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )

    def next_ids(self, label: str | None) -> tuple[str, str]:
        """The label of a request, made up if there is none, and its wire id.

        Raises:
            RequestRejected: the label is no str.
        """
        self._count += 1
        label = f"request-{self._count}" if label is None else label
        _check_label(label)
        return label, f"{label}-{self.client_id}{self._count:x}"

    def note_sent(self, request: EngineCoreRequest) -> None:
        """``request`` is on its way: what it settles for the engine's life is settled."""
        sampling = request.sampling_params
        if sampling is not None and sampling.structured_outputs is not None and self._backend is None:
            self._backend = sampling.structured_outputs.backend

    # ----------------------------------------------------------------- the parts

    def _put_prompt(self, request: EngineCoreRequest, prompt: Sequence[int] | Embeddings, *, generates: bool) -> None:
        if not isinstance(prompt, Embeddings):
            request.prompt_token_ids = check_prompt(prompt, self.limits, generates=generates)
            return
        request.prompt_token_ids, request.prompt_is_token_ids = prompt.check(self.limits, generates=generates)
        request.prompt_embeds = prompt.tensor

    def _put_fields(self, request: EngineCoreRequest, fields: RequestFields) -> None:
        if not fields:
            return
        multimodal = self._model.multimodal if self._model else None
        checked: dict[str, Any] = check_fields(fields, self.limits, multimodal=multimodal)
        for name in ("prompt_text", "tenant", "tokenization_kwargs"):
            checked.pop(name, None)  # not the engine's
        if (adapter := checked.pop("lora_request", None)) is not None:
            request.lora_request = lora_to_wire(adapter)
            request.lora_request.load_inplace = False  # done, once, before; vLLM would load it again in every step
        for name, value in checked.items():
            setattr(request, name, value)

    def _pooling(self, params: PoolingParams) -> WirePoolingParams:
        return pooling_to_wire(settle_pooling(params, self.limits, self._model))

    def _sampling(self, params: SamplingParams, request: EngineCoreRequest) -> WireSamplingParams:
        limits = self.limits
        if limits.tasks and limits.tasks.issubset(POOLING_TASKS):
            raise RequestRejected(
                f"the engine serves a model that does not generate; it can do {', '.join(sorted(limits.tasks))}",
                parameter="sampling_params",
                value=params,
                remedy="use encode()",
            )
        num_tokens, embeds = num_prompt_tokens(request), request.prompt_embeds is not None
        check_sampling(params, limits, num_prompt_tokens=num_tokens, embeds=embeds)
        if params.stop or params.stop_regex:
            self._check_stop(params)
        bad_words_token_ids = tokenize_bad_words(self.tokenizer, params.bad_words) if params.bad_words else ()
        params, backend = self._constrained(params)
        if params.trace_decode_token_ids:
            params = _replayed(params, limits.max_model_len - num_tokens)
        eos_ids = () if params.trace_decode_token_ids else self._eos_token_ids
        return sampling_to_wire(
            params,
            eos_token_id=eos_ids[0] if eos_ids else None,
            extra_stop_token_ids=eos_ids[1:],
            max_tokens=output_budget(num_tokens, params.max_tokens, params.min_tokens, limits),
            bad_words_token_ids=bad_words_token_ids,
            structured_outputs_backend=backend,
        )

    def _check_stop(self, params: SamplingParams) -> None:
        """Stop strings and patterns need text; and there is none of them in a replay, which ends with its tokens."""
        name = "stop" if params.stop else "stop_regex"
        value = getattr(params, name)
        if self._tokenizer is None:
            raise RequestRejected(
                f"{name}={value!r:.200}: there is no text to find it in, since the client has no tokenizer",
                parameter=name,
                value=value,
                remedy="use stop_token_ids; or describe the engine with a model_dir",
            )
        if params.trace_decode_token_ids is not None:
            reject(name, value, "cannot end a replay", "leave it out, or trace_decode_token_ids")
        for pattern in params.stop_regex:
            compile_pattern(pattern)

    def _constrained(self, params: SamplingParams) -> tuple[SamplingParams, str]:
        if params.structured_outputs is None:
            return params, ""
        if not self.limits.tokenizer:
            raise RequestRejected(
                "structured_outputs: the engine has no tokenizer, which it takes to enforce them",
                parameter="structured_outputs",
                value=params.structured_outputs,
                remedy="start the engine without skip_tokenizer_init",
            )
        settled, backend = settle_structured_outputs(
            params.structured_outputs, self.limits.structured_outputs_backend, self._backend
        )
        if settled is not params.structured_outputs:
            params = msgspec.structs.replace(params, structured_outputs=settled)
        return params, backend


def _replayed(params: SamplingParams, room_tokens: int) -> SamplingParams:
    """A replay ends with its tokens and with nothing else (vLLM: ``_normalize_trace_replay_params``)."""
    trace = tuple(params.trace_decode_token_ids or ())[: max(room_tokens, 1)]
    max_tokens = len(trace) if params.max_tokens is None else min(len(trace), params.max_tokens)
    return msgspec.structs.replace(
        params, trace_decode_token_ids=trace, max_tokens=max_tokens, min_tokens=0, ignore_eos=True, stop_token_ids=()
    )


def _check_label(label: object) -> None:
    if not isinstance(label, str):
        raise RequestRejected(
            f"request_id={label!r} is {a_type(label)}, not a str",
            parameter="request_id",
            value=label,
            remedy="give a str, or None for one of our own",
        )
