"""What is done again after a failure: the checks of the choices, and the delays that follow from them."""

from __future__ import annotations

from typing import Any

import pytest

from anyengine import RestartPolicy, RetryPolicy


def test_delays_grow_up_to_a_limit() -> None:
    policy = RestartPolicy(backoff_s=1, backoff_factor=3, max_backoff_s=10, jitter=0.5)
    assert [policy.delay_s(attempt, 0.0) for attempt in (1, 2, 3, 4, 10_000)] == [1, 3, 9, 10, 10]
    assert [policy.delay_s(attempt, 1.0) for attempt in (1, 2, 3, 4, 10_000)] == [0.5, 1.5, 4.5, 5, 5]
    assert RetryPolicy(jitter=0).delay_s(1, 1.0) == 0.1


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (RestartPolicy, {"max_restarts": 0}),
        (RestartPolicy, {"max_restarts": 1.5}),
        (RestartPolicy, {"window_s": 0}),
        (RestartPolicy, {"in_flight": "drop"}),
        (RestartPolicy, {"while_down": "hope"}),
        (RestartPolicy, {"backoff_s": -1}),
        (RestartPolicy, {"backoff_s": float("nan")}),
        (RestartPolicy, {"max_backoff_s": float("inf")}),
        (RestartPolicy, {"backoff_factor": 0.5}),
        (RestartPolicy, {"jitter": 1.5}),
        (RetryPolicy, {"max_attempts": 0}),
        (RetryPolicy, {"jitter": -0.1}),
    ],
)
def test_what_makes_no_sense_is_refused(kind: type[RestartPolicy | RetryPolicy], wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        kind(**wrong)
