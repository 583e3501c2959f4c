"""The layout table and what is derived from it; tolerance for longer and shorter arrays."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import anyengine._wire as wire
from anyengine._wire.dialect import CANONICAL, Dialect
from anyengine._wire.layouts import LEGACY, LOSABLE, OLDEST, ROWS, last_names, shared_names, versions_of
from anyengine.exceptions import DecodeError, EncodeError

NEWEST = wire.NEWEST


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def array_of(frame: Any) -> list[Any]:
    array: list[Any] = msgspec.msgpack.decode(frame)
    return array


@pytest.mark.parametrize("message", CANONICAL)
def test_the_newest_row_is_the_canonical_struct(message: str) -> None:
    if message in ROWS:
        rows = ROWS[message]
        assert rows[-1][1] == CANONICAL[message].__struct_encode_fields__
        assert [since for since, _ in rows] == sorted({since for since, _ in rows})


def test_the_table_speaks_of_what_there_is() -> None:
    assert OLDEST == (0, 12, 0)
    assert ROWS.keys() - CANONICAL.keys() == {"MultiModalFieldElem", "BaseMultiModalField"}
    for message, names in LOSABLE.items():
        assert names <= set(CANONICAL[message].__struct_encode_fields__)
    carried = {name for rows in ROWS.values() for _, names in rows for name in names}
    assert LEGACY.keys() <= carried


def test_reading_the_table() -> None:
    rows = (((0, 1, 0), ("a", "b", "c")), ((0, 2, 0), ("a", "x", "b", "c")), ((0, 3, 0), ("a", "x", "b")))
    assert versions_of(rows, (0, 1, 5), (0, 3, 0)) == list(rows[:2])
    assert versions_of(rows, (0, 0, 1), (0, 1, 0)) == [rows[0]], "a message that was not there yet"
    assert last_names(rows, (0, 1, 0), None) == ("a", "x", "b")
    assert last_names(rows, (0, 2, 1), (0, 3, 0)) == ("a", "x", "b", "c")
    assert shared_names(rows, (0, 1, 0), None) == ("a",)
    assert shared_names(rows, (0, 2, 0), None) == ("a", "x", "b")


# Of engines that speak this layout or one that only has less at the end.
CURRENT = [dialect for dialect in wire.DIALECTS if dialect.since >= (0, 32, 0)]


@pytest.mark.feature("O22")
@pytest.mark.parametrize("dialect", CURRENT, ids=repr)
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
@pytest.mark.parametrize("dialect", CURRENT, ids=repr)
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


@pytest.mark.parametrize("dialect", wire.DIALECTS, ids=repr)
def test_each_release_gets_its_own_length(dialect: Dialect) -> None:
    def length(message: str) -> int:
        return len(last_names(ROWS[message], dialect.since, dialect.until))

    message = wire.EngineCoreOutputs(outputs=[wire.EngineCoreOutput("r", [1])])
    [payload] = dialect.encode_outputs(message)
    assert len(array_of(payload)[1][0]) == length("EngineCoreOutput")
    pooling = wire.WirePoolingParams(task="embed")
    request = wire.EngineCoreRequest("r", [1], pooling_params=pooling, lora_request=wire.WireLoRARequest("a", 1, "/a"))
    array = array_of(dialect.encode_add(request)[1])
    names = last_names(ROWS["EngineCoreRequest"], dialect.since, dialect.until)
    assert len(array) == len(names)
    assert len(array[names.index("pooling_params")]) == length("PoolingParams")
    assert len(array[names.index("lora_request")]) == length("LoRARequest")
    assert request.pooling_params == wire.WirePoolingParams(task="embed"), "the caller's struct is left alone"


def test_rows_alone_make_a_dialect() -> None:
    """What adding a release takes: a field less in the middle, and one that the canonical struct never had."""
    canonical = wire.EngineCoreOutput.__struct_fields__
    other = ("request_id", "new_token_ids", "surprise", *canonical[2:8], *canonical[10:12])
    rows = {**ROWS, "EngineCoreOutput": (*ROWS["EngineCoreOutput"], ((0, 34, 0), other))}
    dialect = Dialect((0, 34, 0), None, rows)
    headers = {"traceparent": "00-ab"}
    message = wire.EngineCoreOutputs(outputs=[wire.EngineCoreOutput("r", [1], finish_reason=1, trace_headers=headers)])
    [payload] = dialect.encode_outputs(message)
    assert array_of(payload)[1][0] == ["r", [1], None, None, None, None, 1, None, None, headers, None]
    theirs = array_of(payload)
    theirs[1][0][2] = 17
    output: Any = dialect.decode_outputs([encoded(theirs)]).outputs[0]
    assert (output.request_id, output.finish_reason, output.trace_headers) == ("r", 1, headers)
    assert output.surprise == 17
    assert (output.kv_transfer_params, output.error, output.num_nans_in_logits) == (None, None, 0)


def test_what_moved_is_found_where_it_is_today() -> None:
    """Up to 0.19.1 an output counts its cached tokens itself; up to 0.16 the end-of-sequence id is the request's."""
    old = wire.dialect_for("0.19.0")
    stats = wire.PrefillStats(num_cached_tokens=5, num_external_cached_tokens=2)
    frames = old.encode_outputs(wire.EngineCoreOutputs(outputs=[wire.EngineCoreOutput("r", [1], prefill_stats=stats)]))
    assert array_of(frames[0])[1][0][10:12] == [5, 2]
    assert old.decode_outputs(frames).outputs[0].prefill_stats == stats
    params = wire.WireSamplingParams(eos_token_id=2)
    array = array_of(wire.dialect_for("0.16.0").encode_add(wire.EngineCoreRequest("r", [1], sampling_params=params))[1])
    assert array[5] == 2 and "_eos_token_id" not in array[3]


