"""A pytest plugin that takes a feature away for the length of the test that shows it. Used by
``test_disabled_features.py``, in a pytest of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from anyengine import EngineClient, RequestStream, exceptions
from anyengine._client.engines.engine_info import EngineInfo
from anyengine._client.engines.readiness import EngineReadiness
from anyengine._client.requests.admission import Admission
from anyengine._client.requests.deadlines import Deadlines
from anyengine._client.session.events import EventLog
from anyengine._protocol import Connection, RequestRegistry, UtilityRegistry

__all__ = ["DISABLED"]

Patch = pytest.MonkeyPatch


def _no_aborts(patch: Patch) -> None:
    abort = Connection.abort

    def forget(self: Connection, request_ids: Any) -> list[Any]:
        abort(self, request_ids)
        return []

    patch.setattr(Connection, "abort", forget)


def _single_flight(patch: Patch) -> None:
    learn = EngineReadiness.learn_tasks

    async def each_asks(self: EngineReadiness) -> None:
        self._asking = type(self._asking)()
        self._asked = False
        await learn(self)

    patch.setattr(EngineReadiness, "learn_tasks", each_asks)


def _events(patch: Patch) -> None:
    publish = EventLog.publish

    def twice(self: EventLog, event: Any) -> None:
        publish(self, event)
        publish(self, event)

    patch.setattr(EventLog, "publish", twice)


def _late_outputs_count(patch: Patch) -> None:
    dispatch = RequestRegistry.dispatch

    def uncounted(self: RequestRegistry, outputs: Any) -> Any:
        late = self.late_outputs
        failures = dispatch(self, outputs)
        self.late_outputs = late
        return failures

    patch.setattr(RequestRegistry, "dispatch", uncounted)


def _snapshot(patch: Patch) -> None:
    take = EngineInfo.debug_snapshot

    def empty(self: Any) -> Any:
        return type(take(self.core))()

    patch.setattr(EngineClient, "debug_snapshot", empty)


DISABLED: Final[dict[str, tuple[str, Callable[[Patch], None]]]] = {
    "L08": ("tests/client/test_streams.py::test_cancellation_at_every_scheduling_step[trio]", _no_aborts),
    "L09": (
        "tests/client/test_streams.py::test_a_dropped_stream_is_aborted_and_reported[trio]",
        lambda patch: patch.delattr(RequestStream, "__del__"),
    ),
    "L11": ("tests/client/test_streams.py::test_late_outputs_are_dropped_and_counted[trio]", _late_outputs_count),
    "L12": (
        "tests/client/test_deadlines.py::test_nobody_has_to_iterate[virtual]",
        lambda patch: patch.setattr(Deadlines, "watch", lambda *_: None),
    ),
    "L13": (
        "tests/client/test_core_client.py::test_cancelled_calls_are_forgotten_and_their_late_replies_dropped[trio]",
        lambda patch: patch.setattr(UtilityRegistry, "forget", lambda *_: None),
    ),
    "L21": (
        "tests/client/test_admission_limits.py::test_limits_accept_exactly_what_fits_and_send_nothing_else[trio]",
        lambda patch: patch.setattr(Admission, "_bars_sending", lambda *_: None),
    ),
    "L27": (
        "tests/test_exceptions.py::test_code_status_and_retryable[OverloadedError]",
        lambda patch: patch.setattr(exceptions.OverloadedError, "status", 500),
    ),
    "L30": ("tests/client/test_life_events.py::test_a_scripted_life_is_told_event_by_event[trio]", _events),
    "L37": ("tests/client/test_single_flight.py::test_one_hundred_first_requests_ask_once[trio]", _single_flight),
    "L43": ("tests/client/test_accounts.py::test_a_snapshot_names_what_is_held[trio]", _snapshot),
}
"""By row: a test that has its mark, and what takes the feature away."""

_patch = pytest.StashKey[Patch]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    for test, disable in DISABLED.values():
        if item.nodeid == test:
            item.stash[_patch] = patch = pytest.MonkeyPatch()
            disable(patch)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    if (patch := item.stash.get(_patch, None)) is not None:
        patch.undo()
