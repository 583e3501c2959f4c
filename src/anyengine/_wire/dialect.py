"""A dialect: the wire of a range of engine releases, as encoders and decoders.

Owns the two roles (client: requests out, outputs in; engine: the reverse). Pure and synchronous; a dialect keeps no
state between calls, so that any number of clients and threads may share it.
Mirrors vLLM 0.33.0 ``v1/engine/core_client.py`` and ``core.py`` (process_input_sockets, process_output_sockets).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, TypeAlias, cast

import msgspec

from anyengine.exceptions import DecodeError, EncodeError, LocalProtocolError

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
from .derive import StructType, decoding_types, keeping_later, restrict, writing_types
from .layouts import ROWS, Release, Row, change_points, last_names, shared_names, versions_of
from .methods import METHODS, PROBES, Arity, arity_at
from .multimodal import MultiModalFeatureSpec, listed_features, revive_features
from .outputs import EngineCoreOutput, EngineCoreOutputs, LogprobsTensors, UtilityOutput
from .positions import positions
from .ready import EngineCoreReadyResponse
from .requests import (
    AbortRequests,
    EngineCoreRequest,
    ReconfigureDistributedRequest,
    StartDPWave,
    UtilityCall,
    WireLoRARequest,
    WirePoolingParams,
    WireSamplingParams,
    WireStructuredOutputs,
)
from .salvage import salvage_outputs
from .stats import PrefillStats, PrefixCacheStats, SchedulerStats
from .tensors import revive_loose

__all__ = ["CANONICAL", "DIALECTS", "NEWEST", "Dialect", "EngineInput", "dialect_between", "is_engine_dead"]

EngineInput: TypeAlias = EngineCoreRequest | AbortRequests | UtilityCall | StartDPWave
"""What an engine may be told."""

CANONICAL: Final[dict[str, StructType]] = {  # parts before what contains them
    "StructuredOutputsParams": WireStructuredOutputs,
    "SamplingParams": WireSamplingParams,
    "PoolingParams": WirePoolingParams,
    "LoRARequest": WireLoRARequest,
    "MultiModalFeatureSpec": MultiModalFeatureSpec,
    "EngineCoreRequest": EngineCoreRequest,
    "ReconfigureDistributedRequest": ReconfigureDistributedRequest,
    "PrefillStats": PrefillStats,
    "PrefixCacheStats": PrefixCacheStats,
    "SchedulerStats": SchedulerStats,
    "LogprobsTensors": LogprobsTensors,
    "EngineCoreOutput": EngineCoreOutput,
    "EngineCoreOutputs": EngineCoreOutputs,
    "EngineCoreReadyResponse": EngineCoreReadyResponse,
}
"""The structs that other layers see, under vLLM's names for them."""

_MULTIMODAL_FORMS: Final = ("MultiModalFieldElem", "BaseMultiModalField")

_ABORT = compile_decoder(list[str])
_UTILITY = compile_decoder(UtilityCall)
_START_WAVE = compile_decoder(StartDPWave)


