"""The conformance suite on our engine core with a real (tiny) model: once, since most of it is torch."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from tiny_models import make_tiny_model

from anyengine import EmbeddedEngine
from anyengine.testing.conformance import Outcome, Report, registered, run


@pytest.mark.slow
def test_our_engine_core_passes_with_a_model(tmp_path: Path) -> None:
    """Nothing that the toy model passes by being a toy: sampling, stopping, batches. Malformed input included."""
    model = make_tiny_model("qwen2", tmp_path / "model")
    engine = EmbeddedEngine(model=str(model), max_num_seqs=16, max_model_len=256, num_threads=1)
    families = sorted({f"{check.family}-*" for check in registered()} - {"END-*"})

    async def main() -> Report:
        with anyio.fail_after(280):
            return await run(engine, only=families, destructive=True, patience_s=60)

    report = anyio.run(main, backend="trio")
    report.raise_for_failures()
    skipped = {result.check_id.partition("-")[0] for result in report.of(Outcome.SKIPPED)}
    assert not skipped & {"HS", "REQ", "SMP", "LOD"}