SAMPLING = wire.WireSamplingParams()


@pytest.mark.parametrize(
    ("version", "changes", "field"),
    [
        ("0.20.2", {"abort_immediately": True}, "abort_immediately"),
        ("0.14.0", {"resumable": True}, "resumable"),
        ("0.18.0", {"sampling_params": wire.WireSamplingParams(thinking_token_budget=5)}, "thinking_token_budget"),
        (
            "0.31.0",
            {"sampling_params": wire.WireSamplingParams(prompt_logprob_token_ids=wire.Tensor("<i4", (1, 1), bytes(4)))},
            "prompt_logprob_token_ids",
        ),
        ("0.21.0", {"lora_request": wire.WireLoRARequest("a", 1, "/a", is_3d_lora_weight=True)}, "is_3d_lora_weight"),
        (
            "0.17.0",
            {
                "pooling_params": wire.WirePoolingParams(
                    late_interaction_params=wire.WireLateInteractionParams("m", "k")
                )
            },
            "late_interaction_params",
        ),
    ],
)
def test_what_a_release_has_no_place_for_is_refused(version: str, changes: dict[str, Any], field: str) -> None:
    request = msgspec.structs.replace(wire.EngineCoreRequest("r", [1], sampling_params=SAMPLING), **changes)
    wire.NEWEST.encode_add(request)
    with pytest.raises(EncodeError, match=field) as caught:
        wire.dialect_for(version).encode_add(request)
    [top] = changes
    assert caught.value.field == (field if top == field else f"{top}.{field}")


def test_hints_and_labels_may_be_lost() -> None:
    request = wire.EngineCoreRequest(
        "r",
        [1],
        sampling_params=wire.WireSamplingParams(watermarking=False, stream_interval=4, skip_clone=True),
        trace_headers={"traceparent": "00-ab"},
        external_req_id="e",
        session_id="s",
        kv_hints=wire.KvHintsEnvelope("1", "m", []),
    )
    assert array_of(wire.dialect_for("0.13.0").encode_add(request)[1])[3] == {}


def multimodal_request() -> wire.EngineCoreRequest:
    tensor = wire.Tensor("float32", (2, 40), bytes(320))
    data = {
        "pixels": wire.MultiModalFieldElem([tensor, 1.5], wire.MultiModalField("batched", {"keep_on_cpu": False})),
        "grid": wire.MultiModalFieldElem(
            tensor, wire.MultiModalField("flat", {"keep_on_cpu": False, "slices": [[0, 2, None]], "dim": 1})
        ),
    }
    position = wire.PlaceholderRange(1, 2)
    features = [
        wire.MultiModalFeatureSpec(data, "image", "id-1", position),
        wire.MultiModalFeatureSpec(None, "image", "id-2", position),
    ]
    return wire.EngineCoreRequest("r", [1, 2, 3], mm_features=features, sampling_params=SAMPLING)


def test_multimodal_items_of_old_releases_are_lists() -> None:
    request = multimodal_request()
    kind, payload, *aux = wire.dialect_for("0.15.0").encode_add(request)
    cached, absent = array_of(payload)[2][0], array_of(payload)[2][1]
    assert [(elem["modality"], elem["key"]) for elem in cached["data"]] == [("image", "pixels"), ("image", "grid")]
    assert [elem["field"] for elem in cached["data"]] == [
        ["batched", {"keep_on_cpu": False}],
        ["flat", {"keep_on_cpu": False, "slices": [[0, 2, None]], "dim": 1}],
    ]
    assert (absent["data"], absent["mm_hash"], len(aux)) == (None, None, 2)
    kind, payload, *aux = wire.dialect_for("0.12.0").encode_add(request)
    cached = array_of(payload)[2][0]
    assert [elem["field"] for elem in cached["data"]] == [["batched"], ["flat", [[0, 2, None]], 1]]
    assert "mm_hash" not in cached and kind == b"\x00"


def test_multimodal_items_are_refused_where_their_form_is_unknown() -> None:
    unknown = wire.select_dialect(None).probed(found=False)
    with pytest.raises(EncodeError, match="mm_features") as caught:
        unknown.encode_add(multimodal_request())
    assert caught.value.field == "mm_features"


def test_the_ready_message() -> None:
    assert wire.decode_ready(b"") is None
    ready = wire.decode_ready(encoded({"max_model_len": 8, "future": 1}))
    assert ready == wire.EngineCoreReadyResponse(8)
    assert ready is not None and ready.received == {"max_model_len": 8, "future": 1}
    assert wire.EngineCoreReadyResponse(8).received == {}
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


def test_a_value_that_cannot_be_compared_is_refused_like_any_other() -> None:
    """Where a release has no place for a field, even an array, whose comparison is an array, is an EncodeError."""
    import numpy as np

    request = wire.EngineCoreRequest("r", [1], sampling_params=wire.WireSamplingParams())
    request.sampling_params.routed_experts_prompt_start = np.array([1, 2])  # type: ignore[union-attr,assignment]
    with pytest.raises(EncodeError, match="routed_experts_prompt_start"):
        wire.dialect_for("0.14.0").encode_add(request)
