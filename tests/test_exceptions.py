"""The error taxonomy: what every public error says of itself, as a table."""

from __future__ import annotations

import copy
import pickle

import pytest

import anyengine
from anyengine.exceptions import EngineError, OverloadedError, RequestFailed

TABLE: dict[str, tuple[str, int, bool]] = {  # code, HTTP status, retryable
    "ClientClosedError": ("client_closed", 503, False),
    "ClientFailedError": ("client_failed", 500, False),
    "DecodeError": ("decode_failed", 502, False),
    "DrainTimeout": ("drain_timeout", 504, False),
    "EncodeError": ("encode_failed", 400, False),
    "EngineAsleepError": ("engine_asleep", 503, True),
    "EngineDeadError": ("engine_dead", 503, True),
    "EngineError": ("engine_error", 500, False),
    "EngineStartupError": ("startup_failed", 503, False),
    "EngineUnresponsiveError": ("engine_unresponsive", 503, True),
    "LocalProtocolError": ("local_protocol_error", 500, False),
    "OutputProcessingError": ("output_processing_failed", 500, False),
    "OverloadedError": ("overloaded", 429, True),
    "ProtocolError": ("protocol_error", 500, False),
    "QuotaExceededError": ("quota_exceeded", 429, True),
    "RemoteProtocolError": ("remote_protocol_error", 502, False),
    "RequestError": ("request_error", 500, False),
    "RequestFailed": ("request_failed", 500, False),
    "RequestRejected": ("request_rejected", 400, False),
    "RequestTimeout": ("request_timeout", 504, False),
    "StartupTimeout": ("startup_timeout", 504, False),
    "UtilityError": ("utility_failed", 500, False),
    "UtilityRejected": ("utility_rejected", 400, False),
    "UtilityTimeout": ("utility_timeout", 504, False),
    "WrongLoopError": ("wrong_loop", 500, False),
}

PUBLIC: dict[str, type[EngineError]] = {
    name: value
    for name in anyengine.__all__
    if isinstance(value := getattr(anyengine, name), type) and issubclass(value, EngineError)
}


@pytest.mark.feature("L27")
@pytest.mark.parametrize("name", sorted({*TABLE, *PUBLIC}))
def test_code_status_and_retryable(name: str) -> None:
    error = PUBLIC[name]("it went wrong")
    assert (error.code, error.status, error.retryable) == TABLE[name]
    assert (error.rank, error.request_id, error.outcomes) == (None, None, None)


@pytest.mark.parametrize("kind", [anyengine.RequestRejected, anyengine.UtilityRejected])
def test_a_refusal_ends_with_its_remedy(kind: type[anyengine.RequestRejected | anyengine.UtilityRejected]) -> None:
    """A log shows no attributes."""
    error = kind("n=0 is out of range", parameter="n", value=0, remedy="use 1")
    assert (
        str(error) == str(error.for_waiter()) == str(pickle.loads(pickle.dumps(error))) == "n=0 is out of range: use 1"
    )
    assert str(kind("n=0; use 1", remedy="use 1")) == "n=0; use 1"


@pytest.mark.feature("L27")
def test_codes_are_unique() -> None:
    assert len({code for code, _, _ in TABLE.values()}) == len(TABLE)


@pytest.mark.feature("L27")
@pytest.mark.parametrize(
    ("code", "retryable", "status"),
    [("engine_paused", True, 503), ("validation_error", False, 400), ("out_of_memory", False, 500), (None, True, 503)],
)
def test_an_engines_own_codes(code: str | None, retryable: bool, status: int) -> None:
    error = RequestFailed("no", code=code, retryable=retryable, request_id="mine")
    assert (error.code, error.status, error.retryable) == (code or "request_failed", status, retryable)
    assert error.request_id == "mine"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_what_was_learnt_later_survives(name: str) -> None:
    error = PUBLIC[name]("it went wrong")
    error.rank, error.request_id, error.outcomes = 3, "mine", {0: "done"}
    for twin in (error.for_waiter(), copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error) and str(twin) == str(error)
        assert (twin.rank, twin.request_id, twin.outcomes) == (3, "mine", {0: "done"})
        assert (twin.code, twin.status, twin.retryable) == TABLE[name]


def test_when_to_come_back() -> None:
    assert OverloadedError("full", retry_after_s=1.5).retry_after_s == 1.5
