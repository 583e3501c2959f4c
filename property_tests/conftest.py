"""Property tests get the profiles, loops and leak checks of the other tests; what they did is printed at the end."""

from __future__ import annotations

from typing import Any

import pytest

import tally
from anyengine.testing._profiles import load_profile
from anyengine.testing.pytest_plugin import *  # noqa: F403 - fixtures and hooks must stand in a conftest's namespace
from budgets import PROFILE, SEED

load_profile()

_LOOPS = {"asyncio": ("asyncio", {}), "uvloop": ("asyncio", {"use_uvloop": True}), "trio": ("trio", {})}


@pytest.fixture(scope="module", params=list(_LOOPS.values()), ids=list(_LOOPS))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """As for the other tests, without asyncio's debug mode: here it would take most of the time."""
    return request.param


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if found := tally.lines():
        terminalreporter.section(f"property tests: profile {PROFILE}, ANYENGINE_PROPERTY_SEED={SEED}")
        terminalreporter.write("\n".join([*found, ""]))
