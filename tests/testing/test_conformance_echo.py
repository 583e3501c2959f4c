"""The engine of one's own in the documentation is one: it passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from anyengine import EmbeddedEngine, EngineClient, SamplingParams
from anyengine.testing.conformance import Outcome, run

ECHO = EmbeddedEngine(runner="echo_runner:create_runner")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example, where the engine's process finds it."""
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}:{root / 'docs' / 'examples'}")
    return root / "docs" / "examples" / "echo_runner.py"


def test_it_passes_the_conformance_suite(example: Path) -> None:
    async def check() -> None:
        with anyio.fail_after(240):
            report = await run(ECHO)
        report.raise_for_failures()
        assert len(report.of(Outcome.PASSED)) > 100

    assert sum(1 for line in example.read_text().splitlines() if line.strip()) <= 50
    anyio.run(check)


def test_it_echoes(example: Path) -> None:
    async def ask() -> list[int]:
        with anyio.fail_after(60):
            async with EngineClient(engine=ECHO) as client:
                params = SamplingParams(max_tokens=5, temperature=0.0)
                return [token async for out in client.generate([1, 2, 3], params) for token in out.token_ids]

    assert anyio.run(ask) == [1, 2, 3, 1, 2]