class Dialect:
    """Encoders and decoders for the releases from ``since`` up to but not including ``until`` (``None``: no end).

    Where these releases differ, a dialect writes what all of them read (the positions that they share), refuses what
    would be lost by that, and can be narrowed by what the engine says. Invariant: no state but what is compiled here,
    on first use. Decoded structs are the canonical ones, or structs with the same attributes.
    """

    def __init__(self, since: Release, until: Release | None, rows: Mapping[str, tuple[Row, ...]] = ROWS) -> None:
        self.since: Release = since
        self.until: Release | None = until
        self._rows = rows
        self._later: tuple[str, ...] = ()  # what is kept of positions that nobody has a name for
        self._output_rows = versions_of(rows["EngineCoreOutput"], since, until)
        newest = self._output_rows[-1][1]
        self._outputs_differ = any(names != newest[: len(names)] for _, names in self._output_rows)

    def __repr__(self) -> str:
        return f"<Dialect of {self.releases}>"

    @property
    def releases(self) -> str:
        """The range, for people: ``"vLLM 0.20.0 and later, before 0.22.0"``."""
        end = f", before {_dotted(self.until)}" if self.until else ""
        return f"vLLM {_dotted(self.since)} and later{end}"

    # What is known of the engine.

    @cached_property
    def probe(self) -> str | None:
        """A utility method (without arguments or effect) to call before the first request; ``None`` if none is needed.

        It is needed where the releases share too few positions for a request to be written. Whether the call succeeds
        decides: see :meth:`probed`.
        """
        if "data_parallel_rank" in self._names("EngineCoreRequest"):  # the last of the required ones
            return None
        return next(method for method in PROBES if self._splits(method))

    def probed(self, found: bool) -> Dialect:
        """The dialect of an engine that has (``found``) or has not the method named by :attr:`probe`.

        Raises:
            LocalProtocolError: no probe is needed.
        """
        method = self.probe
        if method is None:
            raise LocalProtocolError(f"{self!r} needs no probe")
        start = next(since for since, arity in METHODS[method] if arity is not None)
        return dialect_between(start, self.until) if found else dialect_between(self.since, start)

    def narrowed(self, frames: Sequence[Frame]) -> Dialect:
        """The dialect of an engine that sent these outputs: arrays are always complete, so their length tells.

        The same dialect if nothing follows from it.
        """
        if not self._outputs_differ:
            return self
        count = positions(frames[0]).output
        fitting = [index for index, (_, names) in enumerate(self._output_rows) if len(names) == count]
        if not fitting:
            return self
        first, last = fitting[0], fitting[-1] + 1
        since = max(self.since, self._output_rows[first][0])
        return dialect_between(since, self._output_rows[last][0] if last < len(self._output_rows) else self.until)

    def utility_arity(self, method: str) -> Arity:
        """How many arguments ``method`` takes at most, in each of these releases; ``None``: not all of them have it."""
        points = [point for point in _POINTS if self.since < point and (self.until is None or point < self.until)]
        arities = [arity_at(method, release) for release in (self.since, *points)]
        known = [arity for arity in arities if arity is not None]
        return min(known) if len(known) == len(arities) else None

    def surplus(self, frames: Sequence[Frame]) -> str | None:
        """What an output message has beyond the newest layout known, in words; ``None`` if nothing."""
        found = positions(frames[0])
        for message, count in (("EngineCoreOutputs", found.outputs), ("EngineCoreOutput", found.output)):
            known = len(last_names(self._rows[message], self.since, self.until))
            if count is not None and count > known:
                return f"{message} has {count} positions, of which {known} are known: the others mean nothing"
        return None

    def keeping_later(self, frames: Sequence[Frame]) -> Dialect:
        """The dialect of an engine that sent these outputs, which keeps what they have behind the newest layout known;
        the same one if that is nothing."""
        count, known = positions(frames[0]).output, len(EngineCoreOutput.__struct_fields__)
        if count is None or count <= known:
            return self
        keeping = Dialect(self.since, self.until, self._rows)
        keeping._later = tuple(f"position_{number}" for number in range(known, count))
        return keeping

    # Client role.

    def encode_add(self, request: EngineCoreRequest) -> list[Frame]:
        """The frames ``[type, payload, *aux]`` of a request.

        Raises:
            EncodeError: a value that cannot go on the wire, or one that the engine's release (or each of those that it
                may be) has no place for; its path is in ``field``.
            LocalProtocolError: the engine's release must be probed first.
        """
        if self._written:
            if self.probe is not None:
                raise LocalProtocolError(f"no request can be written for {self.releases}: call {self.probe!r} first")
            if self.lists_features and request.mm_features is not None:
                try:
                    features = self._listed(request.mm_features)
                except (TypeError, AttributeError) as exc:  # nobody has looked at their types yet
                    what = f"EngineCoreRequest.mm_features={reprlib.repr(request.mm_features)}"
                    raise EncodeError(f"{what} cannot be encoded: {exc}", field="mm_features") from exc
                request = msgspec.structs.replace(request, mm_features=features)
            request = restrict(request, self._written)
        return [RequestType.ADD.value, *encode_frames(request)]

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
        if self._outputs_differ and frames and (narrowed := self.narrowed(frames)) is not self:
            return narrowed.decode_outputs(frames)
        message = decode_frames(self._outputs, frames, "EngineCoreOutputs")
        utility = message.utility_output
        if utility is not None:
            utility.result = _unwrap_result(utility, frames)
        return message

    def salvage_outputs(self, frames: Sequence[Frame], error: DecodeError) -> EngineCoreOutputs | None:
        """What an engine message that could not be decoded because of ``error`` says all the same, or ``None``.

        See :func:`~anyengine._wire.salvage.salvage_outputs`.
        """
        batch = cast(type[EngineCoreOutputs], self._read.get(EngineCoreOutputs, EngineCoreOutputs))
        return salvage_outputs(batch, frames, error)

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
        """The registration frame of an engine; empty in releases that say nothing there."""
        return encode_frame(self._restricted(response)) if self._names("EngineCoreReadyResponse") else b""

    def _decode_request(self, frames: Sequence[Frame]) -> EngineCoreRequest:
        request = decode_frames(self._request, frames, "EngineCoreRequest")
        if request.mm_features:
            try:
                revive_features(request.mm_features, frames)
            except BAD_BYTES as exc:
                raise_decode_error(exc, "EngineCoreRequest.mm_features", frames[0])
        return request

    # Compiled on first use: of two dozen dialects a process uses one or two.

    @cached_property
    def _written(self) -> dict[StructType, Any]:
        return dict(writing_types(CANONICAL, {message: self._names(message) for message in self._rows}))

    @cached_property
    def _read(self) -> dict[StructType, StructType]:
        layout = {message: last_names(rows, self.since, self.until) for message, rows in self._rows.items()}
        return decoding_types(CANONICAL, layout)

    @property
    def request_type(self) -> StructType:
        """The struct as which these releases read a request: positions and keys are theirs."""
        return cast(StructType, self._request.type)

    @cached_property
    def _request(self) -> msgspec.msgpack.Decoder[EngineCoreRequest]:
        return compile_decoder(cast(type[EngineCoreRequest], self._read.get(EngineCoreRequest, EngineCoreRequest)))

    @cached_property
    def _outputs(self) -> msgspec.msgpack.Decoder[EngineCoreOutputs]:
        outputs = self._read.get(EngineCoreOutputs, EngineCoreOutputs)
        if self._later:
            outputs = keeping_later(self._read.get(EngineCoreOutput, EngineCoreOutput), outputs, self._later)
        return compile_decoder(cast(type[EngineCoreOutputs], outputs))

    @cached_property
    def lists_features(self) -> bool:
        """Whether multi-modal items are written as arrays of elements (before 0.16); only encoders know that form."""
        return "key" in versions_of(self._rows["MultiModalFieldElem"], self.since, self.until)[0][1]

    def _listed(self, features: Sequence[MultiModalFeatureSpec]) -> list[MultiModalFeatureSpec]:
        forms = [versions_of(self._rows[name], self.since, self.until) for name in _MULTIMODAL_FORMS]
        if any(len(rows) > 1 for rows in forms) and any(feature.data is not None for feature in features):
            raise EncodeError(
                f"mm_features cannot be sent: their form is not the same in all of {self.releases}", field="mm_features"
            )
        return listed_features(features, named_options="keep_on_cpu" in self._names("BaseMultiModalField"))

    def _names(self, message: str) -> tuple[str, ...]:
        """What is written of ``message``: keys are ignored where they are unknown, positions are not."""
        struct = CANONICAL.get(message)
        choose = last_names if struct is not None and not struct.__struct_config__.array_like else shared_names
        return choose(self._rows[message], self.since, self.until)

    def _splits(self, method: str) -> bool:
        return any(since > self.since and (self.until is None or since < self.until) for since, _ in METHODS[method])

    def _restricted(self, value: Any) -> Any:
        return restrict(value, self._written) if self._written else value


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


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


_POINTS: Final = change_points(ROWS, METHODS)


@lru_cache(maxsize=128)
def dialect_between(since: Release, until: Release | None) -> Dialect:
    """The dialect of an engine of which no more is known than this range of releases."""
    return Dialect(since, until)


DIALECTS: Final = tuple(
    dialect_between(since, until) for since, until in zip(_POINTS, (*_POINTS[1:], None), strict=True)
)
"""One for each range of releases that do everything alike, oldest first."""

NEWEST: Final = DIALECTS[-1]
