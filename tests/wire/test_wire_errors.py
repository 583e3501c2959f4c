"""What cannot be written or read: typed errors that say where; nothing partial, unpickled or unbounded."""

from __future__ import annotations

import builtins
import contextlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_vectors import RELEASES, frames_of, load

import anyengine._wire as wire
from anyengine.exceptions import DecodeError, EncodeError, RemoteProtocolError

NEWEST = wire.NEWEST
MIB = 1024 * 1024

VECTORS = [
    vector
    for release in RELEASES[-2:]
    for vector in load(release)
    if vector["kind"] in {"EngineCoreRequest", "EngineCoreOutputs", "UTILITY"}
]


def add_with(**fields: Any) -> list[Any]:
    request = wire.EngineCoreRequest("r", [1], sampling_params=wire.WireSamplingParams())
    return NEWEST.encode_add(msgspec.structs.replace(request, **fields))


def read(vector: dict[str, Any], frames: list[Any]) -> Any:
    return NEWEST.decode_outputs(frames) if vector["kind"] == "EngineCoreOutputs" else NEWEST.decode_input(frames)


def cycle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("extra_args", "field", "type_name"),
    [
        ({"a": [1, object()]}, "sampling_params.extra_args['a'][1]", "object"),
        ({"a": {"b": 2**64}}, "sampling_params.extra_args['a']['b']", "int"),
        ({"a": "\ud800"}, "sampling_params.extra_args['a']", "str"),
        ({"a": print}, "sampling_params.extra_args['a']", "builtin_function_or_method"),
    ],
)
def test_an_encode_error_names_field_and_type(extra_args: dict[str, Any], field: str, type_name: str) -> None:
    with pytest.raises(EncodeError) as caught:
        add_with(sampling_params=wire.WireSamplingParams(extra_args=extra_args))
    assert (caught.value.field, caught.value.type_name) == (field, type_name)
    assert field in str(caught.value)


def test_other_values_that_cannot_be_written() -> None:
    with pytest.raises(EncodeError):
        NEWEST.encode_utility(wire.UtilityCall(0, 1, "m", cycle()))
    reply = wire.EngineCoreOutputs(utility_output=wire.UtilityOutput(7, None, {"dtype": object()}))
    with pytest.raises(EncodeError) as caught:
        NEWEST.encode_outputs(reply)
    assert caught.value.type_name == "object"
    with pytest.raises(EncodeError):
        wire.encode_handshake(wire.HandshakeInit(wire.EngineAddresses([], []), {"bad": object()}))


@pytest.mark.case("K70")
def test_a_call_that_would_need_pickle_is_refused_before_sending() -> None:
    with pytest.raises(EncodeError) as caught:
        NEWEST.encode_utility(wire.UtilityCall(0, 1, "collective_rpc", [lambda worker: worker, {"f": print}]))
    assert (caught.value.field, caught.value.type_name) == ("args[0]", "function")


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([], "0 frames"),
        ([b"\x00"], "1 frames"),
        ([b"\x04", b"\xc0"], "unknown message type"),
        ([b"\x05", b"\xc0"], "unknown message type"),
        ([b"", b"\x90"], "unknown message type"),
        ([b"READY", b"\x90"], "unknown message type"),
        ([b"\x00", b""], "EngineCoreRequest of 0 bytes"),
        ([b"\x00", msgspec.msgpack.encode([1, [1], None, None, None])], r"\$\[0\].*Expected `str`, got `int`"),
        ([b"\x00", msgspec.msgpack.encode(["r", [1], None, {"n": True}])], r"\$\[3\]"),
        ([b"\x00", b"\x90"], "at least"),
        ([b"\x01", msgspec.msgpack.encode(5)], "AbortRequests"),
        ([b"\x03", msgspec.msgpack.encode([0, 1])], "UtilityCall"),
        ([b"\x02", msgspec.msgpack.encode(["x"])], "StartDPWave"),
    ],
)
def test_bad_input_of_an_engine(frames: list[bytes], why: str) -> None:
    with pytest.raises(DecodeError, match=why):
        NEWEST.decode_input(frames)


