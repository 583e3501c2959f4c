"""A dialect: the wire of one range of engine releases, as encoders and decoders.

Owns the choice of layout and the two roles (client: requests out, outputs in; engine: the reverse). Pure and
synchronous; a dialect keeps no state between calls, so that any number of clients and threads may share it.
Mirrors vLLM 0.32.0 ``v1/engine/core_client.py`` and ``core.py`` (process_input_sockets, process_output_sockets).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, cast

from anyengine.exceptions import DecodeError, RemoteProtocolError

from .codec import (
    BAD_BYTES,
    compile_decoder,
    decode_frame,
    decode_frames,
    encode_frame,
    encode_frames,
    raise_decode_error,
)
from .constants import ENGINE_CORE_DEAD, Frame, RequestType
from .derive import StructType, decoding_types, restrict, writing_types
from .layouts import OLDEST, ROWS, Release, Row
from .multimodal import revive_features
from .outputs import EngineCoreOutput, EngineCoreOutputs, LogprobsTensors, UtilityOutput
from .ready import EngineCoreReadyResponse
from .requests import AbortRequests, EngineCoreRequest, StartDPWave, UtilityCall, WireLoRARequest, WirePoolingParams
from .tensors import revive_loose

__all__ = ["DIALECTS", "NEWEST", "Dialect", "EngineInput", "dialect_for", "is_engine_dead"]

EngineInput: TypeAlias = EngineCoreRequest | AbortRequests | UtilityCall | StartDPWave
"""What an engine may be told."""

_CANONICAL: Final[dict[str, StructType]] = {
    struct.__name__: struct
    for struct in (  # parts before what contains them
        WireLoRARequest, WirePoolingParams, EngineCoreRequest, LogprobsTensors, EngineCoreOutput, EngineCoreOutputs,
        EngineCoreReadyResponse,
    )
}  # fmt: skip

_ABORT = compile_decoder(list[str])
_UTILITY = compile_decoder(UtilityCall)
_START_WAVE = compile_decoder(StartDPWave)


class Dialect:
    """Encoders and decoders for the releases from ``since`` up to the next dialect.

    Invariant: no state but what is compiled here. Decoded structs are the canonical ones, or (where a release has other
    fields in the middle) structs with the same attributes.
    """

    __slots__ = ("_outputs", "_request", "_written", "since")

    def __init__(self, since: Release, rows: Mapping[str, tuple[Row, ...]] = ROWS) -> None:
        self.since: Release = since
        self._written = writing_types(_CANONICAL, rows, since)
        read = decoding_types(_CANONICAL, rows, since)
        self._request = compile_decoder(cast(type[EngineCoreRequest], read.get(EngineCoreRequest, EngineCoreRequest)))
        self._outputs = compile_decoder(cast(type[EngineCoreOutputs], read.get(EngineCoreOutputs, EngineCoreOutputs)))

    def __repr__(self) -> str:
        return f"<Dialect of vLLM {'.'.join(map(str, self.since))} and later>"

    # Client role.

    def encode_add(self, request: EngineCoreRequest) -> list[Frame]:
        """The frames ``[type, payload, *aux]`` of a request.

        Raises:
            EncodeError: a value that cannot go on the wire; its path is in ``field``.
        """
        return [RequestType.ADD.value, *encode_frames(self._restricted(request))]

    def encode_abort(self, request_ids: Sequence[str]) -> list[Frame]:
        """The frames of an abort of ``request_ids``."""
        return [RequestType.ABORT.value, encode_frame(list(request_ids))]

    def encode_utility(self, call: UtilityCall) -> list[Frame]:
        """The frames of a utility call. Tensors among the arguments reach the engine as bare lists, for want of a type.

        Raises:
            EncodeError: an argument that cannot go on the wire; its path is in ``field``.
        """
        args = [self._restricted(arg) for arg in call.args]
        return [
            RequestType.UTILITY.value,
            *encode_frames(UtilityCall(call.client_index, call.call_id, call.method, args)),
        ]

    def decode_outputs(self, frames: Sequence[Frame]) -> EngineCoreOutputs:
        """An engine message from its frames (payload, then auxiliary ones). Look for the dead sentinel first.

        Raises:
            DecodeError: the frames are not an engine message.
        """
        message = decode_frames(self._outputs, frames, "EngineCoreOutputs")
        utility = message.utility_output
        if utility is not None:
            utility.result = _unwrap_result(utility, frames)
        return message

    # Engine role.

    def decode_input(self, frames: Sequence[Frame]) -> EngineInput:
        """What a client (or the coordinator) tells the engine; the first frame is the type.

        Raises:
            DecodeError: an unknown or internal type, or a payload that is not what its type says.
        """
        if len(frames) < 2:
            raise DecodeError(f"a message to an engine has a type and a payload, not {len(frames)} frames")
        kind, payload = bytes(frames[0]), frames[1]
        if kind == RequestType.ADD.value:
            return self._decode_request(frames[1:])
        if kind == RequestType.ABORT.value:
            return AbortRequests(decode_frame(_ABORT, payload, "AbortRequests"))
        if kind == RequestType.UTILITY.value:
            return decode_frame(_UTILITY, payload, "UtilityCall")
        if kind == RequestType.START_DP_WAVE.value:
            return decode_frame(_START_WAVE, payload, "StartDPWave")
        raise DecodeError(f"unknown message type {kind[:16]!r}", size_bytes=memoryview(payload).nbytes)

    def encode_outputs(self, message: EngineCoreOutputs) -> list[Frame]:
        """The frames ``[payload, *aux]`` of an engine message.

        Raises:
            EncodeError: a value that cannot go on the wire, such as a utility call's result; its path is in ``field``.
        """
        return encode_frames(_wrap_result(self._restricted(message)))

    def encode_ready(self, response: EngineCoreReadyResponse) -> bytes:
        """The registration frame of an engine."""
        return encode_frame(self._restricted(response))

    def _restricted(self, value: Any) -> Any:
        return restrict(value, self._written) if self._written else value

    def _decode_request(self, frames: Sequence[Frame]) -> EngineCoreRequest:
        request = decode_frames(self._request, frames, "EngineCoreRequest")
        if request.mm_features:
            try:
                revive_features(request.mm_features, frames)
            except BAD_BYTES as exc:
                raise_decode_error(exc, "EngineCoreRequest.mm_features", frames[0])
        return request


def is_engine_dead(frames: Sequence[Frame]) -> bool:
    """Whether ``frames`` are the dead sentinel, an engine's last word."""
    return len(frames) == 1 and len(frames[0]) == len(ENGINE_CORE_DEAD) and bytes(frames[0]) == ENGINE_CORE_DEAD


