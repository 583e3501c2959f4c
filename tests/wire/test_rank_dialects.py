"""Several engines behind one socket, each in its own dialect, which becomes known as they speak."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import anyengine._wire as wire
from anyengine._wire.positions import peek_rank
from anyengine.exceptions import DecodeError


def batch(rank: int, token: int = 5) -> wire.EngineCoreOutputs:
    stats = wire.PrefillStats(num_cached_tokens=3)
    return wire.EngineCoreOutputs(rank, [wire.EngineCoreOutput("r", [token], finish_reason=1, prefill_stats=stats)])


def cached(message: wire.EngineCoreOutputs) -> int:
    stats = message.outputs[0].prefill_stats
    assert stats is not None
    return stats.num_cached_tokens


@pytest.mark.feature("D26")
def test_engines_of_different_releases_answer_on_one_socket() -> None:
    versions = {0: "0.32.0", 1: "0.33.0", 2: "0.12.0", 3: "0.16.0", 300: "0.20.2", 70: "0.26.0"}
    dialects = {rank: wire.dialect_for(version) for rank, version in versions.items()}
    reader = wire.RankDialects(dialects)
    for _ in range(2):
        for rank, dialect in dialects.items():
            message = reader.decode_outputs(dialect.encode_outputs(batch(rank)))
            assert (message.engine_index, cached(message), message.outputs[0].finish_reason) == (rank, 3, 1)
    assert dict(reader) == dialects and len(reader) == 6
    assert not reader.warnings


@pytest.mark.feature("D26")
def test_each_rank_is_told_in_its_own_dialect() -> None:
    reader = wire.RankDialects({0: wire.dialect_for("0.16.0"), 1: wire.NEWEST})
    request = wire.EngineCoreRequest("r", [1], sampling_params=wire.WireSamplingParams(eos_token_id=2))
    lengths = [len(msgspec.msgpack.decode(reader[rank].encode_add(request)[1])) for rank in (0, 1)]
    assert lengths == [18, 22]
    assert [reader[rank].utility_arity("pause_scheduler") for rank in (0, 1)] == [0, 2]


@pytest.mark.parametrize(
    ("version", "since"),
    [("0.12.0", (0, 12, 0)), ("0.15.0", (0, 14, 0)), ("0.16.0", (0, 16, 0)), ("0.19.1", (0, 17, 0))],
)
def test_a_silent_engine_becomes_known(version: str, since: tuple[int, int, int]) -> None:
    engine = wire.dialect_for(version)
    reader = wire.RankDialects({0: wire.select_dialect(None)})
    probe = reader[0].probe
    assert probe is not None
    reply = wire.EngineCoreOutputs(0, utility_output=wire.UtilityOutput(1, None, value := False))
    decoded = reader.decode_outputs(engine.encode_outputs(reply))
    assert decoded.utility_output is not None and decoded.utility_output.result is value
    reader.probed(0, found=engine.utility_arity(probe) is not None)
    assert cached(reader.decode_outputs(engine.encode_outputs(batch(0)))) == 3
    assert reader[0].since == since
    assert cached(reader.decode_outputs(engine.encode_outputs(batch(0)))) == 3


@pytest.mark.feature("O22")
def test_more_positions_than_known_are_warned_of_once() -> None:
    [frame] = wire.NEWEST.encode_outputs(batch(0))
    array = msgspec.msgpack.decode(frame)
    array[1][0] += [None, {"new": 1}]
    longer = [msgspec.msgpack.encode(array)]
    reader = wire.RankDialects({0: wire.NEWEST, 1: wire.NEWEST})
    for _ in range(3):
        (output,), (known,) = reader.decode_outputs(longer).outputs, batch(0).outputs
        assert all(getattr(output, name) == getattr(known, name) for name in known.__struct_fields__)
        assert (output.surplus, known.surplus) == ({"position_20": {"new": 1}}, {})
    assert len(reader.warnings) == 1
    assert "EngineCoreOutput has 21 positions, of which 19 are known" in reader.warnings[0]
    assert "engine 0" in reader.warnings[0]
    array[0] = 1
    array[1][0] = array[1][0][:-2]
    array += [None, 7]
    reader.decode_outputs([msgspec.msgpack.encode(array)])
    assert len(reader.warnings) == 2
    assert "EngineCoreOutputs has 11 positions, of which 9 are known" in reader.warnings[1]


def test_after_the_first_outputs_nothing_is_counted_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = wire.RankDialects({0: wire.NEWEST, 1: wire.NEWEST})
    frames = {rank: wire.NEWEST.encode_outputs(batch(rank)) for rank in (0, 1)}
    for rank in (0, 1):
        reader.decode_outputs(frames[rank])

    def counted(_: Any) -> Any:
        raise AssertionError("counted again")

    monkeypatch.setattr("anyengine._wire.rank_dialects.positions", counted)
    monkeypatch.setattr("anyengine._wire.rank_dialects.peek_rank", counted)
    assert [reader.decode_outputs(frames[rank]).engine_index for rank in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    "frames", [[], [b""], [b"\xc1"], [b"\x80"], [b"\x99"], [b"\x91\xcd\x01"], [b"\xdc\x00\x01\xa1x"]]
)
def test_what_nobody_can_have_sent_is_a_decode_error(frames: list[bytes]) -> None:
    reader = wire.RankDialects({0: wire.dialect_for("0.16.0"), 1: wire.NEWEST})
    with pytest.raises(DecodeError):
        reader.decode_outputs(frames)


def test_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="rank"):
        wire.RankDialects({})


@pytest.mark.parametrize("rank", [0, 1, 127, 128, 255, 256, 65535])
@pytest.mark.parametrize("length", [1, 9, 15, 16, 40])
def test_the_rank_is_read_from_the_first_bytes(rank: int, length: int) -> None:
    payload = msgspec.msgpack.encode([rank, *[None] * (length - 1)])
    assert peek_rank(payload) == rank
    assert peek_rank(memoryview(payload)) == rank


@pytest.mark.parametrize("value", [{"a": 1}, [], "x", ["x"], [-1], [None], [1 << 20], 3])
def test_no_rank_where_there_is_none(value: Any) -> None:
    assert peek_rank(msgspec.msgpack.encode(value)) is None


@pytest.mark.parametrize("dialect", wire.DIALECTS, ids=repr)
def test_the_outputs_of_every_release_answer_alike(dialect: wire.Dialect) -> None:
    """To every attribute that the newest have, those that are no field included."""
    [output] = dialect.decode_outputs(dialect.encode_outputs(batch(0))).outputs
    known = wire.EngineCoreOutput("x", [])
    for name in dir(known):
        if not name.startswith("_"):
            getattr(output, name)
    assert output.surplus == {}