def test_a_decode_error_says_what_and_where() -> None:
    payload = msgspec.msgpack.encode([0, [["r-0", [1]], ["r-1", [1, "x"]]]])
    with pytest.raises(RemoteProtocolError) as caught:
        NEWEST.decode_outputs([payload])
    error = caught.value
    assert isinstance(error, DecodeError)
    assert (error.message_type, error.path, error.size_bytes) == ("EngineCoreOutputs", "$[1][1][1][1]", len(payload))
    assert isinstance(error.__cause__, msgspec.ValidationError)
    for part in ("EngineCoreOutputs", "$[1][1][1][1]", str(len(payload)), "int"):
        assert part in str(error)


def test_no_frames_at_all() -> None:
    with pytest.raises(DecodeError, match="no frames"):
        NEWEST.decode_outputs([])


def test_bad_handshakes() -> None:
    for bad in (b"", b"\xc0", b"READY", msgspec.msgpack.encode({"status": "OTHER", "local": True, "headless": False})):
        with pytest.raises(DecodeError, match="handshake"):
            wire.decode_handshake(bad)
    with pytest.raises(DecodeError, match="HandshakeInit"):
        wire.decode_init(msgspec.msgpack.encode({"addresses": {"inputs": "x"}}))
    for bad in (b"\x90", b"\x92\xa1x\x01", b"\x92\xc0\xc0", b""):
        with pytest.raises(DecodeError):
            wire.decode_client_message(bad)
    with pytest.raises(DecodeError, match="LoadPublication"):
        wire.decode_publication(b"\x91\xc0")


@pytest.mark.parametrize("result", [5, [], [None], {"a": 1}, [None, 1, 2]])
def test_a_utility_result_that_is_no_pair(result: Any) -> None:
    payload = msgspec.msgpack.encode([0, [], None, 0.0, [7, None, result]])
    with pytest.raises(DecodeError, match=r"pair"):
        NEWEST.decode_outputs([payload])


