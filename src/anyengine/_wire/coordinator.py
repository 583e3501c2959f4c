"""Messages of the data-parallel coordinator: publications to clients, their requests to it, waves to engines.

Owns these small frames; must not know what waves and counts mean.
Mirrors vLLM 0.32.0 ``v1/engine/coordinator.py`` and ``core_client.py`` (DPAsyncMPClient).
"""

from __future__ import annotations

from typing import Final

import msgspec

from .codec import compile_decoder, decode_frame, encode_frame
from .constants import Frame, RequestType
from .requests import StartDPWave

__all__ = [
    "COORDINATOR_READY",
    "SUBSCRIBE",
    "UNSUBSCRIBE",
    "FirstRequest",
    "LoadPublication",
    "ScaleElasticEP",
    "decode_client_message",
    "decode_publication",
    "encode_client_message",
    "encode_publication",
    "encode_start_wave",
]

COORDINATOR_READY: Final = b"READY"
"""The single frame to every engine once all of them have subscribed."""
SUBSCRIBE: Final = b"\x01"
UNSUBSCRIBE: Final = b"\x00"


class LoadPublication(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The state of all ranks: ``counts`` has ``[waiting, running, kv_cache_usage]`` for each; ``None``: unchanged."""

    counts: list[list[float]] | None
    current_wave: int
    engines_running: bool


class FirstRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A client sent a request to ``engine`` (rank, or identity as vLLM's client does) while the engines were idle."""

    engine: int | bytes
    wave: int


class ScaleElasticEP(msgspec.Struct, array_like=True, tag="SCALE_ELASTIC_EP", frozen=True, gc=False):
    """A client asks for ``new_engine_count`` engines. The tag comes first on the wire."""

    new_engine_count: int


_PUBLICATION = compile_decoder(LoadPublication)
_FIRST_REQUEST = compile_decoder(FirstRequest)
_SCALE = compile_decoder(ScaleElasticEP)
_STR_MARKERS: Final = frozenset((*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB))  # msgpack's


def encode_publication(publication: LoadPublication) -> bytes:
    """The single frame of ``publication``."""
    return encode_frame(publication)


def decode_publication(frame: Frame) -> LoadPublication:
    """What the coordinator published.

    Raises:
        DecodeError: not a publication.
    """
    return decode_frame(_PUBLICATION, frame, "LoadPublication")


def encode_client_message(message: FirstRequest | ScaleElasticEP) -> bytes:
    """The single frame of a client's message to the coordinator."""
    return encode_frame(message)


def decode_client_message(frame: Frame) -> FirstRequest | ScaleElasticEP:
    """What a client said to the coordinator.

    Raises:
        DecodeError: no such message.
    """
    if len(frame) > 1 and frame[1] in _STR_MARKERS:  # an array whose first item is a string
        return decode_frame(_SCALE, frame, "ScaleElasticEP")
    return decode_frame(_FIRST_REQUEST, frame, "FirstRequest")


def encode_start_wave(message: StartDPWave) -> list[Frame]:
    """The frames ``[type, payload]`` that start a wave."""
    return [RequestType.START_DP_WAVE.value, encode_frame(message)]