def _wrap_result(message: EngineCoreOutputs) -> EngineCoreOutputs:
    utility = message.utility_output
    if utility is None:
        return message
    result = None if utility.failure_message is not None else (None, utility.result)
    wrapped = type(message)(*[getattr(message, name) for name in message.__struct_fields__])
    wrapped.utility_output = UtilityOutput(utility.call_id, utility.failure_message, result)
    return wrapped


def _unwrap_result(utility: UtilityOutput, frames: Sequence[Frame]) -> Any:
    pair = utility.result
    if pair is None:
        return None
    if type(pair) is not list or len(pair) != 2:
        raise DecodeError(
            "the result of a utility call is not a pair [type info, value]",
            message_type="EngineCoreOutputs",
            path="$[4][2]",
            size_bytes=memoryview(frames[0]).nbytes,
        )
    try:
        return revive_loose(pair[1], frames)  # pair[0], type info, would have us import names that the peer chose
    except RecursionError as exc:
        raise_decode_error(exc, "EngineCoreOutputs", frames[0])


def _releases(rows: Mapping[str, tuple[Row, ...]]) -> list[Release]:
    return sorted({since for message in rows.values() for since, _ in message})


DIALECTS: Final = tuple(Dialect(since) for since in _releases(ROWS))
"""Oldest first."""

NEWEST: Final = DIALECTS[-1]

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def dialect_for(version: str | None) -> Dialect:
    """The dialect for ``vllm_version`` of a ready message; the newest for ``None``, for later releases and for builds
    without a release number.

    Raises:
        RemoteProtocolError: the release is older than any dialect.
    """
    match = _VERSION.match(version or "")
    if not match or version is None:
        return NEWEST
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    if release < OLDEST:
        if "dev" in version:  # a build from a checkout without tags calls itself 0.1.dev1
            return NEWEST
        oldest = ".".join(map(str, OLDEST))
        raise RemoteProtocolError(f"the engine runs vLLM {version}; this client speaks {oldest} and later")
    return [dialect for dialect in DIALECTS if dialect.since <= release][-1]
