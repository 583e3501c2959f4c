"""The layout table and what is derived from it; tolerance for longer and shorter arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import anyengine._wire as wire
from anyengine._wire.dialect import Dialect, dialect_for
from anyengine._wire.layouts import OLDEST, ROWS, row_at
from anyengine.exceptions import DecodeError, RemoteProtocolError

NEWEST = wire.NEWEST


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def array_of(frame: Any) -> list[Any]:
    array: list[Any] = msgspec.msgpack.decode(frame)
    return array


@pytest.mark.parametrize("message", ROWS)
def test_the_newest_row_is_the_canonical_struct(message: str) -> None:
    rows = ROWS[message]
    assert rows[-1][1] == getattr(wire, message).__struct_fields__
    assert [since for since, _ in rows] == sorted({since for since, _ in rows})
    assert rows[0][0] == OLDEST


@pytest.mark.feature("O22")
@pytest.mark.parametrize("dialect", wire.DIALECTS, ids=repr)
def test_surplus_positions_are_ignored(dialect: Dialect) -> None:
    future = [None, {"new": [1]}, "x"]
    output = ["r-0", [5], *array_of(encoded(wire.EngineCoreOutput("r-0", [5], finish_reason=1)))[2:], *future]
    message = [3, [output], None, 1.5, None, None, None, None, "v1", *future]
    decoded = dialect.decode_outputs([encoded(message)])
    assert (decoded.engine_index, decoded.weight_version) == (3, "v1")
    assert decoded.outputs == [wire.EngineCoreOutput("r-0", [5], finish_reason=1)]
    request = wire.EngineCoreRequest("r-0", [1, 2], sampling_params=wire.WireSamplingParams(max_tokens=3), priority=2)
    kind, payload = dialect.encode_add(request)
    assert dialect.decode_input([kind, encoded(array_of(payload) + future)]) == request


@pytest.mark.feature("O22")
@pytest.mark.parametrize("dialect", wire.DIALECTS, ids=repr)
def test_missing_positions_take_defaults(dialect: Dialect) -> None:
    short = dialect.decode_outputs([encoded([1, [["r-0", [5]], ["r-1", [], None, None, None, 2]]])])
    assert short == wire.EngineCoreOutputs(
        1, [wire.EngineCoreOutput("r-0", [5]), wire.EngineCoreOutput("r-1", [], finish_reason=2)]
    )
    nine: list[Any] = ["r-0", [1], None, {}, None, 1.0, None, None, None]
    expected = wire.EngineCoreRequest("r-0", [1], sampling_params=wire.WireSamplingParams(), arrival_time=1.0)
    assert dialect.decode_input([b"\x00", encoded(nine)]) == expected


@pytest.mark.feature("O22")
def test_what_was_a_named_tuple_is_tolerant_too() -> None:
    """vLLM is strict about the length of these; a client must not be."""
    triple = ["<i4", [0], msgspec.msgpack.Ext(3, b"")]
    for logprobs in ([triple] * 3, [triple] * 3 + [None, None, "future"]):
        output = wire.NEWEST.decode_outputs([encoded([0, [["r", [1], logprobs, logprobs]]])]).outputs[0]
        assert output.new_logprobs is not None
        assert output.new_logprobs.cu_num_generated_tokens is None
        assert output.new_prompt_logprobs_tensors is not None
        assert output.new_prompt_logprobs_tensors.selected_token_ranks.shape == (0,)


def test_unknown_keys_of_maps_are_ignored() -> None:
    payload = encoded(["r", [1], None, {"temperature": 0, "future": 1}, None, 0.0, None, None, None])
    request = NEWEST.decode_input([b"\x00", payload])
    assert isinstance(request, wire.EngineCoreRequest)
    assert request.sampling_params == wire.WireSamplingParams(temperature=0.0)


@pytest.mark.parametrize("release", [(0, 32, 0), (0, 33, 0)])
def test_each_release_gets_its_own_length(release: tuple[int, int, int]) -> None:
    dialect = next(d for d in wire.DIALECTS if d.since == release)
    message = wire.EngineCoreOutputs(outputs=[wire.EngineCoreOutput("r", [1])])
    [payload] = dialect.encode_outputs(message)
    assert len(array_of(payload)[1][0]) == len(row_at(ROWS["EngineCoreOutput"], release))
    request = wire.EngineCoreRequest("r", [1], pooling_params=wire.WirePoolingParams(task="embed"))
    assert len(array_of(dialect.encode_add(request)[1])[4]) == len(row_at(ROWS["WirePoolingParams"], release))
    assert request.pooling_params == wire.WirePoolingParams(task="embed"), "the caller's struct is left alone"


def test_rows_alone_make_a_dialect_with_other_fields_in_the_middle() -> None:
    """What adding an older release takes: a field less in the middle, and one that the canonical struct never had."""
    canonical = wire.EngineCoreOutput.__struct_fields__
    older = ("request_id", "new_token_ids", "num_cached_tokens", *canonical[2:8], *canonical[10:12])
    rows = {**ROWS, "EngineCoreOutput": (((0, 20, 0), older), *ROWS["EngineCoreOutput"])}
    dialect = Dialect((0, 20, 0), rows)
    headers = {"traceparent": "00-ab"}
    message = wire.EngineCoreOutputs(outputs=[wire.EngineCoreOutput("r", [1], finish_reason=1, trace_headers=headers)])
    [payload] = dialect.encode_outputs(message)
    assert array_of(payload)[1][0] == ["r", [1], None, None, None, None, 1, None, None, headers, None]
    theirs = array_of(payload)
    theirs[1][0][2] = 17
    output: Any = dialect.decode_outputs([encoded(theirs)]).outputs[0]
    assert (output.request_id, output.finish_reason, output.trace_headers) == ("r", 1, headers)
    assert output.num_cached_tokens == 17
    assert (output.kv_transfer_params, output.error, output.num_nans_in_logits) == (None, None, 0)


@pytest.mark.parametrize(
    ("version", "since"),
    [
        (None, NEWEST.since),
        ("0.32.0", (0, 32, 0)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.32.9", (0, 32, 0)),
        ("0.33.0", (0, 33, 0)),
        ("v0.33.1.dev3+g1234", (0, 33, 0)),
        ("1.0", NEWEST.since),
        ("0.1.dev12+gabc", NEWEST.since),
        ("dev", NEWEST.since),
        ("", NEWEST.since),
    ],
)
def test_the_dialect_for_a_version(version: str | None, since: tuple[int, int, int]) -> None:
    assert dialect_for(version).since == since


def test_a_version_that_is_too_old_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"0\.31\.0.*speaks 0\.32\.0 and later"):
        dialect_for("0.31.0")


def test_the_ready_message() -> None:
    assert wire.decode_ready(b"") is None
    assert wire.decode_ready(encoded({"max_model_len": 8, "future": 1})) == wire.EngineCoreReadyResponse(8)
    with pytest.raises(DecodeError, match="max_model_len"):
        wire.decode_ready(encoded({"num_gpu_blocks": 8}))


@pytest.mark.parametrize(("rank", "identity"), [(0, b"\x00\x00"), (1, b"\x01\x00"), (258, b"\x02\x01")])
def test_engine_identities(rank: int, identity: bytes) -> None:
    assert wire.engine_identity(rank) == identity
    assert wire.rank_of(identity) == rank
    assert wire.rank_of(memoryview(identity)) == rank


def test_bad_engine_identities() -> None:
    for rank in (-1, 65536):
        with pytest.raises(ValueError, match="rank"):
            wire.engine_identity(rank)
    with pytest.raises(DecodeError, match="2 bytes"):
        wire.rank_of(b"\x00")
