"""Prefill here, decode there: one request over two clients, whose engines hand the KV cache over.

Owns the two steps and what is told to whom when the second one fails. The blocks travel between the engines, by a KV
connector of theirs (``kv_transfer_config``); here only its parameters pass through, as vLLM's proxies pass them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final, Unpack

from msgspec.structs import replace

from anyengine._rules import given, reject
from anyengine.exceptions import EngineError, RequestFailed
from anyengine.outputs import RequestOutput
from anyengine.params import OutputKind, SamplingParams

from .client import EngineClient
from .inputs.prompts import Prompt, is_embeddings
from .inputs.request_fields import GenerateOptions
from .requests.stream import RequestStream

__all__ = ["PrefillDecodePair"]

_NAME: Final = "kv_transfer_params"
_REMOTE_DECODE: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PrefillDecodePair:
    """Two clients that serve requests together: ``prefill`` computes prompts, ``decode`` generates. Both are entered by
    whoever makes this."""

    def __init__(self, prefill: EngineClient, decode: EngineClient) -> None:
        self.prefill = prefill
        self.decode = decode

    async def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> RequestStream:
        """Compute the prompt, hand it over, and start to generate; the stream of what is generated.

        Raises:
            RequestFailed: the prefill engine has handed nothing over, or one of them failed the request.
            RequestRejected, OverloadedError, EngineAsleepError, EngineDeadError: see :meth:`EngineClient.submit`; and
                ``prompt`` is embeddings.

        Cancellation: nothing is left in either engine; the prefill engine is told that nobody comes for the blocks.
        """
        if is_embeddings(prompt):
            reject("prompt", "embeddings", "cannot be handed over", "give text or token ids")
        params = given("sampling_params", sampling_params, SamplingParams)
        first = _with(
            params, _REMOTE_DECODE, n=1, max_tokens=1, min_tokens=0, stop=(), output_kind=OutputKind.FINAL_ONLY
        )
        computed = await self.prefill.complete(prompt, first, **options)
        handed = computed.kv_transfer_params
        if handed is None or computed.prompt_token_ids is None:
            raise RequestFailed(
                "the prefill engine has handed nothing over: start it with a kv_transfer_config",
                code="nothing_handed_over",
                request_id=computed.request_id,
            )
        options.pop("tokenization_kwargs", None)  # the prompt is token ids by now
        try:
            return await self.decode.submit(computed.prompt_token_ids, _with(params, handed), **options)
        except BaseException:  # cancelled, too: blocks that nobody fetches would stay
            with suppress(EngineError):
                await self._take_back(computed)  # noqa: ASYNC102 - it waits for nothing
            raise

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[GenerateOptions]
    ) -> RequestOutput:
        """The whole answer; see :meth:`submit`."""
        async with await self.submit(prompt, sampling_params, **options) as stream:
            return await stream.final()

    async def _take_back(self, computed: RequestOutput) -> None:
        """Waits for nothing, so it is done under cancellation as well."""
        rank = computed.metrics.rank
        await self.prefill.notify_kv_transfer_request_rejected(
            computed.request_id, computed.kv_transfer_params, data_parallel_rank=rank
        )


def _with(params: SamplingParams, transfer: Any, **changes: Any) -> SamplingParams:
    extra = {**(params.extra_args or {}), _NAME: dict(transfer)}
    return replace(params, extra_args=extra, **changes)
