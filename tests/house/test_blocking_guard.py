"""The guard that keeps blocking calls out of the event loop's thread."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import anyio.to_thread
import pytest
from blockbuster import BlockingError

pytestmark = pytest.mark.anyio


def code_of_ours(package_root: Path, source: str) -> ModuleType:
    """A module that seems to stand in the package."""
    module = ModuleType("anyengine.planted")
    exec(compile(source, str(package_root / "planted.py"), "exec"), module.__dict__)
    return module


@pytest.mark.feature("P15")
async def test_a_planted_sleep_is_caught() -> None:
    with pytest.raises(BlockingError, match=r"time\.sleep"):
        time.sleep(0.001)  # noqa: ASYNC251 - planted


@pytest.mark.feature("P15")
async def test_a_blocking_call_of_ours_is_caught(package_root: Path) -> None:
    planted = code_of_ours(package_root, "import os\ndef look():\n    return os.listdir('/')\n")
    with pytest.raises(BlockingError, match=r"os\.listdir"):
        planted.look()


async def test_a_worker_thread_may_block() -> None:
    await anyio.to_thread.run_sync(time.sleep, 0.001)


@pytest.mark.blocking_ok
async def test_a_marked_test_may_block() -> None:
    time.sleep(0.001)  # noqa: ASYNC251 - planted
