"""anyengine: a structured-concurrency client for LLM engine cores.

One ``async with EngineClient(...)`` under trio or asyncio owns everything: sockets, tasks, engine processes. When the
block ends, all of it has ended; when an engine dies, everyone who waits is told at once, with the cause.

Importing the package loads nothing but this table: an engine process runs it too, and must not pay for the client. Each
name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._client.client import EngineClient
    from ._client.core_client import EngineCoreClient
    from ._client.disaggregation import PrefillDecodePair
    from ._client.engines.health import ClientHealth, HealthLevel, RankHealth
    from ._client.engines.kv_events import KVEventStream
    from ._client.engines.model_info import ModelInfo
    from ._client.inputs.multimodal import MultiModalPreprocessor, MultiModalPrompt
    from ._client.inputs.prompts import EmbedsPrompt, Prompt
    from ._client.inputs.text_prompts import ChatPrompt
    from ._client.operations import PauseMode
    from ._client.output_json import output_from_json, output_to_json
    from ._client.parsers import output_parser
    from ._client.reporting import ClientStatistics, RankStatistics, StatisticsSink
    from ._client.requests.account import RankTotals
    from ._client.requests.input_session import InputSession, StreamingInput
    from ._client.requests.many import RequestGroup
    from ._client.requests.stream import RequestStream
    from ._client.requests.stream_views import ParsedStream, TextStream, TokenStream
    from ._client.session.closing import EngineExit, KilledProcess, ShutdownReport
    from ._client.session.debugging import DebugSnapshot
    from ._client.session.events import ClientEvents
    from ._process.status import Status
    from ._protocol import (
        Balancer,
        ClientEvent,
        ClientState,
        CurrentState,
        EEPNotification,
        FaultStatus,
        FaultToleranceStatus,
        KVEventBatch,
        LeastLoaded,
        RankChanged,
        RankLoad,
        RankState,
        SessionAffinity,
        StateChanged,
    )
    from ._text import Tokenizer
    from ._text.output_parsers import (
        ChatParser,
        HermesToolParser,
        JsonToolParser,
        OutputParser,
        ParsedDelta,
        ParsedOutput,
        ThinkParser,
        ToolCall,
        ToolCallDelta,
        parse_output,
    )
    from ._wire import (
        AllBlocksCleared,
        BlockRemoved,
        BlockStored,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreReadyResponse,
        EngineCoreRequest,
        FaultToleranceRequest,
        FaultToleranceResult,
        KVEventsConfig,
        KvHintAction,
        KvHintsEnvelope,
        MultiModalFeatureSpec,
        MultiModalField,
        MultiModalFieldElem,
        PlaceholderRange,
        Tensor,
    )
    from .config import (
        CommandEngine,
        EmbeddedEngine,
        EngineSettings,
        InheritedEngine,
        RemoteEngine,
        RunningEngine,
        VLLMEngine,
    )
    from .exceptions import (
        ClientClosedError,
        ClientFailedError,
        DecodeError,
        DrainTimeout,
        EncodeError,
        EngineAsleepError,
        EngineDeadError,
        EngineError,
        EngineStartupError,
        EngineUnresponsiveError,
        LocalProtocolError,
        OutputProcessingError,
        OverloadedError,
        ProtocolError,
        QuotaExceededError,
        RemoteProtocolError,
        RequestError,
        RequestFailed,
        RequestRejected,
        RequestTimeout,
        StartupTimeout,
        UtilityError,
        UtilityRejected,
        UtilityTimeout,
        WrongLoopError,
    )
    from .limiters import Limiter, TokenBuckets, TokenDemand, TokenQuota
    from .outputs import (
        FinishReason,
        FlatLogprobs,
        Logprob,
        LogprobsOnePosition,
        OutputDetails,
        PoolingOutput,
        PrefillUsage,
        RequestFacts,
        RequestMetrics,
        RequestOutput,
        SamplingMask,
        SpecDecodeMetrics,
        TensorLike,
        Usage,
        WeightVersionSpan,
    )
    from .params import (
        BeamSearchParams,
        LateChunkingParams,
        LateInteractionParams,
        LoRARequest,
        OutputKind,
        PoolingParams,
        RepetitionDetectionParams,
        SamplingParams,
        StructuredOutputsParams,
    )
    from .policies import RestartPolicy, RetryPolicy

__all__ = [
    "AllBlocksCleared",
    "Balancer",
    "BeamSearchParams",
    "BlockRemoved",
    "BlockStored",
    "ChatParser",
    "ChatPrompt",
    "ClientClosedError",
    "ClientEvent",
    "ClientEvents",
    "ClientFailedError",
    "ClientHealth",
    "ClientState",
    "ClientStatistics",
    "CommandEngine",
    "CurrentState",
    "DebugSnapshot",
    "DecodeError",
    "DrainTimeout",
    "EEPNotification",
    "EmbeddedEngine",
    "EmbedsPrompt",
    "EncodeError",
    "EngineAsleepError",
    "EngineClient",
    "EngineCoreClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreReadyResponse",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineError",
    "EngineExit",
    "EngineSettings",
    "EngineStartupError",
    "EngineUnresponsiveError",
    "FaultStatus",
    "FaultToleranceRequest",
    "FaultToleranceResult",
    "FaultToleranceStatus",
    "FinishReason",
    "FlatLogprobs",
    "HealthLevel",
    "HermesToolParser",
    "InheritedEngine",
    "InputSession",
    "JsonToolParser",
    "KVEventBatch",
    "KVEventStream",
    "KVEventsConfig",
    "KilledProcess",
    "KvHintAction",
    "KvHintsEnvelope",
    "LateChunkingParams",
    "LateInteractionParams",
    "LeastLoaded",
    "Limiter",
    "LoRARequest",
    "LocalProtocolError",
    "Logprob",
    "LogprobsOnePosition",
    "ModelInfo",
    "MultiModalFeatureSpec",
    "MultiModalField",
    "MultiModalFieldElem",
    "MultiModalPreprocessor",
    "MultiModalPrompt",
    "OutputDetails",
    "OutputKind",
    "OutputParser",
    "OutputProcessingError",
    "OverloadedError",
    "ParsedDelta",
    "ParsedOutput",
    "ParsedStream",
    "PauseMode",
    "PlaceholderRange",
    "PoolingOutput",
    "PoolingParams",
    "PrefillDecodePair",
    "PrefillUsage",
    "Prompt",
    "ProtocolError",
    "QuotaExceededError",
    "RankChanged",
    "RankHealth",
    "RankLoad",
    "RankState",
    "RankStatistics",
    "RankTotals",
    "RemoteEngine",
    "RemoteProtocolError",
    "RepetitionDetectionParams",
    "RequestError",
    "RequestFacts",
    "RequestFailed",
    "RequestGroup",
    "RequestMetrics",
    "RequestOutput",
    "RequestRejected",
    "RequestStream",
    "RequestTimeout",
    "RestartPolicy",
    "RetryPolicy",
    "RunningEngine",
    "SamplingMask",
    "SamplingParams",
    "SessionAffinity",
    "ShutdownReport",
    "SpecDecodeMetrics",
    "StartupTimeout",
    "StateChanged",
    "StatisticsSink",
    "Status",
    "StreamingInput",
    "StructuredOutputsParams",
    "Tensor",
    "TensorLike",
    "TextStream",
    "ThinkParser",
    "TokenBuckets",
    "TokenDemand",
    "TokenQuota",
    "TokenStream",
    "Tokenizer",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "UtilityError",
    "UtilityRejected",
    "UtilityTimeout",
    "VLLMEngine",
    "WeightVersionSpan",
    "WrongLoopError",
    "output_from_json",
    "output_parser",
    "output_to_json",
    "parse_output",
]

_HOMES = {
    name: module
    for module, names in {
        "_client.client": ("EngineClient",),
        "_client.session.closing": ("EngineExit", "KilledProcess", "ShutdownReport"),
        "_client.core_client": ("EngineCoreClient",),
        "_client.disaggregation": ("PrefillDecodePair",),
        "_client.session.debugging": ("DebugSnapshot",),
        "_client.session.events": ("ClientEvents",),
        "_client.engines.health": ("ClientHealth", "HealthLevel", "RankHealth"),
        "_client.engines.kv_events": ("KVEventStream",),
        "_client.engines.model_info": ("ModelInfo",),
        "_client.operations": ("PauseMode",),
        "_client.inputs.multimodal": ("MultiModalPreprocessor", "MultiModalPrompt"),
        "_client.inputs.prompts": ("EmbedsPrompt", "Prompt"),
        "_client.output_json": ("output_from_json", "output_to_json"),
        "_client.reporting": ("ClientStatistics", "RankStatistics", "StatisticsSink"),
        "_client.requests.account": ("RankTotals",),
        "_client.requests.input_session": ("InputSession", "StreamingInput"),
        "_client.requests.many": ("RequestGroup",),
        "_client.requests.stream": ("RequestStream",),
        "_client.requests.stream_views": ("ParsedStream", "TextStream", "TokenStream"),
        "_client.inputs.text_prompts": ("ChatPrompt",),
        "_protocol": (
            "Balancer", "ClientEvent", "ClientState", "CurrentState", "EEPNotification", "FaultStatus",
            "FaultToleranceStatus", "KVEventBatch", "LeastLoaded", "RankChanged", "RankLoad", "RankState",
            "SessionAffinity", "StateChanged",
        ),
        "_text": ("Tokenizer",),
        "_text.output_parsers": (
            "ChatParser", "HermesToolParser", "JsonToolParser", "OutputParser", "ParsedDelta", "ParsedOutput",
            "ThinkParser", "ToolCall", "ToolCallDelta", "parse_output",
        ),
        "_client.parsers": ("output_parser",),
        "_wire": (
            "AllBlocksCleared", "BlockRemoved", "BlockStored", "EngineCoreOutput", "EngineCoreOutputs",
            "EngineCoreReadyResponse", "EngineCoreRequest", "FaultToleranceRequest", "FaultToleranceResult",
            "KVEventsConfig", "KvHintAction", "KvHintsEnvelope", "MultiModalFeatureSpec", "MultiModalField",
            "MultiModalFieldElem", "PlaceholderRange", "Tensor",
        ),
        "config": (
            "CommandEngine", "EmbeddedEngine", "EngineSettings", "InheritedEngine", "RemoteEngine", "RunningEngine",
            "VLLMEngine",
        ),
        "limiters": ("Limiter", "TokenBuckets", "TokenDemand", "TokenQuota"),
        "outputs": (
            "FinishReason", "FlatLogprobs", "Logprob", "LogprobsOnePosition", "OutputDetails", "PoolingOutput",
            "PrefillUsage", "RequestFacts", "RequestMetrics", "RequestOutput", "SamplingMask", "SpecDecodeMetrics",
            "TensorLike", "Usage", "WeightVersionSpan",
        ),
        "params": (
            "BeamSearchParams", "LateChunkingParams", "LateInteractionParams", "LoRARequest", "OutputKind",
            "PoolingParams", "RepetitionDetectionParams", "SamplingParams", "StructuredOutputsParams",
        ),
        "_process.status": ("Status",),
        "policies": ("RestartPolicy", "RetryPolicy"),
    }.items()
    for name in names
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES.get(name, 'exceptions')}", __name__), name)
    globals()[name] = value  # found here without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
