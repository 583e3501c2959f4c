"""vLLM's names, for programs that were written for its ``AsyncLLM``: change the imports, keep the program.

    from anyengine.compat import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

What there is, is what vLLM's own asynchronous examples use, with the signatures and meanings of vLLM 0.32. Behind it
stands :class:`~anyengine.EngineClient`: new programs use that.
"""

from __future__ import annotations

from anyengine.exceptions import EngineDeadError, EngineStartupError
from anyengine.exceptions import RequestFailed as EngineGenerateError
from anyengine.outputs import Logprob
from anyengine.params import (
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    RepetitionDetectionParams,
    StructuredOutputsParams,
)
from anyengine.params import OutputKind as RequestOutputKind

from .async_llm import AsyncLLM
from .engine_args import AsyncEngineArgs
from .outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from .params import EmbedsPrompt, SamplingParams, TextPrompt, TokensPrompt
from .streams import OutputStream, PoolingStream

AsyncLLMEngine = AsyncLLM
"""vLLM's older name for it."""

__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbedsPrompt",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineStartupError",
    "LoRARequest",
    "Logprob",
    "OutputStream",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingStream",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
