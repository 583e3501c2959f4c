"""The start-up handshake, both roles, without I/O.

Owns the order HELLO, INIT, READY on the handshake socket and the registration frame on the input socket, which may
overtake READY (they travel on different sockets). Mirrors ``vllm.v1.engine.utils.wait_for_engine_startup`` and
``EngineCoreProc.startup_handshake`` of vLLM 0.32/0.33. Must not know how frames travel or how long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from anyengine._wire import (
    Dialect,
    EngineAddresses,
    EngineCoreReadyResponse,
    Frame,
    HandshakeHello,
    HandshakeInit,
    HandshakeReady,
    decode_handshake,
    decode_init,
    decode_ready,
    encode_handshake,
    engine_identity,
    rank_of,
    select_dialect,
)
from anyengine.exceptions import DecodeError, LocalProtocolError, RemoteProtocolError

__all__ = ["EngineHandshake", "FrontendHandshake", "HandshakeStage"]


class HandshakeStage(Enum):
    """How far one rank has come."""

    WAITING = "waiting"
    INITIALIZED = "initialized"
    READY = "ready"


@dataclass(slots=True)
class _Rank:
    stage: HandshakeStage = HandshakeStage.WAITING
    registered: bool = False
    dialect: Dialect | None = None
    registration: EngineCoreReadyResponse | None = None  # None: not yet, or a release that says nothing (up to 0.19.1)
    parallel_config_hash: str | None = None


@dataclass
class FrontendHandshake:
    """The client's role: answers every expected rank's HELLO and collects its READY and its registration.

    Invariant: a rank is complete exactly when both have arrived, in whichever order. Where somebody else answers the
    handshake (``answered_elsewhere``), the registration is all there is. A peer whose identity no engine can have is a
    stranger (on a network, anybody may connect): what it says is counted and left alone.
    """

    ranks: Iterable[int]
    addresses: EngineAddresses
    expect_local: bool = True
    answered_elsewhere: bool = False
    strangers: int = field(default=0, init=False)
    """How many messages came from peers that are no engines."""
    _states: dict[int, _Rank] = field(init=False)

    def __post_init__(self) -> None:
        stage = HandshakeStage.READY if self.answered_elsewhere else HandshakeStage.WAITING
        self._states = {rank: _Rank(stage) for rank in self.ranks}

    def receive_handshake(self, identity: Frame, payload: Frame) -> bytes | None:
        """Take one message of the handshake socket; the reply to send to ``identity``, or ``None``.

        Raises:
            RemoteProtocolError: an unknown rank, a message out of order, or bytes that cannot be read.
        """
        if self._is_stranger(identity):
            return None
        rank, state = self._state_of(identity)
        try:
            message = decode_handshake(payload)
        except DecodeError as exc:
            raise RemoteProtocolError(f"engine {rank} sent neither HELLO nor READY: {exc}") from exc
        if message.local is not self.expect_local:
            raise RemoteProtocolError(
                f"engine {rank} says local={message.local}, but this client "
                f"{'started' if self.expect_local else 'did not start'} it: another engine uses this handshake address"
            )
        if not message.local and not message.headless:
            raise RemoteProtocolError(
                f"engine {rank} says headless=False: it has a front end of its own; start it with --headless"
            )
        if isinstance(message, HandshakeHello):
            if state.stage is not HandshakeStage.WAITING:
                raise RemoteProtocolError(f"engine {rank} sent HELLO in stage {state.stage.value}")
            state.stage = HandshakeStage.INITIALIZED
            return encode_handshake(HandshakeInit(addresses=self.addresses))
        if state.stage is not HandshakeStage.INITIALIZED:
            raise RemoteProtocolError(f"engine {rank} sent READY in stage {state.stage.value}")
        self._compare_configurations(rank, message.parallel_config_hash)
        state.stage = HandshakeStage.READY
        state.parallel_config_hash = message.parallel_config_hash
        return None

    def _compare_configurations(self, rank: int, parallel_config_hash: str | None) -> None:
        for other, state in self._states.items():
            known = state.parallel_config_hash
            if None not in (known, parallel_config_hash) and known != parallel_config_hash:
                raise RemoteProtocolError(
                    f"engine {rank} and engine {other} are configured differently (parallel_config_hash "
                    f"{parallel_config_hash!r} and {known!r}): start all ranks with the same arguments"
                )

    def receive_registration(self, identity: Frame, payload: Frame) -> None:
        """Take the first message of the input socket.

        Raises:
            RemoteProtocolError: an unknown rank, a second registration, bytes that cannot be read, no room for a single
                token, or a release that no dialect speaks.
        """
        if self._is_stranger(identity):
            return
        rank, state = self._state_of(identity)
        if state.registered:
            raise RemoteProtocolError(f"engine {rank} registered twice on the input socket")
        try:
            ready = decode_ready(payload)
        except DecodeError as exc:
            raise RemoteProtocolError(f"engine {rank} sent no registration: {exc}") from exc
        if ready is not None and ready.max_model_len < 1:
            raise RemoteProtocolError(f"engine {rank} registered with max_model_len={ready.max_model_len}")
        state.dialect = select_dialect(ready)
        state.registration = ready
        state.registered = True

    def stage(self, rank: int) -> HandshakeStage:
        return self._states[rank].stage

    @property
    def pending(self) -> tuple[int, ...]:
        """The ranks that are not complete yet."""
        return tuple(
            rank
            for rank, state in self._states.items()
            if not state.registered or state.stage is not HandshakeStage.READY
        )

    @property
    def registrations(self) -> dict[int, EngineCoreReadyResponse | None]:
        """What each registered rank reported about itself; ``None`` where its release reports nothing."""
        return {rank: state.registration for rank, state in self._states.items() if state.registered}

    @property
    def dialects(self) -> dict[int, Dialect]:
        """The dialect of each registered rank."""
        return {rank: state.dialect for rank, state in self._states.items() if state.dialect is not None}

    def _is_stranger(self, identity: Frame) -> bool:
        if len(identity) == len(engine_identity(0)):
            return False
        self.strangers += 1
        return True

    def _state_of(self, identity: Frame) -> tuple[int, _Rank]:
        rank = rank_of(identity)
        state = self._states.get(rank)
        if state is None:
            raise RemoteProtocolError(f"rank {rank} is not expected here; expected {sorted(self._states)}")
        return rank, state


class EngineHandshake:
    """The engine's role: HELLO, then INIT in, then (model loaded, input sockets registered) READY."""

    def __init__(self, *, local: bool = True, headless: bool = False) -> None:
        self._local = local
        self._headless = headless
        self._stage = "new"

    def hello(self) -> bytes:
        """The HELLO message.

        Raises:
            LocalProtocolError: it was sent already.
        """
        self._advance("new", "greeted")
        return encode_handshake(HandshakeHello(local=self._local, headless=self._headless))

    def receive_init(self, payload: Frame) -> HandshakeInit:
        """Take the client's answer: the addresses to connect to.

        Raises:
            RemoteProtocolError: it makes no sense; in particular, as many inputs as outputs must be named.
            LocalProtocolError: HELLO has not been sent.
        """
        self._expect("greeted")
        init = decode_init(payload)
        if not init.addresses.inputs or len(init.addresses.inputs) != len(init.addresses.outputs):
            raise RemoteProtocolError(
                f"INIT names {len(init.addresses.inputs)} input and {len(init.addresses.outputs)} output addresses; "
                "there must be one of each for every client"
            )
        self._stage = "initialized"
        return init

    def ready(self) -> bytes:
        """The READY message.

        Raises:
            LocalProtocolError: INIT has not been received, or READY was sent already.
        """
        self._advance("initialized", "ready")
        return encode_handshake(HandshakeReady(local=self._local, headless=self._headless))

    def _advance(self, expected: str, following: str) -> None:
        self._expect(expected)
        self._stage = following

    def _expect(self, stage: str) -> None:
        if self._stage != stage:
            raise LocalProtocolError(f"the handshake is {self._stage}, not {stage}")