@pytest.mark.case("K70")
@pytest.mark.parametrize(("code", "why"), [(1, "is a pickle"), (2, "is a pickle"), (4, "unknown msgpack extension 4")])
def test_pickles_are_refused_and_nothing_is_imported(code: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = msgspec.msgpack.Ext(code, b"cos\nsystem\n(S'exit 1'\ntR.")
    type_info = ["os", "system"]
    messages = [
        [0, [], None, 0.0, [7, None, [type_info, bomb]]],
        [0, [["r", [], None, None, None, None, None, None, {"k": bomb}]]],
        [0, [["r", [], None, None, ["<f4", [1], bomb]]]],
    ]
    frames = [msgspec.msgpack.encode(message) for message in messages]
    imported: list[str] = []
    real_import = builtins.__import__

    def recording_import(name: str, *args: Any, **kwargs: Any) -> Any:
        imported.append(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", recording_import)
    init = {"addresses": {"inputs": [], "outputs": []}, "parallel_config": {"k": bomb}}
    for frame in frames:
        with pytest.raises(DecodeError, match=why):
            NEWEST.decode_outputs([frame])
    with pytest.raises(DecodeError, match=why):
        NEWEST.decode_outputs([frames[0], b"auxiliary"])
    with pytest.raises(DecodeError, match=why):
        NEWEST.decode_input([b"\x03", msgspec.msgpack.encode([0, 1, "m", [bomb]])])
    with pytest.raises(DecodeError, match=why):
        NEWEST.decode_input([b"\x00", msgspec.msgpack.encode(["r", [1], None, {"extra_args": {"k": bomb}}])])
    with pytest.raises(DecodeError, match=why):
        wire.decode_init(msgspec.msgpack.encode(init))
    with pytest.raises(DecodeError, match=why):
        wire.decode_ready(msgspec.msgpack.encode({"max_model_len": 1, "kv_events_config": {"k": bomb}}))
    harmless = msgspec.msgpack.encode([0, [], None, 0.0, [7, None, [type_info, "value"]]])
    assert NEWEST.decode_outputs([harmless]).utility_output == wire.UtilityOutput(7, None, "value")
    monkeypatch.undo()
    assert not {"os", "pickle", "cloudpickle", "_pickle"} & set(imported)


REST = b"\x90\xc0\xcb" + bytes(8)  # outputs, scheduler_stats, timestamp


@pytest.mark.parametrize(
    "payload",
    [
        b"\x99\x00\xdd\xff\xff\xff\xff",
        b"\x99\x00\x91\x93\xa1a\xdd\xff\xff\xff\xff",
        b"\x99\x00" + REST + b"\x93\x01\xc0" + b"\xdd\xff\xff\xff\xff" * 200,
        b"\x99\x00" + REST + b"\x93\x01\xc0\x92\xc0\x81\xdd\x0f\xff\xff\xff",
        b"\x99\x00" + REST + b"\xc0\xdd\xff\xff\xff\xff",
        b"\x99\x00" + REST + b"\x93\x01\xc0\xc6\xff\xff\xff\xff",
        b"\x99\x00" + REST + b"\x93\x01\xc0\x92\xc0" + b"\x91" * 200_000,
        b"\x99\x00" + REST + b"\x93\x01\xc0\x92\xc0" + b"\x81\xa1a" * 100_000,
        b"\x99\x00\xdf\xff\xff\xff\xff",
        b"\x92\x00\x91\x95\xa1a\x90\xc0\xc0\x93\xa3<f4\x92\xcf" + b"\x7f" * 8 + b"\xcf" + b"\x7f" * 8 + b"\xc7\x00\x03",
    ],
)
def test_sizes_that_lie_cost_no_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            NEWEST.decode_outputs([payload])
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_mutated_frames_decode_or_raise_decode_error(data: st.DataObject) -> None:
    vector = data.draw(st.sampled_from(VECTORS))
    frames = [bytearray(frame) for frame in frames_of(vector)]
    for _ in range(data.draw(st.integers(1, 6))):
        victim = frames[data.draw(st.integers(0, len(frames) - 1))]
        position = data.draw(st.integers(0, len(victim)))
        match data.draw(st.sampled_from(["cut", "set", "insert", "drop"])):
            case "cut":
                del victim[position:]
            case "set":
                victim[position : position + 1] = data.draw(st.binary(min_size=1, max_size=5))
            case "insert":
                victim[position:position] = data.draw(st.binary(min_size=1, max_size=5))
            case "drop" if len(frames) > 1:
                frames.remove(victim)
    with contextlib.suppress(DecodeError):
        read(vector, list(frames))


@settings(max_examples=500, deadline=None)
@given(frames=st.lists(st.binary(max_size=60), max_size=4))
def test_arbitrary_bytes_decode_or_raise_decode_error(frames: list[bytes]) -> None:
    for decode in (NEWEST.decode_outputs, NEWEST.decode_input):
        with contextlib.suppress(DecodeError):
            decode(frames)
    for decode_one in (
        wire.decode_ready,
        wire.decode_handshake,
        wire.decode_init,
        wire.decode_publication,
        wire.decode_client_message,
        wire.rank_of,
    ):
        for frame in frames:
            with contextlib.suppress(DecodeError):
                decode_one(frame)


@pytest.mark.parametrize("vector", VECTORS[::7], ids=lambda vector: vector["name"])
def test_every_truncation_of_a_payload_is_refused(vector: dict[str, Any]) -> None:
    frames = frames_of(vector)
    at = 0 if vector["kind"] == "EngineCoreOutputs" else 1  # the type frame comes first
    for length in range(len(frames[at])):
        with pytest.raises(DecodeError):
            read(vector, [*frames[:at], frames[at][:length], *frames[at + 1 :]])
