"""The interop run against real vLLM. It needs ``ANYENGINE_VLLM_PYTHON``, the interpreter of an environment with vLLM;
``ANYENGINE_VLLM_RELEASES`` may name further releases as ``0.14.0=/unpacked/wheel,...`` (see ``releases.py``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_model import SmolLM2
from vllm_codec import VLLMCodec

INSTALLED = "installed"

LONGEST = (
    "vllm_requests",
    "failures",
    "attach",
    "answers",
    "conformance",
    "async_llm",
    "differential",
    "hurts",
    "operations",
    "liveness",
    "vllm_frontend",
    "arguments",
    "codec",
)
"""Files that take a minute or more, by what is in their names: begun first, or one worker is left alone with one."""


def sources() -> dict[str, Path | None]:
    named = filter(None, os.environ.get("ANYENGINE_VLLM_RELEASES", "").split(","))
    return {INSTALLED: None} | {release: Path(path) for release, _, path in (item.partition("=") for item in named)}


def pytest_configure() -> None:
    if not os.environ.get("ANYENGINE_VLLM_PYTHON"):
        raise pytest.UsageError(
            "tests/interop needs ANYENGINE_VLLM_PYTHON, the interpreter of an environment with vLLM: `nox -s interop`"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.blocking_ok)
    items.sort(key=_turn)  # stable: within a file nothing moves


def _turn(item: pytest.Item) -> int:
    of_ours = Path(__file__).parent in item.path.parents
    return next((i for i, name in enumerate(LONGEST) if of_ours and name in item.path.stem), len(LONGEST))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return os.environ["ANYENGINE_VLLM_PYTHON"]


@pytest.fixture(scope="session")
def smollm2() -> SmolLM2:
    return SmolLM2.found()


@pytest.fixture(scope="module", params=[("asyncio", {}), ("trio", {})], ids=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Two loops: an engine core takes 10 to 20 s to start, and uvloop is tested everywhere else."""
    return request.param


@pytest.fixture(scope="session", params=sources())
def vllm_codec(request: pytest.FixtureRequest, vllm_python: str) -> Iterator[VLLMCodec]:
    """vLLM's own encoder and decoder, once for each release of this run."""
    codec = VLLMCodec(vllm_python, sources()[request.param])
    if request.param != INSTALLED:
        codec.version = request.param  # an unpacked wheel does not always know its own
    yield codec
    codec.close()
