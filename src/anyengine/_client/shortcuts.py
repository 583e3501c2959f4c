"""What a client does in one call on top of a request stream: a whole answer, a chat, the model's own parameters.

Owns no request: everything here is :meth:`EngineClient.generate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from anyengine._rules import given, reject
from anyengine.outputs import RequestOutput
from anyengine.params import SamplingParams

from .inputs.prompts import Embeddings, Prompt
from .inputs.request_fields import GenerateOptions, RequestFields, check_field_names
from .inputs.text_prompts import ChatPrompt
from .requests.desk import RequestDesk
from .requests.input_session import InputSession
from .requests.stream import RequestStream

__all__ = ["RequestShortcuts"]


class RequestShortcuts:
    """Part of :class:`EngineClient`. Lifetime: the client's."""

    def _entered_desk(self) -> RequestDesk:
        raise NotImplementedError

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestStream:
        """See :class:`EngineClient`."""
        raise NotImplementedError

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestOutput:
        """The whole answer to ``prompt``; with ``n > 1`` all of them, in ``outputs``. The arguments are those of
        :meth:`generate`.

        Raises: see :meth:`RequestStream.__anext__`.

        Cancellation: aborts the request.
        """
        return await self.generate(prompt, sampling_params, **options).final()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> RequestStream:
        """:meth:`generate` for chat messages, such as ``[{"role": "user", "content": "Hello"}]``.

        The model's chat template makes the prompt, in a sandbox, with the variables of transformers'
        ``apply_chat_template`` and those of ``chat_template_kwargs``; or ``chat_template`` does. A content may be text
        or a list of parts of text. ``continue_final_message`` (with ``add_generation_prompt=False``) has the model go
        on with the last message.
        """
        prompt = ChatPrompt(
            messages=messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompt, sampling_params, **options)

    def input_session(
        self,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **fields: Unpack[RequestFields],
    ) -> InputSession:
        """A request whose prompt comes in parts, each of which is answered: see :class:`InputSession`. The arguments
        are those of :meth:`generate`. Needs a vLLM engine."""
        check_field_names("input_session", fields)
        params = given("sampling_params", sampling_params, SamplingParams)
        return InputSession(self._entered_desk, params, request_id, fields)

    async def tokenize(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of ``prompt``, as :meth:`generate` would send them with the same arguments.

        Raises:
            RequestRejected: it cannot be tokenized, or is embeddings.
            ClientClosedError: the client has not been entered yet.

        Cancellation: safe.
        """
        params = given("sampling_params", sampling_params, SamplingParams)
        encoded = await self._entered_desk().builder.encode(prompt, params, tokenization_kwargs)
        if isinstance(encoded, Embeddings):
            reject("prompt", encoded.tensor.shape, "is embeddings, which have no token ids", "use text")
        return list(encoded)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Parameters with what the model's ``generation_config.json`` says of sampling where nothing is ``given``.

        Without this call a request has vLLM's neutral defaults, whatever the model.

        Raises:
            RequestRejected: a value of the wrong type, out of range, or in contradiction to another.
            ClientClosedError: the client has not been entered yet.
        """
        return self._entered_desk().builder.default_sampling_params(**given)
