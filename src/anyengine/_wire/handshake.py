"""The handshake on its own socket: HELLO and READY from the engine, the init message to it.

Owns three small maps; must not know sockets, order or deadlines (``_protocol`` has them).
Mirrors vLLM 0.33.0 ``v1/engine/core.py`` (startup_handshake) and ``v1/engine/utils.py`` (EngineZmqAddresses,
EngineHandshakeMetadata).
"""

from __future__ import annotations

from typing import Any

import msgspec

from .codec import compile_decoder, decode_frame, encode_frame
from .constants import Frame

__all__ = [
    "EngineAddresses",
    "HandshakeHello",
    "HandshakeInit",
    "HandshakeReady",
    "decode_handshake",
    "decode_init",
    "encode_handshake",
]


class HandshakeHello(msgspec.Struct, tag_field="status", tag="HELLO", frozen=True, gc=False):
    """An engine process has started and asks for its addresses."""

    local: bool
    headless: bool


class HandshakeReady(msgspec.Struct, tag_field="status", tag="READY", omit_defaults=True, frozen=True, gc=False):
    """An engine has loaded its model and connected. The hash comes only from engines with data parallelism; blocks and
    address only from releases up to 0.19.1, which say them here instead of at registration."""

    local: bool
    headless: bool
    parallel_config_hash: str | None = None
    num_gpu_blocks: int | None = None
    dp_stats_address: str | None = None


class EngineAddresses(msgspec.Struct, frozen=True, gc=False):
    """Where an engine connects: ``inputs`` and ``outputs`` have one entry for each client, in order of client index."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class HandshakeInit(msgspec.Struct, frozen=True, gc=False):
    """The client's answer to HELLO. Each key of ``parallel_config`` overrides the engine's own setting."""

    addresses: EngineAddresses
    parallel_config: dict[str, Any] = {}


_FROM_ENGINE = msgspec.msgpack.Decoder(HandshakeHello | HandshakeReady)
_TO_ENGINE = compile_decoder(HandshakeInit)


def encode_handshake(message: HandshakeHello | HandshakeInit | HandshakeReady) -> bytes:
    """The single frame of ``message``.

    Raises:
        EncodeError: a value that cannot go on the wire.
    """
    return encode_frame(message)


def decode_handshake(frame: Frame) -> HandshakeHello | HandshakeReady:
    """What an engine said on the handshake socket.

    Raises:
        DecodeError: neither HELLO nor READY.
    """
    return decode_frame(_FROM_ENGINE, frame, "handshake")


def decode_init(frame: Frame) -> HandshakeInit:
    """What the client answered to HELLO.

    Raises:
        DecodeError: not an init message.
    """
    return decode_frame(_TO_ENGINE, frame, "HandshakeInit")
