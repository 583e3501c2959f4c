"""Sans-I/O protocol: handshake, connection, registries, admission. No socket, clock or randomness in here."""

from .admission import EngineLimits, check_prompt, check_prompt_length, check_token_ids, output_budget
from .connection import Connection, Frames
from .events import DeadSentinel, EEPNotification, Event, FaultStatus, MalformedMessage, UtilityReply
from .handshake import EngineHandshake, FrontendHandshake, HandshakeStage
from .life import Life
from .life_events import ClientEvent, ClientState, CurrentState, RankChanged, RankState, StateChanged
from .registrations import merge_registrations
from .requests import OutputConsumer, RequestEntry, RequestRegistry
from .utilities import PendingCall, UtilityRegistry

__all__ = [
    "ClientEvent",
    "ClientState",
    "Connection",
    "CurrentState",
    "DeadSentinel",
    "EEPNotification",
    "EngineHandshake",
    "EngineLimits",
    "Event",
    "FaultStatus",
    "Frames",
    "FrontendHandshake",
    "HandshakeStage",
    "Life",
    "MalformedMessage",
    "OutputConsumer",
    "PendingCall",
    "RankChanged",
    "RankState",
    "RequestEntry",
    "RequestRegistry",
    "StateChanged",
    "UtilityRegistry",
    "UtilityReply",
    "check_prompt",
    "check_prompt_length",
    "check_token_ids",
    "merge_registrations",
    "output_budget",
]
