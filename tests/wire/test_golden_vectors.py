"""Every vector that vLLM's own encoders wrote (0.12.0 to 0.33.0), read and written byte for byte."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from wire_vectors import RELEASES, build, differences, frames_of, load, plain, plain_value, watermarks_by_default

import anyengine._wire as wire
from anyengine.exceptions import EncodeError, LocalProtocolError

Vector = dict[str, Any]

LITERALS = {
    "engine_dead": wire.ENGINE_CORE_DEAD,
    "subscribe": wire.SUBSCRIBE,
    "unsubscribe": wire.UNSUBSCRIBE,
    "coordinator_ready": wire.COORDINATOR_READY,
}
COORDINATOR_STRUCTS = {
    "coord_publish_counts": wire.LoadPublication,
    "coord_publish_wave": wire.LoadPublication,
    "coord_first_req": wire.FirstRequest,
}


def dialect_of(release: str) -> wire.Dialect:
    """What the ready frame of ``release`` selects; where it does not say, with the version that a launcher knows."""
    frame = next(frames_of(vector)[0] for vector in load(release) if vector["name"] == "ready_response")
    return wire.select_dialect(wire.decode_ready(frame), version=release)


def vectors(*, kinds: set[str] | None = None, insecure: bool = True) -> list[Any]:
    """Each vector once for each dialect that reads or writes it."""
    found = {}
    for release in RELEASES:
        dialect = dialect_of(release)
        for vector in load(release):
            if vector["name"] in LITERALS or not (insecure or not vector.get("insecure")):
                continue
            if kinds is None or vector["kind"] in kinds:
                found[dialect, id(vector)] = pytest.param(dialect, vector, id=f"{release}-{vector['name']}")
    return list(found.values())


def decode(dialect: wire.Dialect, vector: Vector) -> Any:
    frames, kind, name = frames_of(vector), vector["kind"], vector["name"]
    match kind:
        case "EngineCoreRequest" | "ABORT" | "UTILITY" | "START_DP_WAVE":
            return dialect.decode_input(frames)
        case "EngineCoreOutputs":
            assert not wire.is_engine_dead(frames)
            return dialect.decode_outputs(frames)
        case "ready":
            return wire.decode_ready(frames[0])
        case "handshake":
            return wire.decode_init(frames[0]) if "init" in name else wire.decode_handshake(frames[0])
        case "coordinator":
            return wire.decode_publication(frames[0]) if "publish" in name else wire.decode_client_message(frames[0])
    raise AssertionError(kind)


def expected_value(dialect: wire.Dialect, vector: Vector) -> Any:
    value = plain_value(vector["value"])
    match vector["kind"]:
        case "EngineCoreRequest" if value["sampling_params"] and watermarks_by_default(dialect):
            params = value["sampling_params"]
            params["watermarking"] = None if params["watermarking"] is True else params["watermarking"]
        case "ABORT":
            return {"request_ids": value}
        case "UTILITY":  # untyped: structs and tensors among the arguments arrive as the wire has them
            return dict(zip(("client_index", "call_id", "method", "args"), vector["msgpack"], strict=True))
        case "START_DP_WAVE":
            return dict(zip(("wave", "exclude"), value, strict=True))
        case "handshake":
            value.pop("status", None)  # the struct's tag
            value.pop("parallel_config_hash", None) if "init" in vector["name"] else None  # nil, and only up to 0.13
            return value
        case "coordinator" if vector["name"] == "coord_scale_elastic_ep":
            return {"new_engine_count": value[1]}
        case "coordinator":
            return dict(zip(COORDINATOR_STRUCTS[vector["name"]].__struct_fields__, value, strict=True))
    return value


def encode(dialect: wire.Dialect, vector: Vector) -> list[Any]:
    value, name = build(vector["value"], frames_of(vector), dialect), vector["name"]
    match vector["kind"]:
        case "EngineCoreRequest":
            return dialect.encode_add(value)
        case "ABORT":
            return dialect.encode_abort(value)
        case "UTILITY":
            return dialect.encode_utility(wire.UtilityCall(*value))
        case "START_DP_WAVE":
            return wire.encode_start_wave(wire.StartDPWave(*value))
        case "EngineCoreOutputs":
            return dialect.encode_outputs(value)
        case "ready":
            return [dialect.encode_ready(value)]
        case "handshake" if "init" in name:
            return [wire.encode_handshake(value)]
        case "handshake":
            struct = {"HELLO": wire.HandshakeHello, "READY": wire.HandshakeReady}[value.pop("status")]
            return [wire.encode_handshake(struct(**value))]
        case "coordinator" if "publish" in name:
            return [wire.encode_publication(wire.LoadPublication(*value))]
        case "coordinator" if name == "coord_first_req":
            return [wire.encode_client_message(wire.FirstRequest(*value))]
        case "coordinator":
            return [wire.encode_client_message(wire.ScaleElasticEP(value[1]))]
    raise AssertionError(name)


@pytest.mark.feature("F08")
@pytest.mark.parametrize(("dialect", "vector"), vectors())
def test_a_vector_is_read(dialect: wire.Dialect, vector: Vector) -> None:
    found = differences(expected_value(dialect, vector), plain(decode(dialect, vector)))
    assert not found, "\n".join(found)


def old_handshake(param: Any) -> bool:
    """The handshake comes before a dialect can be chosen: keys of old releases that may be left out are left out."""
    dialect, vector = param.values
    return (vector["name"].startswith("handshake_init") and dialect.since < (0, 14, 0)) or (
        vector["name"].startswith("handshake_ready") and dialect.since < (0, 20, 0)
    )


# An engine with insecure serialisation adds type info, which this package reads past and never writes.
@pytest.mark.feature("F08", "R56")
@pytest.mark.parametrize(("dialect", "vector"), [p for p in vectors(insecure=False) if not old_handshake(p)])
def test_a_vector_is_written_byte_for_byte(dialect: wire.Dialect, vector: Vector) -> None:
    assert [bytes(frame).hex() for frame in encode(dialect, vector)] == vector["frames"]


@pytest.mark.parametrize(("dialect", "vector"), [p for p in vectors() if old_handshake(p)])
def test_an_old_handshake_lacks_only_what_may_be_missing(dialect: wire.Dialect, vector: Vector) -> None:
    theirs = msgspec.msgpack.decode(frames_of(vector)[0])
    optional = {"parallel_config_hash"} if "init" in vector["name"] else {"dp_stats_address"}
    value = build(vector["value"], frames_of(vector), dialect)
    if "init" in vector["name"]:
        ours = msgspec.msgpack.decode(wire.encode_handshake(value))
    else:
        ours = plain(wire.decode_handshake(frames_of(vector)[0])) | {"status": "READY"}
    for key in theirs.keys() | ours.keys():
        assert ours.get(key) == theirs.get(key) and (key in ours or key in optional)


@pytest.mark.parametrize(
    ("dialect", "vector"), [p for p in vectors(kinds={"EngineCoreOutputs"}) if p.values[0].since >= (0, 26, 0)]
)
def test_later_dialects_read_each_others_outputs(dialect: wire.Dialect, vector: Vector) -> None:
    """Since 0.26 an output has only been appended to."""
    for other in wire.DIALECTS:
        if other.since >= (0, 26, 0):
            found = differences(expected_value(dialect, vector), plain(decode(other, vector)))
            assert not found, "\n".join([repr(other), *found])


# --- what the ready frame alone selects ---------------------------------------------------------------------------


def selected_by_ready_frame(release: str) -> wire.Dialect:
    """Without a launcher that knows the version; after the probe, if the dialect asks for one."""
    frame = next(frames_of(vector)[0] for vector in load(release) if vector["name"] == "ready_response")
    dialect = wire.select_dialect(wire.decode_ready(frame))
    if dialect.probe is not None:
        assert dialect.probe == "is_scheduler_paused"
        with pytest.raises(LocalProtocolError, match="is_scheduler_paused"):
            dialect.encode_add(wire.EngineCoreRequest("r", [1], sampling_params=wire.WireSamplingParams()))
        dialect = dialect.probed(found=dialect_of(release).utility_arity(dialect.probe) is not None)
    return dialect


@pytest.mark.feature("F08")
@pytest.mark.parametrize("release", RELEASES)
def test_the_ready_frame_selects_a_dialect_that_reads_everything(release: str) -> None:
    dialect = selected_by_ready_frame(release)
    for vector in load(release):
        if vector["kind"] == "EngineCoreOutputs":
            found = differences(expected_value(dialect_of(release), vector), plain(decode(dialect, vector)))
            assert not found, "\n".join([vector["name"], *found])


def is_leading_part(ours: Any, theirs: Any) -> bool:
    """Whether positions were only left out at the end of arrays, and keys only where they say nothing."""
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) <= len(theirs) and all(map(is_leading_part, ours, theirs))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() <= theirs.keys() and all(
            is_leading_part(ours[key], theirs[key]) if key in ours else not theirs[key] for key in theirs
        )
    return bool(ours == theirs)


@pytest.mark.feature("F08")
@pytest.mark.parametrize("release", RELEASES)
def test_the_ready_frame_selects_a_dialect_that_writes_what_is_safe(release: str) -> None:
    """Byte for byte where the frame tells the release; else the leading positions of it, or a refusal: never others."""
    dialect, exact = selected_by_ready_frame(release), dialect_of(release)
    written = refused = 0
    for vector in load(release):
        if vector["kind"] != "EngineCoreRequest":
            continue
        try:
            frames = [bytes(frame) for frame in encode_with(dialect, exact, vector)]
        except EncodeError:
            refused += 1
            continue
        written += 1
        theirs = frames_of(vector)
        if dialect is exact:
            assert frames == theirs
        assert frames[0] == theirs[0] and frames[2:] == theirs[2:]
        assert is_leading_part(loose(frames[1]), loose(theirs[1])), vector["name"]
    assert written > refused
    assert dialect is not exact or not refused


def encode_with(dialect: wire.Dialect, exact: wire.Dialect, vector: Vector) -> list[Any]:
    """``dialect``'s frames of what ``exact``, the vector's own, would have us say."""
    return dialect.encode_add(build(vector["value"], frames_of(vector), exact))


def loose(payload: bytes) -> Any:
    return msgspec.msgpack.decode(payload, ext_hook=lambda code, data: (code, bytes(data)))


def test_a_wrong_vector_is_noticed() -> None:
    """The comparison itself: each single change of an expected value is found."""
    vector = next(v for v in load("0.33.0") if v["name"] == "outputs_everything_else")
    decoded = plain(decode(wire.NEWEST, vector))
    for field, wrong in {"num_nans_in_logits": 3, "trace_headers": {}, "routed_experts": None}.items():
        expected = expected_value(wire.NEWEST, vector)
        expected["outputs"][0][field] = wrong
        assert differences(expected, decoded)


@pytest.mark.parametrize("release", RELEASES)
def test_the_literal_frames(release: str) -> None:
    literal = {v["name"]: frames_of(v) for v in load(release) if v["name"] in LITERALS}
    assert literal == {name: [frame] for name, frame in LITERALS.items()}
    assert wire.is_engine_dead(literal["engine_dead"])
