"""A state machine over the start-up handshake: n ranks, both roles, any order, and much that makes no sense.

The model is one small record for each rank; it says of every message whether it is refused.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from anyengine._protocol import EngineHandshake, FrontendHandshake, HandshakeStage
from anyengine._wire import EngineAddresses, engine_identity
from anyengine.exceptions import LocalProtocolError, RemoteProtocolError
from counted_machine import CountedMachine

__all__ = ["HandshakeMachine"]

ADDRESSES = EngineAddresses(inputs=["ipc:///i"], outputs=["ipc:///o"])
GARBAGE = st.sampled_from([b"", b"\xc1", b"\x90", msgspec.msgpack.encode({"status": "BUSY"}), b"\x81\xa6status"])
REGISTRATION = msgspec.msgpack.encode({"max_model_len": 64, "vllm_version": "0.33.0"})
BAD_REGISTRATION = st.sampled_from([b"\xc1", b"\x90", msgspec.msgpack.encode({"max_model_len": 0}), b"\x80"])
RANK = st.integers(0, 3)  # one more than there ever is


class Rank:
    """One rank in the model: how far it is, by what the client has taken from it."""

    def __init__(self, *, ready: bool) -> None:
        self.stage = HandshakeStage.READY if ready else HandshakeStage.WAITING
        self.registered = False
        self.hash: str | None = None
        self.engine: EngineHandshake | None = None


class HandshakeMachine(CountedMachine):
    """``ranks`` is the model."""

    @initialize(num_ranks=st.integers(1, 3), local=st.booleans(), elsewhere=st.booleans())
    def begin(self, num_ranks: int, local: bool, elsewhere: bool) -> None:
        self.local = local
        self.client = FrontendHandshake(range(num_ranks), ADDRESSES, expect_local=local, answered_elsewhere=elsewhere)
        self.ranks = {rank: Rank(ready=elsewhere) for rank in range(num_ranks)}
        self.strangers = 0

    # --------------------------------------------------------- an engine as it is

    @rule(rank=RANK)
    def an_engine_starts(self, rank: int) -> None:
        """HELLO, by our own engine's role; a second process of a rank comes too late."""
        engine = EngineHandshake(local=self.local, headless=not self.local)
        hello = engine.hello()
        with pytest.raises(LocalProtocolError):
            engine.ready()
        if (state := self.ranks.get(rank)) is None or state.stage is not HandshakeStage.WAITING:
            self._refused(rank, hello)
            return
        init = engine.receive_init(self._taken(rank, hello))
        assert init.addresses == ADDRESSES
        with pytest.raises(LocalProtocolError):
            engine.receive_init(b"")
        state.engine, state.stage = engine, HandshakeStage.INITIALIZED

    @precondition(lambda self: any(state.engine is not None for state in self.ranks.values()))
    @rule(pick=RANK)
    def an_engine_is_ready(self, pick: int) -> None:
        """READY, by the engine that said HELLO; once."""
        started = [rank for rank, state in self.ranks.items() if state.engine is not None]
        rank = started[pick % len(started)]
        state = self.ranks[rank]
        assert state.engine is not None
        if state.stage is HandshakeStage.INITIALIZED:
            assert self.client.receive_handshake(engine_identity(rank), state.engine.ready()) is None
            state.stage = HandshakeStage.READY
        else:  # somebody else has said so for it
            self._refused(rank, state.engine.ready())
        with pytest.raises(LocalProtocolError):
            state.engine.ready()
        state.engine = None

    @rule(rank=RANK, silent=st.booleans())
    def register(self, rank: int, silent: bool) -> None:
        """On another socket, so before READY or after it."""
        payload = b"" if silent else REGISTRATION  # old releases say nothing
        if (state := self.ranks.get(rank)) is None or state.registered:
            with pytest.raises(RemoteProtocolError):
                self.client.receive_registration(engine_identity(rank), payload)
        else:
            self.client.receive_registration(engine_identity(rank), payload)
            state.registered = True

    # ------------------------------------------------------------- what is not so

    @rule(
        rank=RANK,
        status=st.sampled_from(["HELLO", "READY"]),
        local=st.booleans(),
        headless=st.booleans(),
        hash_=st.sampled_from([None, "a", "b"]),
    )
    def somebody_says(self, rank: int, status: str, local: bool, headless: bool, hash_: str | None) -> None:
        """A HELLO or READY by hand: early, twice, of the wrong kind, of another configuration."""
        payload = {"status": status, "local": local, "headless": headless}
        if hash_ is not None and status == "READY":
            payload["parallel_config_hash"] = hash_  # type: ignore[assignment]
        frame = msgspec.msgpack.encode(payload)
        state = self.ranks.get(rank)
        wanted = HandshakeStage.WAITING if status == "HELLO" else HandshakeStage.INITIALIZED
        if state is None or local is not self.local or not (local or headless) or state.stage is not wanted:
            self._refused(rank, frame)
        elif status == "HELLO":
            assert msgspec.msgpack.decode(self._taken(rank, frame))["addresses"]["inputs"] == ADDRESSES.inputs
            state.stage = HandshakeStage.INITIALIZED
        elif hash_ is not None and any(other.hash not in (None, hash_) for other in self.ranks.values()):
            self._refused(rank, frame)
        else:
            assert self.client.receive_handshake(engine_identity(rank), frame) is None
            state.stage, state.hash = HandshakeStage.READY, hash_

    @rule(rank=RANK, garbage=GARBAGE)
    def somebody_babbles(self, rank: int, garbage: bytes) -> None:
        self._refused(rank, garbage)

    @rule(rank=RANK, garbage=BAD_REGISTRATION)
    def somebody_registers_nonsense(self, rank: int, garbage: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            self.client.receive_registration(engine_identity(rank), garbage)

    @rule(identity=st.sampled_from([b"", b"\x00", b"\x00kilroy"]), registration=st.booleans())
    def a_stranger_comes_by(self, identity: bytes, registration: bool) -> None:
        """Whatever it says, it is left alone."""
        if registration:
            self.client.receive_registration(identity, REGISTRATION)
        else:
            assert self.client.receive_handshake(identity, b"\xc1") is None
        self.strangers += 1

    # ------------------------------------------------------------------ invariants

    def _taken(self, rank: int, payload: bytes) -> bytes:
        reply = self.client.receive_handshake(engine_identity(rank), payload)
        assert reply is not None
        return reply

    def _refused(self, rank: int, payload: bytes) -> None:
        with pytest.raises(RemoteProtocolError):
            self.client.receive_handshake(engine_identity(rank), payload)

    @invariant()
    def the_client_is_where_the_model_is(self) -> None:
        ranks, client = self.ranks, self.client
        assert {rank: client.stage(rank) for rank in ranks} == {rank: state.stage for rank, state in ranks.items()}
        assert client.registrations.keys() == client.dialects.keys()
        assert client.registrations.keys() == {rank for rank, state in ranks.items() if state.registered}
        assert client.strangers == self.strangers
        complete = {rank for rank, state in ranks.items() if state.registered and state.stage is HandshakeStage.READY}
        assert set(client.pending) == ranks.keys() - complete
