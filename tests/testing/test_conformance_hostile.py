"""The conformance suite on engines that are worse than wrong: there is always a report, and it costs no memory."""

from __future__ import annotations

import anyio
import pytest
from engines import misbehaving

from anyengine.testing.conformance import Outcome, run

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("what", ["hellos", "registers on and on", "nested", "old and silent", "no end of room"])
async def test_there_is_always_a_report(what: str) -> None:
    only = ["HS-*", "REQ-05", "MAL-16"]
    with anyio.fail_after(50):
        report = await run(
            misbehaving("broken_under_check", what), only=only, destructive=True, patience_s=0.5, startup_timeout_s=10
        )
    assert report.of(Outcome.FAILED)
    assert not [result for result in report.results if "stumbled" in result.detail]
    assert len(report.to_json()) < 100_000
