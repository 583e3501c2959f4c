"""Which class an engine message is of, one frame of each; finish reasons, known and unknown."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

import anyengine._wire as wire
from anyengine._wire import EngineCoreOutput, EngineCoreOutputs, OutputsKind, SchedulerStats, UtilityOutput

MESSAGES = [
    (OutputsKind.BATCH, EngineCoreOutputs(outputs=[EngineCoreOutput("r", [1])], weight_version="v1")),
    (OutputsKind.BATCH, EngineCoreOutputs(scheduler_stats=SchedulerStats(num_running_reqs=2))),
    (OutputsKind.BATCH, EngineCoreOutputs(finished_requests={"r"})),
    (OutputsKind.BATCH, EngineCoreOutputs()),
    (OutputsKind.WAVE, EngineCoreOutputs(wave_complete=0)),
    (OutputsKind.WAVE, EngineCoreOutputs(start_wave=0, engine_index=1)),
    (OutputsKind.UTILITY_REPLY, EngineCoreOutputs(utility_output=UtilityOutput(2**64 - 1, None, [True, None]))),
    (OutputsKind.UTILITY_REPLY, EngineCoreOutputs(utility_output=UtilityOutput(7, "Call to x method failed: boom"))),
    (OutputsKind.EEP_NOTIFICATION, EngineCoreOutputs(utility_output=UtilityOutput(-1, None, ["SHUTDOWN_COMPLETE", 3]))),
    (OutputsKind.FAULT_STATUS, EngineCoreOutputs(utility_output=UtilityOutput(-2, None, {"id": 1}))),
]


@pytest.mark.feature("O21")
@pytest.mark.parametrize("dialect", wire.DIALECTS, ids=repr)
@pytest.mark.parametrize(("kind", "message"), MESSAGES, ids=lambda value: getattr(value, "name", ""))
def test_each_class_is_told_from_its_frame(
    dialect: wire.Dialect, kind: OutputsKind, message: EngineCoreOutputs
) -> None:
    frames = dialect.encode_outputs(message)
    assert not wire.is_engine_dead(frames)
    decoded = dialect.decode_outputs(frames)
    assert wire.classify(decoded) is kind
    for field in ("engine_index", "utility_output", "finished_requests", "wave_complete", "start_wave"):
        assert getattr(decoded, field) == getattr(message, field)
    assert [output.request_id for output in decoded.outputs] == [output.request_id for output in message.outputs]


@pytest.mark.feature("O21")
def test_the_dead_sentinel_is_told_before_decoding() -> None:
    assert wire.is_engine_dead([b"ENGINE_CORE_DEAD"])
    assert wire.is_engine_dead([memoryview(b"ENGINE_CORE_DEAD")])
    assert not wire.is_engine_dead([b"ENGINE_CORE_DEAD", b""])
    assert not wire.is_engine_dead([b"ENGINE_CORE_DEAF"])
    assert not wire.is_engine_dead([])


def test_success_with_no_value_is_not_failure() -> None:
    payload: Any = msgspec.msgpack.decode(
        wire.NEWEST.encode_outputs(EngineCoreOutputs(utility_output=UtilityOutput(1)))[0]
    )
    assert payload[4] == [1, None, [None, None]]
    failed = EngineCoreOutputs(utility_output=UtilityOutput(1, "no", "ignored"))
    payload = msgspec.msgpack.decode(wire.NEWEST.encode_outputs(failed)[0])
    assert payload[4] == [1, "no", None]
    assert failed.utility_output == UtilityOutput(1, "no", "ignored"), "the caller's struct is left alone"


def test_an_unknown_finish_reason_does_not_cost_the_batch() -> None:
    outputs = [["r-0", [1], None, None, None, 9], ["r-1", [2], None, None, None, 0]]
    decoded = wire.NEWEST.decode_outputs([msgspec.msgpack.encode([0, outputs])]).outputs
    assert [wire.finish_reason_name(output.finish_reason) for output in decoded] == ["unknown:9", "stop"]


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, None), (0, "stop"), (1, "length"), (2, "abort"), (3, "error"), (4, "repetition"), (-1, "unknown:-1")],
)
def test_finish_reason_names(value: int | None, name: str | None) -> None:
    assert wire.finish_reason_name(value) == name
