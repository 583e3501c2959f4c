"""Every vector that vLLM's own encoder wrote (0.32.0 and 0.33.0), read and written byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
from wire_vectors import RELEASES, build, differences, frames_of, load, plain, plain_value

import anyengine._wire as wire

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


def vectors(*, kinds: set[str] | None = None, insecure: bool = True) -> list[Any]:
    return [
        pytest.param(wire.dialect_for(release), vector, id=f"{release}-{vector['name']}")
        for release in RELEASES
        for vector in load(release)
        if vector["name"] not in LITERALS
        and (kinds is None or vector["kind"] in kinds)
        and (insecure or not vector.get("insecure"))
    ]


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


def expected_value(vector: Vector) -> Any:
    value = plain_value(vector["value"])
    match vector["kind"]:
        case "ABORT":
            return {"request_ids": value}
        case "UTILITY":  # untyped: structs and tensors among the arguments arrive as the wire has them
            return dict(zip(("client_index", "call_id", "method", "args"), vector["msgpack"], strict=True))
        case "START_DP_WAVE":
            return dict(zip(("wave", "exclude"), value, strict=True))
        case "handshake":
            value.pop("status", None)  # the struct's tag
            return value
        case "coordinator" if vector["name"] == "coord_scale_elastic_ep":
            return {"new_engine_count": value[1]}
        case "coordinator":
            return dict(zip(COORDINATOR_STRUCTS[vector["name"]].__struct_fields__, value, strict=True))
    return value


def encode(dialect: wire.Dialect, vector: Vector) -> list[Any]:
    value, name = build(vector["value"], frames_of(vector)), vector["name"]
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


@pytest.mark.parametrize(("dialect", "vector"), vectors())
def test_a_vector_is_read(dialect: wire.Dialect, vector: Vector) -> None:
    found = differences(expected_value(vector), plain(decode(dialect, vector)))
    assert not found, "\n".join(found)


# An engine with insecure serialisation adds type info, which this package reads past and never writes.
@pytest.mark.parametrize(("dialect", "vector"), vectors(insecure=False))
def test_a_vector_is_written_byte_for_byte(dialect: wire.Dialect, vector: Vector) -> None:
    assert [bytes(frame).hex() for frame in encode(dialect, vector)] == vector["frames"]


@pytest.mark.parametrize(("dialect", "vector"), vectors(kinds={"EngineCoreRequest", "EngineCoreOutputs"}))
def test_each_dialect_reads_what_the_others_write(dialect: wire.Dialect, vector: Vector) -> None:
    for other in wire.DIALECTS:
        found = differences(expected_value(vector), plain(decode(other, vector)))
        assert not found, "\n".join([repr(other), *found])


def test_a_wrong_vector_is_noticed() -> None:
    """The comparison itself: each single change of an expected value is found."""
    vector = next(v for v in load("0.33.0") if v["name"] == "outputs_everything_else")
    decoded = plain(decode(wire.NEWEST, vector))
    for field, wrong in {"num_nans_in_logits": 3, "trace_headers": {}, "routed_experts": None}.items():
        expected = expected_value(vector)
        expected["outputs"][0][field] = wrong
        assert differences(expected, decoded)


@pytest.mark.parametrize("release", RELEASES)
def test_the_literal_frames(release: str) -> None:
    literal = {v["name"]: frames_of(v) for v in load(release) if v["name"] in LITERALS}
    assert literal == {name: [frame] for name, frame in LITERALS.items()}
    assert wire.is_engine_dead(literal["engine_dead"])
