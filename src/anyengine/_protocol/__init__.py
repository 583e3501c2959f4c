"""Sans-I/O protocol: handshake, connection, registries, admission. No socket, clock or randomness in here."""

from .aborts import AbortLedger
from .admission import EngineLimits, check_prompt, check_prompt_length, check_token_ids, output_budget
from .balancing import Balancer, LeastLoaded, RankLoad, SessionAffinity, balancer_for, rank_of_key
from .connection import Connection, Frames, checked_ids, num_prompt_tokens
from .events import DeadSentinel, EEPNotification, Event, FaultStatus, MalformedMessage, UtilityReply
from .faults import FaultBoard, FaultToleranceStatus
from .handshake import EngineHandshake, FrontendHandshake, HandshakeStage
from .kv_events import KVEventBatch, KVEventReader
from .life import Life
from .life_events import ClientEvent, ClientState, CurrentState, RankChanged, RankState, StateChanged
from .multimodal_cache import cache_key, lacks_data, with_data
from .registrations import merge_registrations
from .replays import continued, why_not_replayed
from .requests import OutputConsumer, RequestEntry, RequestRegistry
from .restarts import Restart, RestartBudget
from .utilities import PendingCall, UtilityRegistry

__all__ = [
    "AbortLedger",
    "Balancer",
    "ClientEvent",
    "ClientState",
    "Connection",
    "CurrentState",
    "DeadSentinel",
    "EEPNotification",
    "EngineHandshake",
    "EngineLimits",
    "Event",
    "FaultBoard",
    "FaultStatus",
    "FaultToleranceStatus",
    "Frames",
    "FrontendHandshake",
    "HandshakeStage",
    "KVEventBatch",
    "KVEventReader",
    "LeastLoaded",
    "Life",
    "MalformedMessage",
    "OutputConsumer",
    "PendingCall",
    "RankChanged",
    "RankLoad",
    "RankState",
    "RequestEntry",
    "RequestRegistry",
    "Restart",
    "RestartBudget",
    "SessionAffinity",
    "StateChanged",
    "UtilityRegistry",
    "UtilityReply",
    "balancer_for",
    "cache_key",
    "check_prompt",
    "check_prompt_length",
    "check_token_ids",
    "checked_ids",
    "continued",
    "lacks_data",
    "merge_registrations",
    "num_prompt_tokens",
    "output_budget",
    "rank_of_key",
    "why_not_replayed",
    "with_data",
]
