"""The conformance suite on a real vLLM engine core: it passes what applies, and deviates as the table says."""

from __future__ import annotations

import anyio
import pytest
from vllm_engines import make_vllm_model, one_process, tiny_vllm

from anyengine import VLLMEngine
from anyengine.testing.conformance import Outcome, Report, run, select

pytestmark = pytest.mark.timeout(600)  # a minute for both, unless the machine has much else to do


@pytest.fixture(scope="module")
def engine(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> VLLMEngine:
    return tiny_vllm(vllm_python, make_vllm_model(tmp_path_factory.mktemp("model")), env=one_process)


def check(engine: VLLMEngine, backend: str, *only: str, destructive: bool = False) -> Report:
    async def main() -> Report:
        with anyio.fail_after(580):
            return await run(engine, only=only, destructive=destructive, patience_s=60)

    return anyio.run(main, backend=backend)


@pytest.mark.feature("P06")
def test_it_passes_what_applies(engine: VLLMEngine) -> None:
    """One start. The model generates, so pooling is skipped; the CPU build has no LoRA unless it is told to; its model
    runner knows no scores of named tokens of a prompt (LGP-07)."""
    report = check(engine, "asyncio")
    report.raise_for_failures()
    assert [result.check_id for result in report.results] == [item.check_id for item in select()]
    assert not report.of(Outcome.DEVIATES)
    skipped = {result.check_id for result in report.of(Outcome.SKIPPED)}
    assert skipped <= {
        "LGP-07",
        "UTL-11",
        "UTL-24",
        "PAU-11",
        "POL-01",
        "POL-02",
        "POL-03",
        "ABT-01",
        "PAU-02",
        "PAU-07",
    }
    assert len(report.of(Outcome.PASSED)) >= 125
    assert report.facts["vllm_version"].startswith("0.")


@pytest.mark.feature("P06")
def test_it_deviates_as_it_is_known_to(engine: VLLMEngine) -> None:
    """Three starts: deaf, mute, and one that survives odd aborts and then ends as it should."""
    report = check(engine, "trio", "MAL-04", "MAL-11", "MAL-22", "END-02", destructive=True)
    report.raise_for_failures()
    outcomes = {result.check_id: result.outcome for result in report.results}
    assert outcomes == {
        "MAL-04": Outcome.DEVIATES,
        "MAL-11": Outcome.DEVIATES,
        "MAL-22": Outcome.PASSED,
        "END-02": Outcome.PASSED,
    }
    details = {result.check_id: result.detail for result in report.results}
    assert "deaf" in details["MAL-04"] and "mute" in details["MAL-11"]
