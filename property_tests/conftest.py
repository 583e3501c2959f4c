"""Property tests get the profiles, loops and leak checks of the other tests; what they did is printed at the end."""

from __future__ import annotations

import faulthandler
from pathlib import Path
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The deep profile has no time limits: how long it takes is for the machine to say, and what it counts is told at
    the end alone."""
    if PROFILE == "deep":
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.timeout(0), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if PROFILE == "deep" and Path(__file__).parent in item.path.parents:
        faulthandler.cancel_dump_traceback_later()  # pytest's own, after which a test is taken for stuck


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:  # pytest-xdist: a worker
        output["tally"] = dict(tally.TALLY)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker counted, told to whoever prints it."""
    tally.TALLY.update(getattr(node, "workeroutput", {}).get("tally", {}))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if found := tally.lines():
        terminalreporter.section(f"property tests: profile {PROFILE}, ANYENGINE_PROPERTY_SEED={SEED}")
        terminalreporter.write("\n".join([*found, ""]))
